"""Command-line arguments of a training run that are not configuration.

`--profile_steps=10:13` profiles the steps 10, 11 and 12. Imports no jax.
"""

import dataclasses
import os
import re
import time


@dataclasses.dataclass(frozen=True)
class ProfileWindow:
  """A range of steps, half-open as Python's slices.

  Attributes:
    first: The first step, from 1.
    stop: The step after the last one.
  """

  first: int
  stop: int

  def __contains__(self, step: int) -> bool:
    return self.first <= step < self.stop

  def __str__(self) -> str:
    return f"{self.first}:{self.stop}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One start of a training run.

  Attributes:
    profile: Steps to profile, or None.
    begin: When the process started, in seconds since the epoch, so that imports
      count; None for the time at which training is called.
  """

  profile: ProfileWindow | None = None
  begin: float | None = None


def parse_window(text: str) -> ProfileWindow:
  """Parses `FIRST:STOP`.

  Raises:
    ValueError: It is not a non-empty range of steps.
  """
  found = re.fullmatch(r"(\d+):(\d+)", text.strip())
  if found is None:
    raise ValueError(
      f"--profile_steps={text} must be FIRST:STOP, such as 10:13 for the steps"
      " 10, 11 and 12."
    )
  window = ProfileWindow(int(found[1]), int(found[2]))
  if window.first < 1:
    raise ValueError(f"--profile_steps={text}: steps are numbered from 1.")
  if window.stop <= window.first:
    raise ValueError(
      f"--profile_steps={text} is empty: STOP is exclusive, so it must be at"
      f" least {window.first + 1}."
    )
  return window


def check_window(window: ProfileWindow, *, num_train_steps: int) -> None:
  """Checks that training reaches the steps to profile.

  Raises:
    ValueError: It does not.
  """
  if window.stop - 1 > num_train_steps:
    raise ValueError(
      f"--profile_steps={window} ends at step {window.stop - 1}, but"
      f" num_train_steps is {num_train_steps}."
    )


def process_begin() -> float | None:
  """Returns when this process started, in seconds since the epoch.

  None where the system has no `/proc`.
  """
  try:
    with open("/proc/self/stat") as file:
      # The second field, the name, may contain spaces and parentheses.
      fields = file.read().rpartition(")")[2].split()
    with open("/proc/uptime") as file:
      uptime = float(file.read().split()[0])
  except OSError:
    return None
  # Field 22 of proc(5): clock ticks since boot.
  ticks = int(fields[19])
  return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
