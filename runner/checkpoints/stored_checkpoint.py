"""Checkpoints on disk: discovery, metadata, and arrays read by name.

A path may be a run directory, its directory of checkpoints, or one checkpoint.
Only `read_arrays` and `read_numpy` read arrays.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
import os
import time
from typing import Any
import zlib

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from paxon.runner import files, run_dir, user_error
from paxon.runner.checkpoints import (
  checkpointer,
  manifest,
  named_tree,
  orbax_output,
  unreadable,
)
from paxon.runner.configuration import comparison

# The entries of a train state that are not variables of the model.
_NOT_VARIABLES = (
  "step",
  "skipped",
  "opt_state",
  "average",
  "tokens",
)
# While a run with one checkpoint replaces it, there may be none for a moment.
_WAIT_SECONDS = 30.0
_PAUSE_SECONDS = 0.2
_MAX_DELETED = 20
_METADATA = "metadata"
_STATE = "state"
_MANIFEST = "manifest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """One array of a checkpoint.

  Attributes:
    name: Logical name.
    shape: Including a leading `layers` dimension.
    dtype: Name of the dtype.
    axes: One logical axis (or None) per dimension.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  axes: tuple[str | None, ...]

  @property
  def size(self) -> int:
    """The number of values."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """The size in memory, in bytes."""
    return self.size * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
  """One complete checkpoint.

  Attributes:
    folder: The directory of all checkpoints of the run.
    step: Number of completed training steps.
    format_version: The version of its format.
    time: When it was saved, in seconds since the epoch.
    arrays: By name, in the order of the state.
  """

  folder: epath.Path
  step: int
  format_version: int
  time: float
  arrays: Mapping[str, StoredArray]

  @property
  def path(self) -> epath.Path:
    """The directory of this checkpoint."""
    return self.folder / str(self.step)

  @property
  def state_path(self) -> epath.Path:
    """The directory of its arrays."""
    return self.path / _STATE

  @property
  def run_path(self) -> epath.Path:
    """The run directory, if the checkpoints are in their usual place."""
    return self.folder.parent

  def variables(self) -> dict[str, StoredArray]:
    """Returns the arrays that are variables of the model."""
    return {n: array for n, array in self.arrays.items() if is_variable(n)}


def is_variable(name: str) -> bool:
  """Returns whether a name of a train state is a variable of the model."""
  return name.partition("/")[0] not in _NOT_VARIABLES


def find_folder(path: epath.Path) -> tuple[epath.Path, int | None]:
  """Returns the directory of checkpoints, and the step if `path` is one.

  Args:
    path: A run directory, its directory of checkpoints, or one checkpoint.

  Raises:
    user_error.UserError: The directory does not exist.
  """
  files.check_store(path)
  if not path.is_dir():
    raise user_error.UserError(
      f"{os.fspath(path)} does not exist; pass a run directory, its directory"
      f" {run_dir.CHECKPOINTS}, or one checkpoint."
    )
  if (path / run_dir.CHECKPOINTS).is_dir():
    return path / run_dir.CHECKPOINTS, None
  if path.name.isdecimal() and (path / _METADATA).is_dir():
    return path.parent, int(path.name)
  return path, None


def find_steps(path: epath.Path) -> tuple[epath.Path, list[int]]:
  """Returns the directory of checkpoints and the steps of complete ones.

  For the path of one checkpoint, only its step.

  Raises:
    user_error.UserError: The directory does not exist or has no checkpoint.
  """
  folder, only = find_folder(path)
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    found = wait_for_steps(checkpoints, folder)
  if only is not None:
    if only not in found:
      raise user_error.UserError(
        f"The checkpoint {os.fspath(path)} is incomplete; its save was"
        " interrupted."
      )
    return folder, [only]
  if not found:
    raise user_error.UserError(
      f"{os.fspath(folder)} contains no checkpoint; pass the directory of a run"
      " that has one."
    )
  return folder, found


def wait_for_steps(
  checkpoints: checkpointer.Checkpointer,
  folder: epath.Path,
  *,
  was_deleted: bool = False,
) -> list[int]:
  """Returns the steps of complete checkpoints, in order.

  If there is none but the run is saving one, waits for it, at most 30 s.

  Args:
    checkpoints: A read-only directory.
    folder: The directory.
    was_deleted: Whether the run has deleted one just now, so that there must be
      another.
  """
  end = time.monotonic() + _WAIT_SECONDS
  while not (found := checkpoints.steps()) and time.monotonic() < end:
    if not was_deleted and not unreadable.is_saving(folder):
      # Renamed between the two looks, or there is none.
      checkpoints.refresh()
      return checkpoints.steps()
    time.sleep(_PAUSE_SECONDS)
    checkpoints.refresh()
  return found


def find_checkpoint(
  path: epath.Path, *, step: int | None = None
) -> StoredCheckpoint:
  """Returns the checkpoint of `step` or of `path`, or the latest one.

  Raises:
    user_error.UserError: It does not exist, or its metadata is damaged.
  """
  folder, found = find_steps(path)
  if step is None:
    for _ in range(_MAX_DELETED):
      try:
        return read_metadata(folder, found[-1])
      except unreadable.DeletedCheckpointError:
        folder, found = find_steps(path)
    step = found[-1]
  if step not in found:
    shown = ", ".join(map(str, found[-10:]))
    raise user_error.UserError(
      f"{os.fspath(path)} contains no checkpoint of step {step}; it has"
      f" {'... ' if len(found) > 10 else ''}{shown}."
    )
  return read_metadata(folder, step)


def read_metadata(folder: epath.Path, step: int) -> StoredCheckpoint:
  """Reads the metadata of a checkpoint.

  Raises:
    user_error.UserError: It is damaged.
    unreadable.DeletedCheckpointError: Its run has deleted it.
  """
  path = folder / str(step)
  try:
    metadata = json.loads(files.read_text(path / _METADATA / _METADATA))
    version = int(metadata["format_version"])
    named_tree.check_version(version, where=f"The checkpoint {os.fspath(path)}")
    return StoredCheckpoint(
      folder=folder,
      step=step,
      format_version=version,
      time=float(metadata["time"]),
      arrays={
        name: StoredArray(
          name=name,
          shape=tuple(described["shape"]),
          dtype=described["dtype"],
          axes=tuple(described["axes"]),
        )
        for name, described in metadata["arrays"].items()
      },
    )
  except named_tree.CheckpointMismatchError as error:
    raise user_error.UserError(str(error)) from error
  except (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    RecursionError,
  ) as error:
    if isinstance(error, FileNotFoundError):
      unreadable.check_not_deleted(path)
    raise user_error.UserError(
      f"The checkpoint {os.fspath(path)} cannot be read: its metadata is"
      f" missing or damaged ({type(error).__name__})."
    ) from error


def verify(checkpoint: StoredCheckpoint) -> None:
  """Compares the checksums of all files.

  Raises:
    user_error.UserError: A file is missing, incomplete or changed.
  """
  try:
    with checkpointer.Checkpointer(checkpoint.folder, read_only=True) as opened:
      opened.verify(checkpoint.step)
  except named_tree.CheckpointMismatchError as error:
    raise user_error.UserError(str(error)) from error


def total_bytes(arrays: Iterable[StoredArray]) -> int:
  """Returns the size of all arrays together, in bytes."""
  return sum(array.num_bytes for array in arrays)


def read_config(run: epath.Path) -> dict[str, str] | None:
  """Returns the stored configuration by path; None for a copy without one."""
  try:
    return comparison.values(files.read_text(run / run_dir.CONFIG_TEXT))
  except (OSError, files.DamagedFileError):
    return None


def fingerprint(checkpoint: StoredCheckpoint) -> str:
  """Returns a name of a checkpoint's content, from its checksums.

  Raises:
    user_error.UserError: It has none.
  """
  try:
    text = files.read_bytes(checkpoint.path / _MANIFEST / manifest.FILE_NAME)
  except OSError as error:
    unreadable.check_not_deleted(checkpoint.path)
    raise user_error.UserError(
      f"{os.fspath(checkpoint.path)} has no checksums ({error})."
    ) from error
  return f"crc32 {zlib.crc32(text):08x}"


def read_arrays(
  checkpoint: StoredCheckpoint, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Reads arrays onto devices in other dtypes; raises like `read_numpy`."""
  tree = _to_nested(checkpoint, wanted)
  restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
  return _read(checkpoint, wanted, tree, restore_args)


