"""The order of documents in each epoch: a shuffle with random access.

The document at place i of epoch e comes from a keyed permutation of 0..n-1,
computed for i alone: a Feistel network over the numbers below a * b, for the
smallest a * b >= n with a = ceil(sqrt(n)), followed again from a result that
is not below n ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary
Finite Domains, 2002):

    (left, right) = divmod(i, b)
    repeat rounds: left  = (left  + mix(key, right)) mod a
                   right = (right + mix(key, left))  mod b
    i = left * b + right

So no list of n numbers is made or stored, and place 10^9 costs what place 0
costs. The arithmetic is on integers and ours alone: the order can change with
no version of numpy. Not every one of the n! orders can occur, which is so for
any shuffle with a seed.
"""

import dataclasses
import functools
import hashlib
import math

_NUM_ROUNDS = 4
_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentOrder:
  """Which document stands at each place of each epoch.

  Attributes:
    num_documents: How many documents there are.
    seed: Each seed and epoch has an order of its own. `None` is no shuffle:
      every epoch has the order of the source.
  """

  num_documents: int
  seed: int | None

  def __post_init__(self) -> None:
    if self.num_documents <= 0:
      raise ValueError(
        "DocumentOrder.num_documents must be positive, got"
        f" {self.num_documents}."
      )

  def document(self, epoch: int, index: int) -> int:
    """Returns the number of the document at place `index` of an epoch.

    Raises:
      IndexError: There is no such place.
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
      # The walk ends: a permutation leads back to a place below n.
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
