"""Checkpoints that cannot be read: damaged ones, and those that a run deletes.

A run that trains may delete a checkpoint while another process lists or reads
it. Readers then read a newer one.
"""

from collections.abc import Callable
import re
import time
from typing import TypeVar

from etils import epath

from paxon.runner import exit_status, user_error

_T = TypeVar("_T")

# A deletion on a local disk takes less than some of these pauses.
_PAUSE_SECONDS = 0.05
_MAX_PAUSES = 6
_MAX_LISTINGS = 40
_MISSING = re.compile("missing|No such file|NOT_FOUND|FileNotFoundError")


class DamagedCheckpointError(user_error.UserError):
  """A checkpoint cannot be read; the message names its path and files."""

  status = exit_status.ExitStatus.DATA


class DeletedCheckpointError(DamagedCheckpointError):
  """The run of a checkpoint has deleted it, as its retention says."""

  status = exit_status.ExitStatus.PEERS


def list_again(make: Callable[[], _T], is_repeated: bool = True) -> _T:
  """Returns the listing of a directory, which may change while it is listed."""
  for _ in range(_MAX_LISTINGS if is_repeated else 0):
    try:
      return make()
    except FileNotFoundError:
      time.sleep(_PAUSE_SECONDS)
  return make()


def is_saving(folder: epath.Path) -> bool:
  """Whether a run writes a checkpoint, or was killed while it did."""
  try:
    names = [each.name for each in folder.iterdir()]
  except OSError:
    return False
  return any(re.match(r"\d+\..*tmp", name) for name in names)


def is_missing(problem: str) -> bool:
  """Whether a file is missing, as in a directory that is being deleted."""
  return _MISSING.search(problem) is not None


def is_gone(path: epath.Path) -> bool:
  """Whether a directory does not exist, or is empty.

  Some stores keep empty directories for a while, and list a directory as its
  own content.
  """
  try:
    return all(each == path for each in path.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    return True


def check_not_deleted(path: epath.Path) -> None:
  """Waits a moment for the end of a deletion.

  Raises:
    DeletedCheckpointError: The checkpoint does not exist any more.
  """
  for pause in range(_MAX_PAUSES + 1):
    if is_gone(path):
      raise DeletedCheckpointError(
        f"The checkpoint {path} was deleted by its run while it was read; read"
        " a newer one, or keep more of them (Retention.newest)"
      )
    if pause < _MAX_PAUSES:
      time.sleep(_PAUSE_SECONDS)
