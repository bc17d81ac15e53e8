"""Command-line arguments of a training run that are not configuration.

`--profile_steps=10:13` profiles the steps 10, 11 and 12. Imports no jax.
"""

import dataclasses
import os
import re
import socket
import time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One start of a training run.

  Attributes:
    profile: Steps to profile, or None.
    profiler_port: Port of JAX's profiler server, or None for no server.
    begin: When the process started, in seconds since the epoch, so that imports
      count; None for the time at which training is called.
    liveness_file: Path of a file to rewrite while the process makes progress.
    metrics_port: Port at which metrics are served, or None.
    local_checkpoint_dir: Directory of this host for frequent checkpoints.
    ends_when_hung: Whether the watchdog ends the process, which would be the
      user's notebook otherwise.
  """

  profile: range | None = None
  profiler_port: int | None = None
  begin: float | None = None
  liveness_file: str | None = None
  metrics_port: int | None = None
  local_checkpoint_dir: str | None = None
  ends_when_hung: bool = False


def parse_window(text: str) -> range:
  """Parses `FIRST:STOP`, steps to profile from 1; raises ValueError."""
  found = re.fullmatch(r"(\d+):(\d+)", text.strip())
  if found is None:
    raise ValueError(
      f"--profile_steps={text} must be FIRST:STOP, such as 10:13 for the steps"
      " 10, 11 and 12."
    )
  window = range(int(found[1]), int(found[2]))
  if window.start < 1:
    raise ValueError(f"--profile_steps={text}: steps are numbered from 1.")
  if not window:
    raise ValueError(
      f"--profile_steps={text} is empty: STOP is exclusive, so it must be at"
      f" least {window.start + 1}."
    )
  return window


def check_window(window: range, *, num_train_steps: int) -> None:
  """Raises ValueError unless training reaches the steps to profile."""
  if window[-1] > num_train_steps:
    raise ValueError(
      f"--profile_steps={window.start}:{window.stop} ends at step {window[-1]},"
      f" but num_train_steps is {num_train_steps}."
    )


def check_port(port: int, *, flag: str = "profiler_port") -> None:
  """Raises ValueError unless a server can listen at the port of a flag.

  The profiler's server itself only logs that it cannot.
  """
  name = f"--{flag}={port}"
  if not 1 <= port <= 65535:
    raise ValueError(f"{name} must be from 1 to 65535, such as 9999.")
  with socket.socket() as found:
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      found.bind(("", port))
    except OSError as error:
      raise ValueError(
        f"{name} cannot be used: {error.strerror}; choose another port."
      ) from error


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
