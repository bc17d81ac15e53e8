"""Packaging: dependencies, version, commands and packages of a wheel.

`tools/check_wheel` builds and installs one.
"""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib
import types

from packaging import requirements, version
import pytest

import paxon
from paxon.tools import console_scripts

_ROOT = pathlib.Path(__file__).parent.parent
_LOCKS = _ROOT / "third_party" / "python"
# Stands in for `tensorflow`, which pip cannot leave out.
_LOCKED_ONLY = {"tensorflow-cpu"}


def _normal(lines) -> set[str]:
  return {str(requirements.Requirement(line)) for line in lines}


def _requested(name: str) -> set[str]:
  lines = (_LOCKS / name).read_text().splitlines()
  kept = [line for line in lines if line and not line.startswith("#")]
  return _normal(kept) - _LOCKED_ONLY


def _project() -> dict:
  return tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def test_module_has_the_version_and_all_repositories():
  text = (_ROOT / "MODULE.bazel").read_text()
  assert f'version = "{paxon.__version__}"' in text
  locks = {
    path.name.removeprefix("requirements").removesuffix("_lock.txt")
    for path in _LOCKS.glob("requirements*_lock.txt")
  }
  named = set(re.findall(r'^    "(\w+)",$', text, flags=re.MULTILINE))
  # Paxon's own tools are no repository.
  assert named == {
    "paxon_python",
    *(f"pypi{lock}" for lock in locks - {"_dev"}),
  }


def test_root_package_has_the_modules_of_its_repository(tmp_path):
  rule = (_ROOT / "tools/root_package.bzl").read_text()
  (source,) = re.findall(r"^_SOURCE = \'\'\'(.*?)\'\'\'", rule, re.S | re.M)
  files = {
    "_import_root/lab/__init__.py": source.format(name="lab"),
    "__init__.py": "SEVEN = 7",
    "layers/residual.py": "from lab import SEVEN",
  }
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  code = (
    "import importlib.util, lab; from lab.layers import residual;"
    "spec = importlib.util.find_spec('lab');"
    "print(residual.SEVEN, lab.__file__, *spec.submodule_search_locations)"
  )
  printed = subprocess.check_output(
    [sys.executable, "-c", code],
    cwd="/",
    env={"PYTHONPATH": str(tmp_path / "_import_root")},
    text=True,
  )
  assert printed.split() == ["7", f"{tmp_path}/__init__.py", str(tmp_path)]


def test_dependencies_and_test_extra_are_the_core_lock():
  project = _project()
  asked = project["dependencies"] + project["optional-dependencies"]["test"]
  assert _normal(asked) == _requested("requirements.in")


@pytest.mark.parametrize(
  ("extra", "locks"),
  [
    ("cuda", ["cuda"]),
    ("data", ["data"]),
    ("lm_eval", ["lm_eval"]),
    ("plan", ["plan_cuda", "tpu"]),
    ("plan-cuda", ["plan_cuda"]),
    ("plan-cudnn", ["plan_cudnn"]),
    ("serve", ["serve"]),
    ("text", ["text"]),
    ("tf", ["tf"]),
    ("tpu", ["tpu"]),
  ],
)
def test_extra_is_its_locks(extra, locks):
  asked = set(_project()["optional-dependencies"][extra])
  if extra == "tpu":
    # Of another lock, so that plans for TPUs do not install it.
    asked.remove("gcsfs")
  requested = [_requested(f"requirements_{lock}.in") for lock in locks]
  assert _normal(asked) == set().union(*requested)


def test_extras_of_stores_are_one_lock():
  extras = _project()["optional-dependencies"]
  asked = [*extras["azure"], *extras["gcs"], *extras["s3"]]
  assert _normal(asked) == _requested("requirements_stores.in")


def test_version_is_the_newest_of_the_changelog():
  assert _project()["dynamic"] == ["version"]
  lines = (_ROOT / "CHANGELOG.md").read_text().splitlines()
  newest = next(line for line in lines if line.startswith("## "))
  assert newest.split()[1] == str(version.Version(paxon.__version__))


