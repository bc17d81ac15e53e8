"""Processes that chaos disturbs: forks of one interpreter with all imports.

Each is the real command line. Two variables of the environment disturb it from
inside: `PAXON_CLOCK_JUMP` moves the wall clock by some seconds while it runs,
`PAXON_SLOW_STORE` delays each operation on names in a directory by up to some
seconds, as stores that are reached over a network do.
"""

from collections.abc import Callable
import functools
import os
import random
import sys
import time
from typing import Any
import warnings

from paxon.runner import main
from paxon.runner.hosts import testing as forks_lib

CLOCK_JUMP, SLOW_STORE = "PAXON_CLOCK_JUMP", "PAXON_SLOW_STORE"
# After the start, so that the process has read the clock before.
_JUMP_AFTER_SECONDS = 1.0
_OPERATIONS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync")


def command_line(arguments: list[str]) -> int:
  """Runs the command line; never returns."""
  jump = os.environ.get(CLOCK_JUMP)
  if jump is not None:
    _move_clock(float(jump))
  delay = os.environ.get(SLOW_STORE)
  if delay is not None:
    for name in _OPERATIONS:
      setattr(os, name, _delay(getattr(os, name), float(delay)))
  # Orbax warns of clocks.
  warnings.simplefilter("ignore")
  main.run(("paxon.runner",), ["main", *arguments])


def run_supervised(arguments: list[str]) -> int:
  """Runs the command line under a supervisor; never returns.

  Args:
    arguments: A Python for the children, then those of the command line.
  """
  sys.executable, *rest = arguments
  sys.orig_argv[:] = [sys.executable, "-m", "paxon.runner.main", *rest]
  main.run(("paxon.runner",), ["main", *rest])


def _move_clock(seconds: float) -> None:
  """Has the wall clock jump, not the monotonic one."""
  real, start = time.time, time.monotonic()

  def read_shifted() -> float:
    late = time.monotonic() - start > _JUMP_AFTER_SECONDS
    return real() + seconds * late

  time.time = read_shifted


def _delay(operation: Callable[..., Any], limit: float) -> Callable[..., Any]:
  @functools.wraps(operation)
  def slow(*args: Any, **kwargs: Any) -> Any:
    time.sleep(random.uniform(0.0, limit))
    return operation(*args, **kwargs)

  return slow


if __name__ == "__main__":
  # The command line imports these when it trains.
  from paxon.runner.training import testing, train

  del testing, train
  forks_lib.serve({"command_line": command_line, "supervised": run_supervised})
