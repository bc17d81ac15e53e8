"""Exit statuses of the programs, which cluster managers act on.

From 64 on they are those of BSD's `sysexits.h`, where it has one. A process
that a signal has stopped or killed has 128 + its number, as in a shell.
"""

import enum
import errno


class ExitStatus(enum.IntEnum):
  """How a process ended; the table of `docs/launching.md` has the same rows."""

  FINISHED = 0
  # Also of Python itself: a bug, whose traceback was printed.
  ERROR = 1
  USAGE = 2
  # EX_DATAERR
  DATA = 65
  # EX_UNAVAILABLE
  DEVICES = 69
  # EX_SOFTWARE
  NUMERICS = 70
  # EX_OSERR
  MEMORY = 71
  # EX_IOERR
  STORE = 74
  # EX_TEMPFAIL
  PEERS = 75
  # sysexits.h has none.
  HANG = 76


# The same command ends in the same way.
_FINAL = frozenset(
  {
    ExitStatus.FINISHED,
    ExitStatus.USAGE,
    ExitStatus.DATA,
    ExitStatus.NUMERICS,
    ExitStatus.STORE,
  }
)
# Failures of a store rather than of a program: full, read-only, or lost.
_STORE_ERRORS = frozenset(
  {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
  }
)


def is_final(status: int) -> bool:
  """Whether a restart on the same machine is useless."""
  return status in _FINAL


def find(error: BaseException) -> ExitStatus:
  """Returns the status of an error that no other code has explained."""
  if isinstance(error, MemoryError):
    return ExitStatus.MEMORY
  if isinstance(error, OSError) and error.errno == errno.ENOMEM:
    return ExitStatus.MEMORY
  # JAX raises a RuntimeError for the memory of a device and for its own on the
  # host; jax need not be imported to recognize it.
  if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
    return ExitStatus.MEMORY
  if isinstance(error, OSError) and error.errno in _STORE_ERRORS:
    return ExitStatus.STORE
  return ExitStatus.ERROR
