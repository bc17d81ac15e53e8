"""Runs the test files of one Bazel target with pytest.

Usage, from the macro in py.bzl: `pytest_main.py a_test.py [b_test.py ...]
[pytest arguments]`. It follows Bazel's test protocol: filter, shards, JUnit
report, scratch folder. Collecting no test is a failure.
"""

import collections
from collections.abc import Sequence
import fcntl
import gc
import hashlib
from importlib import metadata
import importlib.util
import multiprocessing
import os
import pathlib
import shlex
import shutil
import sys
from typing import NoReturn

import pytest

import paxon
from paxon.tools import type_checks

# The macro's `keep_compilations`: "1", "0", or nothing.
KEEP_COMPILATIONS = "PAXON_KEEP_COMPILATIONS"
# Which tier runs: cases without `@pytest.mark.nightly`, if the variable is not
# set, those with it ("nightly"), or both ("all").
TIER = "PAXON_TIER"
# The macro's `nightly`: all cases are.
ALL_NIGHTLY = "PAXON_ALL_NIGHTLY"
# That the macro's `machine_code` is False.
NO_MACHINE_CODE = "PAXON_NO_MACHINE_CODE"

# Replaces CUDA's assembler: its output is empty, and nothing reads it.
_ASSEMBLER = """\
#!/bin/sh
[ "$1" = --version ] && exec {assembler} --version
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
# Files that XLA needs from CUDA's toolkit.
_TOOLKIT = ("bin/ptxas", "bin/nvlink", "nvvm/libdevice")

_HYPOTHESIS = "_hypothesis_pytestplugin"


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


_MARK = "nightly"
_TIERS = ("", "nightly", "all")
# What a log says of cases that the tier leaves out; .ci/count.py reads it.
LEFT_OUT = "{} cases are left to `bazel test --config=all`."


def _is_nightly(item: pytest.Item, grid: list[pytest.Item]) -> bool:
  """Returns whether a case is marked; `grid` are the cases of its function.

  `@pytest.mark.nightly(keep=N)` leaves N cases in the default tier, spread
  evenly, so that a grid of parameters keeps several values of each.
  """
  for mark in item.iter_markers(_MARK):
    keep = mark.kwargs.get("keep", 0)
    step = (len(grid) - 1) / max(keep - 1, 1)
    if grid.index(item) not in {round(n * step) for n in range(keep)}:
      return True
  return False


class _Tier:
  """Selects the cases of a tier, and says how many the other has."""

  def __init__(self, tier: str, all_nightly: bool):
    if tier not in _TIERS:
      raise ValueError(f"{TIER} must be one of {_TIERS}, got {tier!r}.")
    self.runs_all = tier == "all"
    self.is_nightly = tier == "nightly"
    self.all_nightly = all_nightly
    self.left_out = 0

  def pytest_collection_modifyitems(
    self, config: pytest.Config, items: list[pytest.Item]
  ) -> None:
    if self.runs_all:
      return
    grids = collections.defaultdict(list)
    for item in items:
      grids[item.nodeid.partition("[")[0]].append(item)
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
      grid = grids[item.nodeid.partition("[")[0]]
      is_nightly = self.all_nightly or _is_nightly(item, grid)
      (kept if is_nightly == self.is_nightly else dropped).append(item)
    items[:] = kept
    self.left_out = len(dropped)
    if dropped:
      config.hook.pytest_deselected(items=dropped)


class _Checks:
  """Checks types and shapes at run time in all of Paxon."""

  def pytest_load_initial_conftests(self) -> None:
    # Before pytest's own finder, which is installed already.
    type_checks.install()


# How many objects are allocated between two garbage collections, and how many
# collections of a generation precede one of the next. Tracing allocates
# thousands of objects that stay alive, which Python's own 700 traverse again
# and again.
_COLLECTIONS = (50_000, 20, 50)


class _Imported:
  """Excludes imported objects from garbage collection, and makes it rare.

  Otherwise it traverses all of JAX several times during its import, and again
  in each full collection.
  """

  def pytest_load_initial_conftests(self) -> None:
    gc.disable()

  def pytest_collection_finish(self) -> None:
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    gc.enable()


def _arguments(argv: Sequence[str]) -> list[str]:
  root = pathlib.Path.cwd()
  arguments = [
    f"--rootdir={root}",
    # No configuration file: the settings of a test are in its target.
    "--config-file=/dev/null",
    # The checkout's runs this program.
    "--noconftest",
    "--import-mode=importlib",
    "--strict-markers",
    *("-o", f"markers={_MARK}: left to `--config=all`"),
    *("-p", "no:cacheprovider"),
    *("-W", "error"),
    *("-o", "console_output_style=classic"),
  ]
  if importlib.util.find_spec(_HYPOTHESIS):
    # Its profile for CI: the same examples in each run, and no time limit,
    # which a busy machine would exceed.
    arguments += ["-p", _HYPOTHESIS, "--hypothesis-profile=ci"]
  if report := os.environ.get("XML_OUTPUT_FILE"):
    arguments.append(f"--junitxml={report}")
  if scratch := os.environ.get("TEST_TMPDIR"):
    arguments.append(f"--basetemp={scratch}/pytest")
  if wanted := os.environ.get("TESTBRIDGE_TEST_ONLY"):
    arguments += ["-k", wanted]
  for argument in argv:
    # Bazel gives the path of a file of another repository below the workspace;
    # in the runfiles it is a sibling of the workspace.
    if argument.startswith("external/"):
      argument = "../" + argument.removeprefix("external/")
    arguments.append(argument)
  return arguments


def _drop_workspace_folder() -> None:
  """Removes the workspace's folder, which Bazel adds, from `sys.path`.

  With it `import layers` would be a second copy of `paxon.layers`.
  """
  root = paxon.__path__[0]
  sys.path[:] = [entry for entry in sys.path if entry != root]
  os.environ["PYTHONPATH"] = os.pathsep.join(
    entry
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if entry != root
  )


# Bytes of the programs of one target that are kept.
_MAX_COMPILATIONS = 2**26


def _describe_machine() -> str:
  """Returns the facts on which compiled programs depend: jaxlib and the CPU."""
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
  except OSError:
    text = ""
  facts = [
    line
    for line in text.split("\n\n")[0].splitlines()
    if line.startswith(
      ("vendor_id", "cpu family", "model", "flags", "Features")
    )
  ]
  return "\n".join([os.uname().machine, metadata.version("jaxlib"), *facts])


def _lock_compilations(machine: str, target: str, shard: str) -> str | None:
  """Returns the folder of a target's compiled programs, locked by this process.

  JAX does not write its cache atomically, so processes do not share a folder.

  Args:
    machine: The folder of the machine.
    target: Bazel's label.
    shard: Number of the shard.

  Returns:
    The folder; None if another process uses it, or it cannot be written.
  """
  try:
    kind = hashlib.sha256(_describe_machine().encode()).hexdigest()[:12]
    name = "_".join(target.strip("/").replace(":", "/").split("/"))
    folder = pathlib.Path(machine, kind, f"{name}_{shard}")
    folder.mkdir(parents=True, exist_ok=True)
    # Not closed: the lock ends with the process.
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    programs = folder / "programs"
    if programs.exists():
      size = sum(path.stat().st_size for path in programs.iterdir())
      if size > _MAX_COMPILATIONS:
        shutil.rmtree(programs)
    programs.mkdir(exist_ok=True)
  except (OSError, metadata.PackageNotFoundError):
    return None
  return str(programs)


def _keep_compilations(scratch: str) -> None:
  """Sets JAX's cache of compiled programs: the machine's, or the target's."""
  environ = os.environ
  if environ.get(KEEP_COMPILATIONS) == "0":
    return
  machine = environ.get(type_checks.COMPILATIONS)
  folder = machine and _lock_compilations(
    machine,
    environ.get("TEST_TARGET", "unknown"),
    environ.get("TEST_SHARD_INDEX", "0"),
  )
  if not folder:
    if not environ.get(KEEP_COMPILATIONS):
      return
    folder = os.path.join(scratch, "compilations")
  environ.update(
    JAX_COMPILATION_CACHE_DIR=folder,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
  )


