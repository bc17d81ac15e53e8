"""Imports from outside a target's closure fail when Bazel runs it.

check_deps finds undeclared imports before a build. This is the other half: a
running target has neither undeclared wheels of the lock, nor undeclared modules
of ours, nor packages of the machine.
"""

import importlib
import os
import pathlib

import pytest

from paxon.tools.dependencies import violation

pytestmark = pytest.mark.skipif(
  "TEST_SRCDIR" not in os.environ,
  reason="only Bazel leaves out what is not declared",
)


def _source(module: str) -> pathlib.Path:
  """Returns where a module of ours stands in the checkout."""
  # The real path leads out of the runfiles.
  root = pathlib.Path(__file__).resolve().parent.parent
  return root.joinpath(*module.split(".")[1:]).with_suffix(".py")


@pytest.mark.parametrize(
  "distribution", ["flax", "jax", "numpy", "optax", "scipy"]
)
def test_an_undeclared_wheel_cannot_be_imported(distribution):
  with pytest.raises(ModuleNotFoundError, match=f"named '{distribution}'"):
    importlib.import_module(distribution)


@pytest.mark.parametrize(
  "module",
  [
    "paxon.sharding.axes",
    "paxon.layers.norms.rms_norm",
    # A sibling in the folder of this very file, and one beside a declared one.
    "paxon.tools.check_deps",
    "paxon.tools.dependencies.workspace",
  ],
)
def test_an_undeclared_module_of_ours_cannot_be_imported(module):
  assert _source(module).is_file(), "the checkout has no such module"
  with pytest.raises(ModuleNotFoundError, match="No module named 'paxon"):
    importlib.import_module(module)


@pytest.mark.parametrize("distribution", ["pip", "setuptools"])
def test_nothing_of_the_machine_can_be_imported(distribution):
  with pytest.raises(ModuleNotFoundError, match=f"named '{distribution}'"):
    importlib.import_module(distribution)


def test_what_is_declared_can_be_imported():
  assert violation.__name__ == "paxon.tools.dependencies.violation"
