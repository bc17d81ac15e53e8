"""What only the command line knows of a run that it starts."""

import dataclasses
import os
import time

from paxon.runner.monitoring import profile_window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One start of a training run; no part of its configuration.

  Attributes:
    profile: Steps to profile; None for none.
    begin: When the process started, in seconds since the epoch, so that the
      time of its imports is counted; None for when training was called.
  """

  profile: profile_window.ProfileWindow | None = None
  begin: float | None = None


def process_begin() -> float | None:
  """Returns when this process started, in seconds since the epoch.

  None where the system does not tell (it does on Linux).
  """
  try:
    with open("/proc/self/stat") as file:
      # The second field, the name, may hold spaces and parentheses.
      fields = file.read().rpartition(")")[2].split()
    with open("/proc/uptime") as file:
      uptime = float(file.read().split()[0])
  except OSError:
    return None
  # Field 22 of proc(5): ticks from the start of the system.
  ticks = int(fields[19])
  return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
