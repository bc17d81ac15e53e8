"""pyproject.toml asks for what the locks were made from."""

import pathlib
import tomllib

from packaging import requirements
import pytest

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


def test_dependencies_and_test_extra_are_the_core_lock():
  project = _project()
  asked = project["dependencies"] + project["optional-dependencies"]["test"]
  assert _normal(asked) == _requested("requirements.in")


@pytest.mark.parametrize(
  ("extra", "locks"),
  [
    ("cuda", ["cuda"]),
    ("data", ["data"]),
    ("plan", ["plan_cuda", "tpu"]),
    ("plan-cuda", ["plan_cuda"]),
    ("plan-cudnn", ["plan_cudnn"]),
    ("tf", ["tf"]),
    ("tpu", ["tpu"]),
  ],
)
def test_extra_is_its_locks(extra, locks):
  asked = _project()["optional-dependencies"][extra]
  requested = [_requested(f"requirements_{lock}.in") for lock in locks]
  assert _normal(asked) == set().union(*requested)
