"""Tests for the installer of locks, the parts that need no network."""

from importlib import metadata, util
import pathlib
import re
import shutil
import zipfile

import pytest

from paxon.third_party.python import install


def _entry(pin: str) -> str:
  return f"{pin} \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n"


def test_reads_pins_that_apply():
  lock = (
    "# by uv\n"
    + _entry("Absl-Py==2.5.1")
    + _entry("etils[epath]==1.15.0")
    + _entry("etils[epy]==1.15.0 ; python_full_version >= '3.0'")
    + _entry("jax==0.1 ; python_full_version < '3.0'")
    + _entry("jax==0.2 ; python_full_version >= '3.0'")
    + _entry("colorama==0.4.6 ; sys_platform == 'win32'")
  )
  pins = install.read_lock(lock)
  assert {name: pin.version for name, pin in pins.items()} == {
    "absl_py": "2.5.1",
    "etils": "1.15.0",
    "jax": "0.2",
  }
  assert pins["etils"].extras == {"epath", "epy"}
  assert pins["jax"].text.count("--hash") == 2


@pytest.mark.parametrize(
  ("lock", "message"),
  [
    pytest.param(
      _entry("jax>=0.1"), "`jax>=0.1` must be pinned as", id="range"
    ),
    pytest.param(_entry("jax==0.*"), "must be pinned", id="wildcard"),
    pytest.param(
      "jax==0.1\n", "`jax==0.1` must be pinned as .* --hash", id="no hash"
    ),
    pytest.param(
      _entry("jax==0.1") + _entry("jax==0.2"), "two pins", id="twice"
    ),
  ],
)
def test_refuses_what_is_not_pinned(lock, message):
  with pytest.raises(install.LockError, match=message):
    install.read_lock(lock)


def test_base_pins_are_left_to_the_base():
  base = install.read_lock(_entry("numpy==2.0"))
  pins = install.read_lock(_entry("numpy==2.0") + _entry("seqio==0.0.20"))
  assert list(install.without_base(pins, base)) == ["seqio"]


def test_base_pins_must_agree():
  base = install.read_lock(_entry("numpy==2.0"))
  with pytest.raises(
    install.LockError, match=r"`numpy` is pinned to 2.1, but .* has 2.0"
  ):
    install.without_base(install.read_lock(_entry("numpy==2.1")), base)


def test_pins_must_agree_with_every_base(tmp_path, monkeypatch):
  locks = {
    "own": _entry("jinja2==3.0") + _entry("numpy==2.0"),
    "core": _entry("numpy==2.0"),
    "text": _entry("jinja2==3.1"),
  }
  for name, text in locks.items():
    (tmp_path / name).write_text(text)
  monkeypatch.chdir(tmp_path)
  bases = ["--base-lock", "pypi=core", "--base-lock", "pypi_text=text"]
  with pytest.raises(
    install.LockError, match=r"`jinja2` is pinned to 3.0, .*@pypi_text has 3.1"
  ):
    install.main(["--lock", "own", *bases])
  # Nothing is left to install.
  (tmp_path / "own").write_text(_entry("jinja2==3.1") + _entry("numpy==2.0"))
  install.main(["--lock", "own", *bases])
  assert "py_library" not in (tmp_path / "BUILD.bazel").read_text()


def test_dependencies_follow_markers_and_extras():
  requires = [
    "numpy>=1",
    "Typing-Extensions",
    "colorama; sys_platform == 'win32'",
    "fsspec; extra == 'epath'",
    "torch; extra == 'torch'",
    "tensorflow",
    "cuda",
    "etils[enp]",
  ]
  known = {
    "numpy": "@pypi//:numpy",
    "typing_extensions": ":typing_extensions",
    "fsspec": ":fsspec",
    "tensorflow_cpu": ":tensorflow_cpu",
    "etils": "@pypi//:etils",
    "einops": ":einops",
  }
  base_requires = {
    "etils": ["einops; extra == 'enp'", "zipp; extra == 'epath'", "absl-py"]
  }
  labels = install.dependencies(
    requires,
    ["epath"],
    known,
    {"tensorflow": "tensorflow_cpu", "cuda": ""},
    base_requires,
  )
  assert labels == [
    ":einops",
    ":fsspec",
    ":tensorflow_cpu",
    ":typing_extensions",
    "@pypi//:etils",
    "@pypi//:numpy",
  ]


def test_dependency_in_no_lock_is_an_error():
  with pytest.raises(install.LockError, match="`scipy>=1` is required"):
    install.dependencies(["scipy>=1"], [], {}, {}, {})


def test_shared_folders_are_split():
  files = {
    "jax": [("jax", "__init__.py"), ("jax", "nn", "a.py")],
    "protobuf": [("google", "protobuf", "x.py"), ("protobuf.info", "RECORD")],
    "api": [("google", "api", "y.py"), ("google", "top.py")],
    "six": [("six.py",), ("__pycache__", "six.pyc")],
    "py": [("py.py",), ("__pycache__", "py.pyc")],
  }
  assert install.own_paths(files) == {
    "jax": ["jax"],
    "protobuf": ["google/protobuf", "protobuf.info"],
    "api": ["google/api", "google/top.py"],
    "six": ["__pycache__/six.pyc", "six.py"],
    "py": ["__pycache__/py.pyc", "py.py"],
  }


