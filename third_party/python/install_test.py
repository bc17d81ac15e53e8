"""Tests for the installer of locks, the parts that need no network."""

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
    pytest.param(_entry("jax>=0.1"), "`jax>=0.1` is not pinned", id="range"),
    pytest.param(_entry("jax==0.*"), "is not pinned", id="wildcard"),
    pytest.param("jax==0.1\n", "`jax==0.1` is not pinned", id="no hash"),
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
