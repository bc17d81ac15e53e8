"""Runs tests by plain `pytest` as Bazel does: see tools/pytest_targets.py.

Bazel's own runs leave this file out (`--noconftest` in tools/pytest_main.py).
"""

import importlib.util
import os
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent
_NIGHTLY = "--nightly"


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds the option for all tests."""
  parser.addoption(
    _NIGHTLY, action="store_true", help="Also run what `--config=all` runs."
  )


def pytest_cmdline_main(config: pytest.Config) -> int | None:
  """Runs the tests, each target in its process."""
  option = config.option
  if option.help or option.version:
    return None
  if option.xmlpath:
    raise pytest.UsageError("--junitxml: `bazel test` makes reports.")
  # By its path: an installed `paxon` may be another checkout.
  specification = importlib.util.spec_from_file_location(
    "pytest_targets", _ROOT / "tools" / "pytest_targets.py"
  )
  assert specification is not None
  assert specification.loader is not None
  targets = importlib.util.module_from_spec(specification)
  specification.loader.exec_module(targets)
  if option.nightly:
    os.environ["PAXON_TIER"] = "all"
  paths = option.file_or_dir
  dropped = {_NIGHTLY, *paths}
  rest = [a for a in config.invocation_params.args if str(a) not in dropped]
  try:
    return targets.run(_ROOT, paths or ["."], rest, stops=bool(option.maxfail))
  except ValueError as error:
    raise pytest.UsageError(str(error)) from error
