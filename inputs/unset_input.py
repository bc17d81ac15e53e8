"""A stand-in for an input whose files nobody has named.

With it an experiment can be planned, linted and compared on a machine that has
none of its data; only what reads batches is refused.
"""

import dataclasses

import numpy as np

from paxon.inputs import base_input


@dataclasses.dataclass(kw_only=True, eq=False)
class UnsetInput(base_input.BaseInput):
  """Knows the shapes of packed rows of text, and holds none.

  Attributes:
    knob: What to set to have data, such as `train_files`.
    example: A value for it.
    how: Where such files come from, a sentence, if that can be said.
  """

  knob: str
  example: str
  how: str = ""

  @property
  def is_endless(self) -> bool:
    """True: it stands in for a training split."""
    return True

  def batch_shapes(self) -> base_input.Shapes:
    """Returns those of packed documents of text."""
    shape = self.per_host_batch_size, self.length
    keys = ("inputs", "targets", "positions", "segment_ids", "target_bytes")
    integers = {key: (shape, np.dtype(np.int32)) for key in keys}
    return {**integers, "weights": (shape, np.dtype(np.float32))}

  def check_readable(self) -> None:
    """Refuses; see `get_next`."""
    raise self._refusal()

  def get_next(self) -> base_input.Batch:
    """Refuses.

    Raises:
      ValueError: Always; it says which knob to set.
    """
    raise self._refusal()

  def reset(self) -> None:
    """There is one position only."""

  def get_state(self) -> base_input.State:
    """Returns the one position."""
    return {}

  def set_state(self, state: base_input.State) -> None:
    """Refuses what another input has saved.

    Raises:
      ValueError: The state is not its own.
    """
    if state:
      raise self._refusal()

  def _refusal(self) -> ValueError:
    return ValueError(
      f"There is nothing to read: {self.knob} is not set; name files, such as"
      f" --fdl.{self.knob}={self.example!r}."
      f"{self.how and ' '}{self.how}"
    )
