"""Several named inputs as one, each batch with arrays of all of them."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from paxon.inputs import base_input


@dataclasses.dataclass(kw_only=True, eq=False)
class CombinedInput(base_input.BaseInput):
  """The batches of several inputs side by side.

  The array `targets` of the input `text` is `text/targets`. An input may have
  more rows than the others: with n times `global_batch_size` its arrays become
  [global_batch_size, n, ...], so that all arrays have the same first dimension
  and the rows that belong to one are together; a model folds the two.

  The input ends where the first of its parts does.

  Attributes:
    inputs: The parts by name, each with a multiple of `global_batch_size` rows.
    default_input: The part whose `length` this one's is, and which answers
      `ids_to_strings` where no key says otherwise.
  """

  inputs: Mapping[str, base_input.BaseInput]
  default_input: str

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.default_input not in self.inputs:
      raise ValueError(
        f"CombinedInput.default_input must be one of {sorted(self.inputs)}, got"
        f" {self.default_input!r}."
      )
    for name, part in self.inputs.items():
      if "/" in name:
        raise ValueError(
          f"CombinedInput.inputs: the name {name!r} must not have a '/', which"
          " stands between it and the name of an array."
        )
      if part.global_batch_size % self.global_batch_size:
        raise ValueError(
          f"CombinedInput.inputs[{name!r}].global_batch_size"
          f" ({part.global_batch_size}) must be a multiple of"
          f" CombinedInput.global_batch_size ({self.global_batch_size})."
        )
    default = self.inputs[self.default_input]
    if default.length != self.length:
      raise ValueError(
        f"CombinedInput.length ({self.length}) must be that of its"
        f" default_input, {default.length}."
      )

  def set_infeed_hosts(
    self, *, infeed_host_index: int, num_infeed_hosts: int
  ) -> None:
    """Tells this input and its parts which rows are this host's."""
    super().set_infeed_hosts(
      infeed_host_index=infeed_host_index, num_infeed_hosts=num_infeed_hosts
    )
    for part in self.inputs.values():
      part.set_infeed_hosts(
        infeed_host_index=infeed_host_index, num_infeed_hosts=num_infeed_hosts
      )

  def get_next(self) -> base_input.Batch:
    """Returns this host's rows of all parts.

    Raises:
      StopIteration: A part has ended. No part has moved on then.
    """
    before = self.get_state()
    batch = {}
    for name, part in self.inputs.items():
      try:
        arrays = part.get_next()
      except BaseException as error:
        if not base_input.is_end(error):
          raise
        self.set_state(before)
        raise StopIteration from None
      inner = part.global_batch_size // self.global_batch_size
      for key, value in arrays.items():
        batch[f"{name}/{key}"] = (
          value
          if inner == 1
          else value.reshape(self.per_host_batch_size, inner, *value.shape[1:])
        )
    return batch

  @property
  def is_endless(self) -> bool:
    """Whether all parts are."""
    return all(part.is_endless for part in self.inputs.values())

  def required_vocab_size(self) -> int | None:
    """Asks the default part: others may be of other vocabularies."""
    return self.inputs[self.default_input].required_vocab_size()

  def check_readable(self) -> None:
    """Asks the parts."""
    for part in self.inputs.values():
      part.check_readable()

  def close(self) -> None:
    """Closes the parts."""
    for part in self.inputs.values():
      part.close()

  def ids_to_strings(
    self,
    ids: np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    key: str | None = None,
  ) -> list[str]:
    """Asks the part that the key is of, else the default one."""
    name, _, rest = (key or "").partition("/")
    if name in self.inputs:
      return self.inputs[name].ids_to_strings(ids, lengths, key=rest)
    return self.inputs[self.default_input].ids_to_strings(ids, lengths, key=key)

  def reset(self) -> None:
    """Resets the parts."""
    for part in self.inputs.values():
      part.reset()

  def get_state(self) -> base_input.State:
    """Returns the parts' states by name."""
    return {name: part.get_state() for name, part in self.inputs.items()}

  def set_state(self, state: base_input.State) -> None:
    """Sets the parts' states.

    Raises:
      ValueError: The state is of other parts, or a part refuses its own.
    """
    if set(state) != set(self.inputs):
      raise ValueError(
        f"The state of this CombinedInput must have the parts"
        f" {sorted(self.inputs)}, got {sorted(state)}."
      )
    for name, part in self.inputs.items():
      try:
        part.set_state(state[name])
      except ValueError as error:
        raise ValueError(f"CombinedInput.inputs[{name!r}]: {error}") from error
