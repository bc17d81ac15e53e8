"""Plain `pytest` runs the targets of BUILD files as Bazel does."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from paxon.tools import pytest_targets

_ROOT = pathlib.Path(__file__).parent.parent
_EXAMPLES = "tools/run_readme_examples.py"
_BUILD = """
load("//tools:py.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:private"])

py_library(name = "a", srcs = ["a.py"])

# As the target of this file, but for the README.
py_test(
    name = "plain_test",
    size = "small",
    srcs = ["x_test.py", "README.md", "y_test.py"],
    deps = [":a"] + select({"//b:c": [], "//conditions:default": []}),
)

py_test(
    name = "other_test",
    size = "small",
    srcs = ["z_test.py"],
    devices = 1,
    env = {"OTHER": "set"},
    optimize = False,
    other_schedule = True,
    nightly = True,
    tags = ["manual"],
)
"""
_TEST = """
import os, pathlib
import pytest
import paxon.a

def test_environment():
  assert os.environ["JAX_NUM_CPU_DEVICES"] == "{devices}"
  assert os.path.samefile(os.path.dirname(paxon.__file__), os.getcwd())

def test_other(): pass

@pytest.mark.nightly
def test_night(): pass
"""


@pytest.fixture(name="root")
def _root(tmp_path):
  """A checkout whose folder is not called `paxon`."""
  root = tmp_path / "main"
  tools = ("pytest_main", "pytest_targets", "type_checks")
  files = ("conftest.py", "tools/py.bzl", "tools/root_package.bzl")
  for name in (*files, *(f"tools/{name}.py" for name in tools)):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_ROOT / name, root / name)
  for folder in ("", "a", "a/in", "skipped"):
    (root / folder).mkdir(exist_ok=True)
    (root / folder / "__init__.py").touch()
  # By which pytest finds the checkout from a folder in it.
  (root / "setup.py").touch()
  (root / ".bazelignore").write_text("skipped\n")
  (root / "skipped" / "BUILD").write_text("not read")
  (root / "a" / "BUILD").write_text(_BUILD)
  (root / "a" / "a.py").touch()
  (root / "a" / "README.md").write_text("```python\n```\n")
  for name, devices in (("x", 8), ("y", 8), ("z", 1)):
    text = _TEST.format(devices=devices)
    (root / "a" / f"{name}_test.py").write_text(text.replace(".a\n", "\n"))
  return root


def test_environments_are_those_that_bazel_sets(root):
  plain, other = pytest_targets.read_targets(root)
  assert plain.files == ("a/x_test.py", _EXAMPLES, "a/y_test.py")
  for name, value in (plain.environ | {"PAXON_README": ""}).items():
    # This test may get further flags for absent GPUs.
    assert os.environ.get(name, "")[: len(value)] == value, name
  assert plain.environ["XLA_FLAGS"].endswith("optimization_level=1")
  assert other.environ["OTHER"] == "set"
  assert other.environ["PAXON_ALL_NIGHTLY"] == "1"
  assert re.search(
    "optimization_level=0 .*concurrency_optimized_scheduler=false$",
    other.environ["XLA_FLAGS"],
  )
  assert other.is_manual
  assert plain.environ["PAXON_README"] == "a/README.md"
  assert plain.pages == ("a/README.md",)


@pytest.mark.parametrize(
  ("paths", "expected"),
  [
    ([""], {"plain": ["a/x_test.py", _EXAMPLES, "a/y_test.py"]}),
    (["a/y_test.py"], {"plain": ["a/y_test.py"]}),
    (
      ["a/x_test.py::test_other", "a/z_test.py"],
      {"plain": ["a/x_test.py::test_other"], "other": ["a/z_test.py"]},
    ),
    (["a/README.md"], {"plain": [_EXAMPLES]}),
  ],
)
def test_paths_select_targets(root, paths, expected):
  wanted = {f"//a:{name}_test": files for name, files in expected.items()}
  found = pytest_targets.select(
    pytest_targets.read_targets(root), root, [str(root / p) for p in paths]
  )
  assert {target.label: nodes for target, nodes in found} == wanted


def _pytest(root, *arguments, **environ):
  return subprocess.run(
    [sys.executable, "-P", "-m", "pytest", *arguments],
    cwd=root,
    env=os.environ
    | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "XML_OUTPUT_FILE": ""}
    | environ,
    capture_output=True,
    text=True,
    check=False,
  )


def test_pytest_runs_the_targets(root):
  run = _pytest(root, "a/x_test.py", "a/z_test.py", "--nightly")
  assert run.returncode == 0, run.stdout + run.stderr
  assert run.stdout.endswith("2 targets: 6 passed, 0 failed, 0 skipped\n")
  assert "[2/2] //a:other_test\n" in run.stdout
  (root / "a" / "y_test.py").write_text("def test_other(): assert 0")
  run = _pytest(root / "a", "x_test.py", "y_test.py", "-k", "other")
  assert run.returncode == 1
  assert run.stdout.endswith(
    "1 targets: 1 passed, 1 failed, 0 skipped\nFAILED //a:plain_test\n"
  )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["a/a.py"], "a/a.py has no test of a BUILD file; "),
    (["a", "--junitxml=x"], "--junitxml: `bazel test` makes reports."),
  ],
)
def test_wrong_use_is_one_line(root, arguments, message):
  run = _pytest(root, *arguments)
  assert run.returncode == pytest.ExitCode.USAGE_ERROR
  assert run.stderr.strip().startswith(f"ERROR: {message}")
  assert run.stderr.strip().count("\n") == 0
