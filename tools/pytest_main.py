"""Runs the test files of one Bazel target with pytest.

Usage, from the macro in py.bzl: `pytest_main.py a_test.py [b_test.py ...]
[pytest arguments]`. It honours Bazel's test protocol: filter, shards, JUnit
report, scratch folder. No test at all is a failure, because a target that
tests nothing says nothing.
"""

from collections.abc import Sequence
import importlib.util
import os
import pathlib
import sys

import pytest

# The macro's `keep_compilations`, by this environment variable.
KEEP_COMPILATIONS = "PAXON_KEEP_COMPILATIONS"


class _Shard:
  """Keeps every n-th test, as Bazel's sharding protocol asks."""

  def __init__(self, index: int, total: int):
    self._index = index
    self._total = total
    self.collected = 0

  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(
    self, config: pytest.Config, items: list[pytest.Item]
  ) -> None:
    self.collected = len(items)
    dropped = [
      item for n, item in enumerate(items) if n % self._total != self._index
    ]
    items[:] = items[self._index :: self._total]
    if dropped:
      config.hook.pytest_deselected(items=dropped)


def _arguments(argv: Sequence[str]) -> list[str]:
  root = pathlib.Path.cwd()
  arguments = [
    f"--rootdir={root}",
    # No configuration file: what applies to a test stands in its target.
    "--config-file=/dev/null",
    "--import-mode=importlib",
    "--jaxtyping-packages=paxon,beartype.beartype",
    "--strict-markers",
    *("-p", "no:cacheprovider"),
    *("-W", "error"),
    *("-o", "console_output_style=classic"),
  ]
  if report := os.environ.get("XML_OUTPUT_FILE"):
    arguments.append(f"--junitxml={report}")
  if scratch := os.environ.get("TEST_TMPDIR"):
    arguments.append(f"--basetemp={scratch}/pytest")
  if wanted := os.environ.get("TESTBRIDGE_TEST_ONLY"):
    arguments += ["-k", wanted]
  for argument in argv:
    # Bazel names a file of another repository by where it stands below the
    # workspace; in the runfiles it is a sibling of the workspace.
    if argument.startswith("external/"):
      argument = "../" + argument.removeprefix("external/")
    arguments.append(argument)
  return arguments


def _drop_workspace_folder() -> None:
  """Takes the workspace's folder, which Bazel puts there, off `sys.path`.

  With it `import layers` would be a second copy of `paxon.layers`.
  """
  # Found, not imported: jaxtyping's plugin has to come first.
  specification = importlib.util.find_spec("paxon")
  assert specification is not None
  assert specification.origin is not None
  root = os.path.dirname(specification.origin)
  sys.path[:] = [entry for entry in sys.path if entry != root]
  os.environ["PYTHONPATH"] = os.pathsep.join(
    entry
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if entry != root
  )


def main(argv: Sequence[str]) -> int:
  """Runs pytest and returns the exit status."""
  _drop_workspace_folder()
  if scratch := os.environ.get("TEST_TMPDIR"):
    os.environ.setdefault("HOME", scratch)
    os.environ["TMPDIR"] = scratch
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)
    if os.environ.get(KEEP_COMPILATIONS):
      # For targets whose processes compile the same programs. Of this target
      # alone: what one test compiled is no input of another.
      os.environ.update(
        JAX_COMPILATION_CACHE_DIR=os.path.join(scratch, "compilations"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
      )
  shard = _Shard(
    int(os.environ.get("TEST_SHARD_INDEX", "0")),
    int(os.environ.get("TEST_TOTAL_SHARDS", "1")),
  )
  if status_file := os.environ.get("TEST_SHARD_STATUS_FILE"):
    pathlib.Path(status_file).touch()
  status = pytest.main(_arguments(argv), plugins=[shard])
  if status == pytest.ExitCode.NO_TESTS_COLLECTED:
    if shard.collected:
      return 0  # More shards than tests: the others have them.
    print("No test was found, which counts as a failure.", file=sys.stderr)
  return int(status)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
