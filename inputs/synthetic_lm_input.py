"""Synthetic token batches for benchmarks and smoke tests.

Each sequence is one document of `length` tokens without padding, so a step does
the same work as with perfectly packed text.
"""

import dataclasses

import numpy as np

from paxon.inputs import base_input, checks

_TOKEN = 1


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticLmInput(base_input.BaseInput):
  """Batches of ones or of random tokens.

  A batch has `inputs`, `targets`, `positions` and `segment_ids` as int32 and
  `weights` as float32, all [per_host_batch_size, length]. Random batch k is a
  function of the seed and k; each target is the next input.

  Attributes:
    vocab_size: The exclusive upper bound of the ids.
    random_seed: The seed of random tokens. With `None` all tokens are 1, which
      a model memorizes within a few steps.
    num_batches: The number of batches. `None` is endless.
  """

  vocab_size: int
  random_seed: int | None = None
  num_batches: int | None = None
  _next: int = dataclasses.field(default=0, init=False, repr=False)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.vocab_size <= _TOKEN:
      raise ValueError(
        f"SyntheticLmInput.vocab_size must be at least {_TOKEN + 1}, got"
        f" {self.vocab_size}."
      )
    if self.random_seed is not None and not 0 <= self.random_seed < 2**64:
      raise ValueError(
        "SyntheticLmInput.random_seed must be in [0, 2**64), or None for ones,"
        f" got {self.random_seed}."
      )
    checks.check_positive(self, optional=["num_batches"])

  def get_next(self) -> base_input.Batch:
    """Returns this host's part of the next batch; see the class.

    Raises:
      StopIteration: `num_batches` batches have been returned.
    """
    if self._next == self.num_batches:
      raise StopIteration
    num_sequences, length = self.per_host_batch_size, self.length
    tokens = self._tokens(num_sequences, length + 1)
    self._next += 1
    positions = np.arange(length, dtype=np.int32)
    return {
      "inputs": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "positions": np.tile(positions, (num_sequences, 1)),
      "segment_ids": np.ones((num_sequences, length), np.int32),
      "weights": np.ones((num_sequences, length), np.float32),
    }

  @property
  def is_endless(self) -> bool:
    """Whether `num_batches` is None."""
    return self.num_batches is None

  def batch_shapes(self) -> base_input.Shapes | None:
    """Returns the shapes and dtypes of the arrays of `get_next`."""
    if type(self).get_next is not SyntheticLmInput.get_next:
      return None  # A subclass may add arrays.
    shape = self.per_host_batch_size, self.length
    keys = ("inputs", "targets", "positions", "segment_ids")
    integers = {key: (shape, np.dtype(np.int32)) for key in keys}
    return {**integers, "weights": (shape, np.dtype(np.float32))}

  @property
  def may_lack_targets(self) -> bool:
    """False: each token counts."""
    return False

  def required_vocab_size(self) -> int:
    """Returns `vocab_size`, or 2 if all tokens are 1."""
    return _TOKEN + 1 if self.random_seed is None else self.vocab_size

  def reset(self) -> None:
    """Restarts from the first batch."""
    self._next = 0

  def get_state(self) -> base_input.State:
    """Returns the number of batches read, and the seed."""
    return {"next": self._next, "random_seed": self.random_seed}

  def set_state(self, state: base_input.State) -> None:
    """Restores a state that `get_state` returned.

    Raises:
      ValueError: The state is damaged or has another seed.
    """
    checks.check_keys(self, state, self.get_state())
    if state["random_seed"] != self.random_seed:
      raise ValueError(
        f"The state was saved with random_seed {state['random_seed']}, and this"
        f" input has {self.random_seed}: its batches are others."
      )
    number, end = state["next"], self.num_batches
    is_number = isinstance(number, int) and not isinstance(number, bool)
    if not is_number or number < 0 or (end is not None and number > end):
      raise ValueError(
        f"The state's next must be a number of batches"
        f"{'' if end is None else f' up to {end}'}, got {number!r}."
      )
    self._next = number

  def _tokens(self, num_sequences: int, length: int) -> np.ndarray:
    """Returns this host's tokens of the next batch, int32 [B, length]."""
    if self.random_seed is None:
      return np.full((num_sequences, length), _TOKEN, np.int32)
    # Raw bits of a generator are stable across numpy versions, unlike
    # `default_rng().integers`. The bias of the modulo is negligible.
    generator = np.random.Philox(key=[self.random_seed, self._next])
    words = generator.random_raw(self.global_batch_size * length)
    tokens = (words % np.uint64(self.vocab_size)).astype(np.int32)
    start = self.infeed_host_index * num_sequences
    return tokens.reshape(-1, length)[start : start + num_sequences]
