"""What one checkpoint on disk holds, by its metadata; no array is read.

Found from any of three folders: a run's, that of its checkpoints, or that of
one checkpoint.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
import os
from typing import Any

from etils import epath
import jax.numpy as jnp

from paxon.runner import files, run_dir, user_error
from paxon.runner.checkpoints import checkpointer, compatibility

# What a train state holds beside the variables of its model.
_NOT_VARIABLES = (
  "step",
  "skipped",
  "opt_state",
  "average",
  "tokens",
)
_METADATA = "metadata"
_STATE = "state"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """One array of a checkpoint.

  Attributes:
    name: Logical.
    shape: As stored, leading `layers` included.
    dtype: Its name.
    axes: One logical axis (or None) per dimension.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  axes: tuple[str | None, ...]

  @property
  def size(self) -> int:
    """The number of its values."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """Its size in memory, in bytes."""
    return self.size * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
  """One complete checkpoint.

  Attributes:
    folder: That of all checkpoints of the run.
    step: The number of training steps before it.
    format_version: Of its metadata.
    time: When it was saved, in seconds since the epoch; `None` if it does not
      say so.
    arrays: By name, in the order of the state.
  """

  folder: epath.Path
  step: int
  format_version: int
  time: float | None
  arrays: Mapping[str, StoredArray]

  @property
  def path(self) -> epath.Path:
    """The folder of this checkpoint."""
    return self.folder / str(self.step)

  @property
  def state_path(self) -> epath.Path:
    """The folder of its arrays."""
    return self.path / _STATE

  @property
  def run_path(self) -> epath.Path:
    """The folder of the run, if the checkpoints lie where runs have them."""
    return self.folder.parent

  def variables(self) -> dict[str, StoredArray]:
    """Returns the arrays that are variables of the model."""
    return {n: array for n, array in self.arrays.items() if is_variable(n)}


def is_variable(name: str) -> bool:
  """Whether a name of a train state is that of a variable of the model."""
  return name.partition("/")[0] not in _NOT_VARIABLES


def find_folder(path: epath.Path) -> tuple[epath.Path, int | None]:
  """Returns the folder of checkpoints, and the step if `path` names one.

  Args:
    path: The folder of a run, of its checkpoints, or of one of them.

  Raises:
    user_error.UserError: There is no such folder.
  """
  files.check_store(path)
  if not path.is_dir():
    raise user_error.UserError(
      f"There is no folder {os.fspath(path)}; give that of a run, of its"
      f" {run_dir.CHECKPOINTS}, or of one checkpoint."
    )
  if (path / run_dir.CHECKPOINTS).is_dir():
    return path / run_dir.CHECKPOINTS, None
  if path.name.isdecimal() and (path / _METADATA).is_dir():
    return path.parent, int(path.name)
  return path, None


def steps(path: epath.Path) -> tuple[epath.Path, list[int]]:
  """Returns the folder of checkpoints, and the complete ones, ascending.

  Args:
    path: As for `find_folder`; of one checkpoint, only its step is returned.

  Raises:
    user_error.UserError: There is no such folder or no checkpoint in it.
  """
  folder, only = find_folder(path)
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    found = checkpoints.steps()
  if only is not None:
    if only not in found:
      raise user_error.UserError(
        f"The checkpoint {os.fspath(path)} is not complete; its save was"
        " interrupted."
      )
    return folder, [only]
  if not found:
    raise user_error.UserError(
      f"There is no checkpoint in {os.fspath(folder)}; give the folder of a"
      " run that has one."
    )
  return folder, found


def find(path: epath.Path, *, step: int | None = None) -> StoredCheckpoint:
  """Returns one checkpoint.

  Args:
    path: As for `find_folder`.
    step: Which; by default the newest, or the one that `path` names.

  Raises:
    user_error.UserError: There is none, or its metadata cannot be read.
  """
  folder, found = steps(path)
  if step is None:
    step = found[-1]
  if step not in found:
    shown = ", ".join(map(str, found[-10:]))
    raise user_error.UserError(
      f"There is no checkpoint of step {step} in {os.fspath(path)}; it has"
      f" {'... ' if len(found) > 10 else ''}{shown}."
    )
  return read(folder, step)


def read(folder: epath.Path, step: int) -> StoredCheckpoint:
  """Returns what the metadata of one checkpoint says.

  Args:
    folder: Of checkpoints.
    step: Of a complete one.

  Raises:
    user_error.UserError: The metadata cannot be read or has another format.
  """
  path = folder / str(step)
  try:
    text = (path / _METADATA / _METADATA).read_text()
    metadata = json.loads(text)
    version = int(metadata["format_version"])
    time = metadata.get("time")
    arrays = {
      name: StoredArray(
        name=name,
        shape=tuple(described["shape"]),
        dtype=described["dtype"],
        axes=tuple(described["axes"]),
      )
      for name, described in metadata["arrays"].items()
    }
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise user_error.UserError(
      f"The checkpoint {os.fspath(path)} cannot be read: its metadata is"
      f" missing or damaged ({type(error).__name__})."
    ) from error
  try:
    compatibility.check_version(
      version, where=f"The checkpoint {os.fspath(path)}"
    )
  except compatibility.CheckpointMismatchError as error:
    raise user_error.UserError(str(error)) from error
  return StoredCheckpoint(
    folder=folder,
    step=step,
    format_version=version,
    time=None if time is None else float(time),
    arrays=arrays,
  )


def total_bytes(arrays: Iterable[StoredArray]) -> int:
  """Returns the bytes of all arrays together."""
  return sum(array.num_bytes for array in arrays)


def read_config(run: epath.Path) -> Mapping[str, Any] | None:
  """Returns the stored configuration of a run, if it can be read.

  Args:
    run: Its folder; a copy of checkpoints may have none.
  """
  try:
    return json.loads((run / run_dir.CONFIG_JSON).read_text())
  except (OSError, ValueError):
    return None
