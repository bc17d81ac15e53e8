"""Token batches without any data, to measure speed and to try programs.

A row is one document of `length` tokens without padding, so a step does as much
work as with the best packed text, and reading costs nothing.
"""

import dataclasses

import numpy as np

from paxon.inputs import base_input

_TOKEN = 1


@dataclasses.dataclass(kw_only=True, eq=False)
class SyntheticLmInput(base_input.BaseInput):
  """Batches of ones, or of random tokens; endless or a number of them.

  A batch holds `inputs`, `targets`, `positions` and `segment_ids` as int32 and
  `weights` as float32, all [per_host_batch_size, length]. Of random tokens,
  batch k is a function of the seed and k, and a target is the next input.

  Attributes:
    vocab_size: Ids are below it.
    random_seed: The seed of random tokens. `None` makes every token a 1, which
      a model learns by heart within a few steps.
    num_batches: After how many batches the input ends. `None` is never.
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
    if self.num_batches is not None and self.num_batches <= 0:
      raise ValueError(
        "SyntheticLmInput.num_batches must be positive, or None for no end, got"
        f" {self.num_batches}."
      )

  def get_next(self) -> base_input.Batch:
    """Returns this host's rows of the next batch; see the class.

    Raises:
      StopIteration: `num_batches` batches have been returned.
    """
    if self._next == self.num_batches:
      raise StopIteration
    rows, length = self.per_host_batch_size, self.length
    tokens = self._tokens(rows, length + 1)
    self._next += 1
    positions = np.arange(length, dtype=np.int32)
    return {
      "inputs": tokens[:, :-1],
      "targets": tokens[:, 1:],
      "positions": np.tile(positions, (rows, 1)),
      "segment_ids": np.ones((rows, length), np.int32),
      "weights": np.ones((rows, length), np.float32),
    }

  @property
  def is_endless(self) -> bool:
    """Whether no number of batches is given."""
    return self.num_batches is None

  def batch_shapes(self) -> base_input.Shapes | None:
    """Returns what `get_next` will return."""
    if type(self).get_next is not SyntheticLmInput.get_next:
      return None  # A subclass may add arrays of its own.
    shape = self.per_host_batch_size, self.length
    keys = ("inputs", "targets", "positions", "segment_ids")
    integers = {key: (shape, np.dtype(np.int32)) for key in keys}
    return {**integers, "weights": (shape, np.dtype(np.float32))}

  def required_vocab_size(self) -> int:
    """Returns `vocab_size`, or 2 where all tokens are ones."""
    return _TOKEN + 1 if self.random_seed is None else self.vocab_size

  def reset(self) -> None:
    """Goes back to the first batch."""
    self._next = 0

  def get_state(self) -> base_input.State:
    """Returns the number of batches read, and what they depend on."""
    return {"next": self._next, "random_seed": self.random_seed}

  def set_state(self, state: base_input.State) -> None:
    """Goes to a position that `get_state` returned.

    Raises:
      ValueError: The state is damaged, or of another seed.
    """
    expected = self.get_state()
    if set(state) != set(expected):
      raise ValueError(
        f"The state of a SyntheticLmInput must have the keys"
        f" {sorted(expected)}, got {sorted(state)}."
      )
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

  def _tokens(self, rows: int, length: int) -> np.ndarray:
    """Returns this host's rows of the next batch, int32 [rows, length]."""
    if self.random_seed is None:
      return np.full((rows, length), _TOKEN, np.int32)
    # The words of a bit generator are the same in every version of numpy, those
    # of `default_rng().integers` need not be. One number in 2**49 favours small
    # ids, which nobody can see.
    generator = np.random.Philox(key=[self.random_seed, self._next])
    words = generator.random_raw(self.global_batch_size * length)
    tokens = (words % np.uint64(self.vocab_size)).astype(np.int32)
    start = self.infeed_host_index * rows
    return tokens.reshape(-1, length)[start : start + rows]