def read_numpy(
  checkpoint: StoredCheckpoint, names: Iterable[str]
) -> dict[str, np.ndarray]:
  """Reads whole arrays into host memory.

  Raises:
    checkpointer.DamagedCheckpointError: A file is incomplete or changed.
  """
  wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
  tree = _to_nested(checkpoint, dict.fromkeys(wanted, 0))
  return _read(checkpoint, wanted, tree, _to_nested(checkpoint, wanted))


def _to_nested(
  checkpoint: StoredCheckpoint, by_name: Mapping[str, Any]
) -> dict[str, Any]:
  specs = [checkpoint.arrays[name] for name in by_name]
  return named_tree.to_named(list(by_name.values()), specs=specs)


def _read(
  checkpoint: StoredCheckpoint,
  wanted: Mapping[str, Any],
  tree: dict[str, Any],
  restore_args: Any,
) -> dict[str, Any]:
  if not wanted:
    return {}
  restore_output = orbax_output.filter_output()
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      restored = reader.restore(
        checkpoint.state_path,
        args=ocp.args.PyTreeRestore(
          item=tree, restore_args=restore_args, partial_restore=True
        ),
      )
    specs = [checkpoint.arrays[name] for name in wanted]
    # Orbax omits missing arrays.
    arrays = named_tree.from_named(restored, specs=specs)
  # The type of orbax's exception depends on the file.
  except Exception as error:
    orbax_output.drop_reads(error)
    unreadable.check_not_deleted(checkpoint.path)
    lines = str(error).splitlines()
    raise checkpointer.DamagedCheckpointError(
      f"The checkpoint {os.fspath(checkpoint.path)} is damaged: it cannot be"
      f" read ({type(error).__name__}:"
      f" {lines[0][:300] if lines else 'no message'})"
    ) from error
  finally:
    restore_output()
  return dict(zip(wanted, arrays, strict=True))
