"""Verification of checkpoints: readable, as written, and finite."""

from collections.abc import Iterator
import dataclasses

from etils import epath
import numpy as np

from paxon.runner import units, user_error
from paxon.runner.checkpoints import checkpointer, stored_checkpoint, text_table

# Number of values that are checked at a time.
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """The result for one checkpoint.

  Attributes:
    step: Step of the checkpoint.
    is_sound: Whether all arrays can be read and are as written.
    line: One line of output.
  """

  step: int
  is_sound: bool
  line: str


def verify(path: epath.Path, *, step: int | None = None) -> Iterator[Report]:
  """Yields a report for each checkpoint, the oldest first.

  Args:
    path: A run directory, its checkpoints folder, or a checkpoint.
    step: Verify only this step.

  Raises:
    user_error.UserError: There is no checkpoint.
  """
  folder, steps = stored_checkpoint.find_steps(path)
  if step is not None:
    stored_checkpoint.find_checkpoint(path, step=step)
    steps = [step]
  for each in steps:
    yield _verify(folder, each)


def _verify(folder: epath.Path, step: int) -> Report:
  try:
    checkpoint = stored_checkpoint.read_metadata(folder, step)
    with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
      checkpoints.verify(step)
    not_finite = _read_all(checkpoint)
  except (checkpointer.DamagedCheckpointError, user_error.UserError) as error:
    return Report(
      step=step,
      is_sound=False,
      line=f"step {step}: DAMAGED. {user_error.one_line(error)}",
    )
  arrays = checkpoint.arrays.values()
  size = units.size(stored_checkpoint.total_bytes(arrays))
  line = f"step {step}: sound, {len(arrays)} arrays of {size} read"
  if not_finite:
    total = sum(not_finite.values())
    names = ", ".join(list(not_finite)[:3])
    more = f" and {len(not_finite) - 3} more" if len(not_finite) > 3 else ""
    line += f"; {total:,} values are not finite, in {names}{more}"
  return Report(step=step, is_sound=True, line=line)


def _read_all(checkpoint: stored_checkpoint.StoredCheckpoint) -> dict[str, int]:
  """Reads each array; returns the number of non-finite values by name."""
  counts = {
    name: _read_one(checkpoint, stored)
    for name, stored in checkpoint.arrays.items()
  }
  return {name: count for name, count in counts.items() if count}


def _read_one(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  stored: stored_checkpoint.StoredArray,
) -> int:
  # A function, so that one array is freed before the next is read.
  (array,) = stored_checkpoint.read_numpy(checkpoint, [stored.name]).values()
  if (array.shape, array.dtype.name) != (stored.shape, stored.dtype):
    raise checkpointer.DamagedCheckpointError(
      f"The checkpoint {checkpoint.path} holds {stored.name} as"
      f" {array.dtype.name}{text_table.format_shape(array.shape)}, but its"
      f" metadata has {stored.dtype}{text_table.format_shape(stored.shape)}"
    )
  return _count_not_finite(array)


def _count_not_finite(array: np.ndarray) -> int:
  flat = array.reshape(-1)
  return sum(
    int((~np.isfinite(flat[i : i + _CHUNK].astype(np.float64))).sum())
    for i in range(0, flat.size, _CHUNK)
  )
