"""Tests that compiled plans match the golden plans.

The CUDA compiler is always available, the TPU compiler under `--config=plan`,
and cuDNN's attention under `--config=plan_cudnn`. Pairs of the table of all
kinds, and large ones, are compiled with PAXON_PLAN_COMPILERS=1 only.
"""

import importlib.metadata
import os

import pytest

from paxon.runner.hosts import warm_python
from paxon.runner.plan import golden, hardware, testing
from paxon.runner.planning import child
from paxon.tasks.plans import measuring, pairs


@pytest.fixture(scope="module", autouse=True)
def _warm_python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  with warm_python.install([child.__name__], folder):
    yield


def _skip_other_versions(versions):
  """Skips the test if a compiler has another version than the file's.

  `pairs_test` checks on every Python that files match the lock.
  """
  for name, version in versions.items():
    found = importlib.metadata.version(name)
    if found != version:
      pytest.skip(f"was made with {name} {version}, and {found} is here")


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("pair", pairs.PAIRS, ids=lambda pair: pair.name)
def test_plan_matches_its_file(pair, monkeypatch):
  is_slow = pair.is_of_kinds or pair.is_large
  if is_slow and "PAXON_PLAN_COMPILERS" not in os.environ:
    pytest.skip("takes minutes; set PAXON_PLAN_COMPILERS=1")
  expected = pair.read()
  if testing.target(pair.target).hardware.platform is hardware.Platform.CPU:
    # Compiler flags of tests change programs for CPUs; for GPUs they only
    # change the machine code.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
  if pair.missing:
    pytest.skip(f"needs {' and '.join(pair.missing)}: --config=plan_cudnn")
  _skip_other_versions(expected.versions)
  found = measuring.measure(pair)
  lines = golden.differences(expected.figures, found.figures)
  assert not lines, "\n  ".join(
    [
      f"{pair.name} differs from its file (expected -> found):",
      *lines,
      f"where this is wanted: tools/plans --update {pair.name}, then --table",
    ]
  )