def test_cycles_become_one_target_with_every_name():
  data = {"a": ["a"], "b": ["b"], "c": ["c"]}
  deps = {"a": [":b", ":c"], "b": [":a", "@pypi//:numpy"], "c": []}
  assert install.cycles({"a": ["b", "c"], "b": ["a"], "c": []}) == [["a", "b"]]
  text = install.build_file(data, deps)
  targets: dict[str, dict[str, list[str]]] = {}
  exec(  # A BUILD file is Python as far as this one goes.
    text,
    {
      "load": lambda *_: None,
      "package": lambda **_: None,
      "wheel": lambda name, **attributes: targets.update({name: attributes}),
    },
  )
  assert targets == {
    "a+b": {"data": ["a", "b"], "deps": [":c", "@pypi//:numpy"]},
    "a": {"deps": [":a+b"]},
    "b": {"deps": [":a+b"]},
    "c": {"data": ["c"]},
  }


def _wheel(folder: pathlib.Path, name: str, members: dict[str, str]):
  path = folder / f"{name}-1.0-py3-none-any.whl"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    for member, text in members.items():
      information = zipfile.ZipInfo(member)
      mode = 0o755 if member.endswith(".run") else 0o644
      information.external_attr = mode << 16
      archive.writestr(information, text)
  return path


def test_a_wheel_that_is_a_program_keeps_it(tmp_path):
  program = "serve_bin-1.0.data/scripts/serve"
  wheel = _wheel(
    tmp_path,
    "serve_bin",
    {program: "ELF", "serve_bin-1.0.dist-info/RECORD": f"{program},,\n"},
  )
  install.unpack([wheel], tmp_path / "site")
  target = tmp_path / "site" / "bin" / "serve"
  assert target.read_text() == "ELF"
  assert target.stat().st_mode & 0o111
  record = tmp_path / "site" / "serve_bin-1.0.dist-info" / "RECORD"
  assert record.read_text() == "bin/serve,,\n"


def test_unpacks_what_is_imported_and_lists_it(tmp_path):
  members = {
    "one/": "",
    "one/__init__.py": "VALUE = 1\n",
    "one/tests/test_one.py": "",
    "one/bad.py": "print 'of Python 2'\n",
    "one/tool.run": "#!/bin/sh\n",
    "one-1.0.data/scripts/one": "#!python\n",
    "one-1.0.data/platlib/two.py": "VALUE = 2\n",
    "one-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: one\n",
  }
  listed = "".join(f"{m},sha256=x,1\n" for m in members if m[-1] != "/")
  members["one-1.0.dist-info/RECORD"] = listed + "../../bin/one,,\n"
  site = tmp_path / "site"
  install.unpack([_wheel(tmp_path, "one", members)], site)

  compiled = {
    path: pathlib.Path(util.cache_from_source(path))
    for path in ("one/__init__.py", "two.py")
  }
  expected = {
    *(pathlib.Path(m) for m in members if m[-1] != "/" and ".data" not in m),
    pathlib.Path("two.py"),
    *compiled.values(),
  }
  found = {p.relative_to(site) for p in site.rglob("*") if p.is_file()}
  assert found == expected
  for path, bytecode in compiled.items():
    # A hash of the source, which is not looked at again.
    flags = (site / bytecode).read_bytes()[4:8]
    assert int.from_bytes(flags, "little") == 0b01, path
  executable = {p.name for p in site.rglob("*") if p.stat().st_mode & 0o111}
  assert executable & {p.name for p in expected} == {"tool.run"}
  (distribution,) = metadata.distributions(path=[str(site)])
  files = distribution.files or []
  assert {pathlib.Path(f) for f in files} == {
    p for p in expected if p.suffix != ".pyc" and p.name != "RECORD"
  }


def test_the_last_wheel_has_the_shared_file(tmp_path):
  wheels = [
    _wheel(tmp_path, name, {"shared/a.py": f"NAME = '{name}'\n"})
    for name in ("one", "two")
  ]
  install.unpack(wheels, tmp_path / "site")
  assert (tmp_path / "site/shared/a.py").read_text() == "NAME = 'two'\n"


@pytest.mark.parametrize(
  "member", ["../x.py", "/x.py", "one-1.0.data/purelib/../../x.py"]
)
def test_refuses_a_wheel_with_files_outside_of_it(tmp_path, member):
  wheel = _wheel(tmp_path, "one", {"one.py": "", member: ""})
  with pytest.raises(install.LockError, match="outside of its folder"):
    install.unpack([wheel], tmp_path / "site")
  assert not (tmp_path / "site").exists()


def test_a_full_disk_is_one_line_before_anything_is_unpacked(
  tmp_path, monkeypatch
):
  wheel = _wheel(tmp_path, "one", {"one.py": "", "one.bin": "0" * 2_000_000})
  usage = shutil.disk_usage(tmp_path)._replace(free=1_500_000)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
  with pytest.raises(
    install.LockError, match=r"site needs 0\.0 GB of disk, and 0\.0 GB are free"
  ):
    install.unpack([wheel], tmp_path / "site")
  assert not (tmp_path / "site").exists()


def test_the_tools_of_builds_are_pinned():
  folder = pathlib.Path(__file__).parent
  lines = (folder / "build_tools.txt").read_text().splitlines()
  pins = [line for line in lines if not line.startswith("#")]
  assert pins
  for pin in pins:
    assert re.fullmatch(r"[a-z-]+==[0-9.]+", pin), pin
  text = (folder / "../../tools/bazelw").read_text()
  assert re.search(r"^bazelisk_version=[0-9.]+$", text, re.MULTILINE)
  assert '"@bazel/bazelisk@$bazelisk_version"' in text
