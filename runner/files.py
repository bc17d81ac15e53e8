"""Whole files, written so that a reader never sees half of one.

On a local disk a file is written beside its place and moved there. Object
stores (`gs://`, ...) can neither append nor rename, but make a file visible
only when it is whole, so there it is written in one go. Nothing in a run
appends to a file.
"""

import os
import uuid

from etils import epath

from paxon.runner import user_error


def write_text(path: epath.PathLike, text: str) -> None:
  """Writes a file as UTF-8 and makes the folders above it.

  Args:
    path: Local, or of any store that epath knows.
    text: The whole content.
  """
  write_bytes(path, text.encode())


def write_bytes(path: epath.PathLike, data: bytes) -> None:
  """Writes a file and makes the folders above it.

  Args:
    path: Local, or of any store that epath knows.
    data: The whole content.
  """
  target = epath.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  if not is_local(target):
    target.write_bytes(data)
    return
  # The name is unique: several processes may write the same file.
  draft = f"{os.fspath(target)}.{uuid.uuid4().hex[:8]}.part"
  try:
    with open(draft, "xb") as file:
      file.write(data)
      file.flush()
      # Without it a machine that loses power may keep the name and no content.
      os.fsync(file.fileno())
    os.replace(draft, target)
  except BaseException:
    if os.path.exists(draft):
      os.remove(draft)
    raise


def is_local(path: epath.PathLike) -> bool:
  """Whether the path is on a disk of this machine."""
  return "://" not in os.fspath(path)


def check_store(path: epath.Path) -> None:
  """Checks that what reaches a store is installed; disks need nothing.

  Args:
    path: Local, or of any store that epath knows.

  Raises:
    user_error.UserError: It is not; the message names it.
  """
  if is_local(path):
    return
  try:
    path.exists()
  except ImportError as error:
    raise user_error.UserError(
      f"{os.fspath(path)} cannot be reached: {error}."
    ) from error