def test_license_is_apache_2():
  project = _project()
  assert project["license"] == "Apache-2.0"
  (name,) = project["license-files"]
  assert "Version 2.0, January 2004" in (_ROOT / name).read_text()


def test_each_command_has_a_module():
  commands = _project()["scripts"]
  assert set(commands) == set(console_scripts.MODULES)
  assert set(commands.values()) == {"paxon.tools.console_scripts:run"}


def test_command_runs_its_module_with_the_current_folder_last_on_the_path(
  tmp_path, monkeypatch, capsys
):
  (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv)")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.setenv("PYTHONSAFEPATH", "")  # Undone after the test.
  monkeypatch.delenv("PYTHONSAFEPATH")
  monkeypatch.setitem(console_scripts.MODULES, "paxon-mine", "mine")
  monkeypatch.setattr(sys, "argv", ["/bin/paxon-mine", "--help"])
  console_scripts.run()
  assert sys.path[-1] == str(tmp_path)
  # It may be a run directory, whose modules children must not import.
  code = "import sys; print(sys.path[:1] == [''])"
  assert subprocess.check_output([sys.executable, "-c", code]) == b"False\n"
  printed = capsys.readouterr().out
  assert printed.startswith("__main__ [")
  assert "'--help'" in printed


@pytest.mark.parametrize(
  ("program", "expected"),
  [
    ("/bin/paxon-hf", "paxon-hf import, paxon-ckpt list"),
    ("hf_main.py", "tools/hf import, tools/ckpt list"),
  ],
)
def test_help_names_programs_as_they_were_called(
  program, expected, monkeypatch
):
  monkeypatch.setattr(sys, "argv", [program])
  text = "tools/hf import, tools/ckpt list"
  assert console_scripts.name_programs(text) == expected


def test_training_starts_again_with_the_settings_of_the_c_library(monkeypatch):
  class RestartError(Exception):
    pass

  def restart(path, arguments):
    raise RestartError(path, arguments)

  monkeypatch.setattr(os, "execv", restart)
  monkeypatch.setenv("GLIBC_TUNABLES", "")  # Undone after the test.
  monkeypatch.delenv("GLIBC_TUNABLES")
  monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
  monkeypatch.delenv("OPENBLAS_NUM_THREADS")
  monkeypatch.setattr(sys, "argv", ["/bin/paxon"])
  with pytest.raises(RestartError) as caught:
    console_scripts.run()
  assert caught.value.args == (sys.executable, sys.orig_argv)
  assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
  assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


@pytest.fixture(name="setup")
def _setup(monkeypatch):
  """Returns the names of setup.py, without setuptools."""
  build_py = types.SimpleNamespace(build_py=object)
  command = types.ModuleType("setuptools.command")
  command.build_py = build_py
  stub = types.ModuleType("setuptools")
  stub.setup = lambda **_: None
  monkeypatch.setitem(sys.modules, "setuptools", stub)
  monkeypatch.setitem(sys.modules, "setuptools.command", command)
  return runpy.run_path(str(_ROOT / "setup.py"))


def test_packages_are_found_in_a_used_checkout(tmp_path, setup):
  checkout, elsewhere = tmp_path / "checkout", tmp_path / "execroot"
  for package in ("", "layers", "layers/attention", "tools", "third_party"):
    for root in (checkout, elsewhere):
      (root / package).mkdir(parents=True, exist_ok=True)
      (root / package / "__init__.py").touch()
  for left in ("build/lib/paxon", "runs/a", "tools/dependencies", "my-env"):
    (checkout / left).mkdir(parents=True)
    (checkout / left / "__init__.py").touch()
  for link in ("bazel-checkout", "linked"):
    (checkout / link).symlink_to(elsewhere)
  assert setup["find_packages"](checkout) == [
    "paxon",
    "paxon.layers",
    "paxon.layers.attention",
    "paxon.tools",
  ]


def test_modules_only_for_tests_are_read_from_build_files(setup):
  text = (_ROOT / "tools" / "BUILD").read_text()
  assert setup["_TESTONLY"].findall(text) == [
    "file_damages",
    "run_notebooks",
    "type_checks",
    "pytest_main",
    "pytest_targets",
    "run_page_examples",
    "run_readme_examples",
  ]
