"""Several named inputs combined, with the arrays of all in each batch."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from paxon.inputs import base_input, checks


@dataclasses.dataclass(kw_only=True, eq=False)
class CombinedInput(base_input.BaseInput):
  """Batches that combine those of several inputs.

  The array `targets` of the input `text` is `text/targets`. An input whose
  batch size is n times `global_batch_size` has its arrays reshaped to
  [global_batch_size, n, ...], so all arrays have the same first dimension.

  The combined input ends when the first of its inputs ends.

  Attributes:
    inputs: The inputs by name, each with a multiple of `global_batch_size`.
    default_input: The name of the input that provides `length`, and
      `ids_to_strings` for keys of no input.
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
    """Sets the host index and count of this input and its inputs."""
    super().set_infeed_hosts(
      infeed_host_index=infeed_host_index, num_infeed_hosts=num_infeed_hosts
    )
    for part in self.inputs.values():
      part.set_infeed_hosts(
        infeed_host_index=infeed_host_index, num_infeed_hosts=num_infeed_hosts
      )

  def get_next(self) -> base_input.Batch:
    """Returns this host's part of the next batch of all inputs.

    Raises:
      StopIteration: An input has ended. All inputs keep their positions.
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
    """Whether all inputs are endless."""
    return all(part.is_endless for part in self.inputs.values())

  @property
  def unit(self) -> str:
    """Unit of the default input."""
    return self.inputs[self.default_input].unit

  def required_vocab_size(self) -> int | None:
    """Returns the default input's; others may use other vocabularies."""
    return self.inputs[self.default_input].required_vocab_size()

  def check_readable(self) -> None:
    """Checks the inputs."""
    for part in self.inputs.values():
      part.check_readable()

  def find_problem_of_targets(self) -> str | None:
    """Returns the problem of the first input that has one."""
    found = (part.find_problem_of_targets() for part in self.inputs.values())
    return next(filter(None, found), None)

  def describe_untrained(self) -> str | None:
    """Returns the descriptions of the inputs."""
    found = (part.describe_untrained() for part in self.inputs.values())
    return "; ".join(filter(None, found)) or None

  def close(self) -> None:
    """Closes the inputs."""
    for part in self.inputs.values():
      part.close()

  def ids_to_strings(
    self,
    ids: np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    key: str | None = None,
  ) -> list[str]:
    """Decodes with the input that the key names, or the default one."""
    name, _, rest = (key or "").partition("/")
    if name in self.inputs:
      return self.inputs[name].ids_to_strings(ids, lengths, key=rest)
    return self.inputs[self.default_input].ids_to_strings(ids, lengths, key=key)

  def reset(self) -> None:
    """Resets the inputs."""
    for part in self.inputs.values():
      part.reset()

  def get_state(self) -> base_input.State:
    """Returns the states of the inputs by name."""
    return {name: part.get_state() for name, part in self.inputs.items()}

  def set_state(self, state: base_input.State) -> None:
    """Sets the states of the inputs.

    Raises:
      ValueError: The names do not match, or an input rejects its state.
    """
    checks.check_keys(self, state, self.inputs)
    for name, part in self.inputs.items():
      try:
        part.set_state(state[name])
      except ValueError as error:
        raise ValueError(f"CombinedInput.inputs[{name!r}]: {error}") from error
