"""A placeholder for an input whose files are not configured.

With it an experiment can be planned, linted and compared on a machine without
its data; reading a batch is an error.
"""

import dataclasses

import numpy as np

from paxon.inputs import base_input


@dataclasses.dataclass(kw_only=True, eq=False)
class UnsetInput(base_input.BaseInput):
  """An input with the shapes of packed text, and no batches.

  Attributes:
    knob: The configuration field to set, such as `train_files`.
    example: A value for it.
    how: A sentence about where to get such files.
    encoder_length: Length of an encoder's sequence; None without an encoder.
  """

  knob: str
  example: str
  how: str = ""
  encoder_length: int | None = None

  @property
  def is_endless(self) -> bool:
    """True, as for a training split."""
    return True

  @property
  def may_lack_targets(self) -> bool:
    """False, as for packed documents."""
    return False

  def batch_shapes(self) -> base_input.Shapes:
    """Returns the shapes of packed documents."""
    shape = self.per_host_batch_size, self.length
    keys = ("inputs", "targets", "positions", "segment_ids", "target_bytes")
    integers = {key: (shape, np.dtype(np.int32)) for key in keys}
    if self.encoder_length is not None:
      shape_of_encoder = self.per_host_batch_size, self.encoder_length
      for key in ("inputs", "positions", "segment_ids"):
        integers[f"encoder_{key}"] = shape_of_encoder, np.dtype(np.int32)
    return {**integers, "weights": (shape, np.dtype(np.float32))}

  def check_readable(self) -> None:
    """Raises; see `get_next`."""
    raise self._make_error()

  def count_batches(self, num_epochs: int) -> int:
    """Raises; see `get_next`."""
    raise self._make_error()

  def get_next(self) -> base_input.Batch:
    """Raises an error.

    Raises:
      ValueError: Always; names the field to set.
    """
    raise self._make_error()

  def reset(self) -> None:
    """Does nothing: there is only one position."""

  def get_state(self) -> base_input.State:
    """Returns an empty state."""
    return {}

  def set_state(self, state: base_input.State) -> None:
    """Accepts only an empty state.

    Raises:
      ValueError: The state is of another input.
    """
    if state:
      raise self._make_error()

  def _make_error(self) -> ValueError:
    return ValueError(
      f"No data: {self.knob} is not set. Set it to files, such as"
      f" --fdl.{self.knob}={self.example!r}."
      f"{self.how and ' '}{self.how}"
    )