class _Compilations:
  """Keeps the cache from processes that tests start, unless they share it."""

  def pytest_collection_finish(self) -> None:
    # JAX, if the tests import it, has read the variables.
    for name in [*os.environ] if not os.environ.get(KEEP_COMPILATIONS) else ():
      if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")):
        del os.environ[name]


def _has_compiler_for_gpus() -> bool:
  try:
    return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
  except ModuleNotFoundError:
    return False


def _find_in_toolkit(name: str) -> pathlib.Path:
  """Returns the path of a file of CUDA's toolkit, from whichever wheel."""
  specification = importlib.util.find_spec("nvidia")
  assert specification is not None
  folders = specification.submodule_search_locations or ()
  paths = [pathlib.Path(folder, "cu13", name) for folder in folders]
  found = next((path for path in paths if path.exists()), None)
  assert found is not None, f"no {name} in {paths}"
  return found


def _has_nightly_cases(argv: Sequence[str]) -> bool:
  """Returns whether one of the test files has a marked case."""
  files = [item for item in argv if item.endswith(".py")]
  texts = (pathlib.Path(file).read_text(encoding="utf-8") for file in files)
  return any(f"mark.{_MARK}" in text for text in texts)


def _without_assembler(folder: pathlib.Path) -> None:
  """Makes a CUDA toolkit whose assembler does nothing.

  The assembler, started for each kernel, takes a third of the time of compiling
  a program for GPUs.

  Args:
    folder: Where to make it.
  """
  for name in _TOOLKIT:
    path, found = folder / name, _find_in_toolkit(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name == "ptxas":
      path.write_text(_ASSEMBLER.format(assembler=shlex.quote(str(found))))
      path.chmod(0o700)
    else:
      path.symlink_to(found)


def main(argv: Sequence[str]) -> int:
  """Runs pytest and returns the exit status."""
  tier = _Tier(os.environ.get(TIER, ""), bool(os.environ.get(ALL_NIGHTLY)))
  if tier.is_nightly and not (tier.all_nightly or _has_nightly_cases(argv)):
    if report := os.environ.get("XML_OUTPUT_FILE"):
      # Bazel's own report, if there is none, has one case.
      pathlib.Path(report).write_text("<testsuites/>")
    return 0
  _drop_workspace_folder()
  # Tests compare outputs, and a slow machine would add lines to them.
  os.environ["PAXON_NO_HEARTBEAT"] = "1"
  if scratch := os.environ.get("TEST_TMPDIR"):
    os.environ.setdefault("HOME", scratch)
    os.environ["TMPDIR"] = scratch
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)
    _keep_compilations(scratch)
    if _has_compiler_for_gpus():
      # Programs of a target share most kernels, and no plan depends on where
      # they come from.
      os.environ["XLA_FLAGS"] = " ".join(
        (
          os.environ.get("XLA_FLAGS", ""),
          f"--xla_gpu_kernel_cache_file={os.path.join(scratch, 'kernels')}",
          # Required for that file, if jaxlib has the flag.
          "--xla_gpu_enable_llvm_module_compilation_parallelism=true"
          if metadata.version("jaxlib").startswith("0.10.")
          else "",
          # Other tests use the other cores.
          "--xla_gpu_force_compilation_parallelism=1",
        )
      )
      if os.environ.get(NO_MACHINE_CODE):
        toolkit = pathlib.Path(scratch, "cuda")
        _without_assembler(toolkit)
        os.environ["CUDA_ROOT"] = str(toolkit)
  shard = _Shard(
    int(os.environ.get("TEST_SHARD_INDEX", "0")),
    int(os.environ.get("TEST_TOTAL_SHARDS", "1")),
  )
  if status_file := os.environ.get("TEST_SHARD_STATUS_FILE"):
    pathlib.Path(status_file).touch()
  # pytest would rewrite, in every process, all modules of each distribution
  # with a plugin. The one plugin that we use is named instead.
  os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
  plugins = [tier, shard, _Checks(), _Imported(), _Compilations()]
  status = pytest.main(_arguments(argv), plugins=plugins)
  if tier.left_out and not tier.is_nightly:
    print(LEFT_OUT.format(tier.left_out))
  if status == pytest.ExitCode.NO_TESTS_COLLECTED:
    if tier.left_out or shard.collected:
      return 0  # The other tier, or other shards, have them.
    print("No tests were collected, which is a failure.", file=sys.stderr)
  return int(status)


def _end(status: int) -> NoReturn:
  """Ends the process and its children without Python's own shutdown.

  JAX and Python take two thirds of a second to free memory that the kernel
  frees anyway.
  """
  for child in multiprocessing.active_children():
    child.terminate()
  # Of its processes, too; .ci/count.py reads it.
  print(f"CPU: {sum(os.times()[:4]):.1f} s")
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


if __name__ == "__main__":
  _end(main(sys.argv[1:]))
