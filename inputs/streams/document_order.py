"""The order of documents in each epoch: a shuffle with random access.

`OrderedInput` is the base of inputs that read whole examples in this order.

The document at index i of epoch e comes from a keyed permutation of 0..n-1,
evaluated for i alone: a Feistel network over the numbers below a * b, for the
smallest a * b >= n with a = ceil(sqrt(n)), repeated until the result is below n
("cycle walking"; Black and Rogaway, Ciphers with Arbitrary Finite Domains,
2002):

    (left, right) = divmod(i, b)
    repeat rounds: left  = (left  + mix(key, right)) mod a
                   right = (right + mix(key, left))  mod b
    i = left * b + right

No list of n numbers is created, and every index has the same cost. The integer
arithmetic does not depend on numpy, so no version of it can change the order.
As with any seeded shuffle, not all n! orders can occur.
"""

from collections.abc import Sized
import dataclasses
import functools
import hashlib
import math
from typing import ClassVar

from paxon.inputs import base_input, checks
from paxon.inputs.sources import example_source

_NUM_ROUNDS = 4
_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentOrder:
  """A permutation of the documents for each epoch.

  Attributes:
    num_documents: The number of documents.
    seed: Each seed and epoch has its own order. `None` does not shuffle.
  """

  num_documents: int
  seed: int | None

  def __post_init__(self) -> None:
    checks.check_positive(self, "num_documents")

  def document(self, epoch: int, index: int) -> int:
    """Returns the document at `index` of an epoch.

    Raises:
      IndexError: The index is out of range.
    """
    if not 0 <= index < self.num_documents:
      raise IndexError(
        f"index must be at least 0 and less than num_documents"
        f" ({self.num_documents}), got {index}."
      )
    if self.seed is None:
      return index
    keys = _keys(self.seed, epoch)
    rows = math.isqrt(self.num_documents - 1) + 1
    columns = -(-self.num_documents // rows)
    while True:
      left, right = divmod(index, columns)
      for key, other_key in keys:
        left = (left + _mix(key ^ right)) % rows
        right = (right + _mix(other_key ^ left)) % columns
      index = left * columns + right
      # Terminates: every cycle of a permutation returns to a number below n.
      if index < self.num_documents:
        return index


@functools.lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[tuple[int, int], ...]:
  """Returns two 64-bit keys for each round."""

  def key(number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{epoch}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little")

  return tuple((key(2 * i), key(2 * i + 1)) for i in range(_NUM_ROUNDS))


def _mix(value: int) -> int:
  """Returns 64 bits that depend on all 64 bits of `value` (splitmix64)."""
  value = (value + 0x9E3779B97F4A7C15) & _MASK
  value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
  return value ^ (value >> 31)


class OrderedInput(base_input.BaseInput):
  """Base of inputs of whole examples, in the order of each epoch.

  Subclasses are dataclasses with the fields `source`, `shuffle_seed` and
  `num_epochs` of `ImageInput`, and `_next`, the examples read by all hosts.
  """

  is_resizable: ClassVar[bool] = True

  source: Sized
  shuffle_seed: int | None
  num_epochs: int | None

  @property
  def is_endless(self) -> bool:
    """Whether `num_epochs` is None."""
    return self.num_epochs is None

  def reset(self) -> None:
    """Returns to the first batch."""
    self._next = 0

  def get_state(self) -> base_input.State:
    """Returns the number of examples read, and what determines their order."""
    return {
      "next": self._next,
      "num_examples": len(self.source),
      "content": self._content,
      "shuffle_seed": self.shuffle_seed,
    }

  def set_state(self, state: base_input.State) -> None:
    """Sets a position from `get_state`.

    Raises:
      ValueError: The state is damaged, or of other data or another order.
    """
    expected = self.get_state()
    checks.check_keys(self, state, expected)
    for key, value in expected.items():
      if key != "next" and state[key] != value:
        raise ValueError(
          f"The state was saved with the {key} {state[key]!r}, and this input"
          f" has {value!r}: its batches are others."
        )
    position = state["next"]
    if (
      not isinstance(position, int)
      or isinstance(position, bool)
      or position < 0
    ):
      raise ValueError(
        f"The state's next must be a number of {self.unit}, got {position!r}."
      )
    self._next = position

  def count_batches(self, num_epochs: int) -> int:
    """Returns the number of batches of some epochs."""
    return -(-num_epochs * self._order.num_documents // self.global_batch_size)

  def _begin_batch(self) -> int | None:
    """Returns the number of examples of all epochs, `None` if endless.

    Raises:
      StopIteration: All of them have been read.
    """
    if self.num_epochs is None:
      return None
    end = self.num_epochs * self._order.num_documents
    if self._next >= end:
      raise StopIteration
    return end

  def _number(self, position: int) -> int:
    """Returns the index in the source of the example at a position."""
    order = self._order
    return order.document(*divmod(position, order.num_documents))

  @functools.cached_property
  def _order(self) -> DocumentOrder:
    if not len(self.source):
      raise ValueError(f"The source holds no {self.unit}: {self.source!r}.")
    return DocumentOrder(num_documents=len(self.source), seed=self.shuffle_seed)

  @functools.cached_property
  def _content(self) -> str:
    return example_source.content_hash(self.source)
