"""Which part of which example goes to which row of a batch.

Only lengths matter here. Four ways to pack, all deterministic:

* SPLIT, concatenate and split: the places of one example after another fill
  row after row; one that does not fit goes on in the next row or batch. No
  place is left empty, but an example may be in several rows, as segments that
  do not see each other.
* FIRST_FIT: an example goes to the first row with room for all of it. What
  fits nowhere waits for the next batch; when `max_waiting` wait, the batch is
  done. Each batch begins with those that wait, in order, so none waits long.
* BEST_FIT: the same, but it goes to the row with the least room that is enough.
* NONE: one example a row.

An example has one length, or two with an encoder. One longer than a row is cut
into parts of a row's length in the first three ways.
"""

from collections.abc import Callable
import dataclasses
import enum
from typing import Any

import numpy as np

Lengths = tuple[int, ...]


class Packing(enum.Enum):
  """How examples share rows."""

  SPLIT = "split"
  FIRST_FIT = "first_fit"
  BEST_FIT = "best_fit"
  NONE = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
  """An example, or what is left of one, that is not in a batch yet.

  Attributes:
    reference: Of the example.
    begin: How many of its places are in batches already.
    lengths: All its places, and those of its encoder if there is one.
  """

  reference: Any
  begin: int
  lengths: Lengths

  @property
  def left(self) -> Lengths:
    """What is not in a batch yet."""
    return (self.lengths[0] - self.begin, *self.lengths[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Places [begin, end) of an example in a row, and all of its encoder's."""

  reference: Any
  begin: int
  end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The rows of one batch.

  Attributes:
    rows: The parts in each row, from left to right.
    waiting: What has been taken and is not in the batch, in order.
  """

  rows: list[list[Part]]
  waiting: list[Item]


def make(
  packing: Packing,
  *,
  waiting: list[Item],
  take: Callable[[], Item | None],
  num_rows: int,
  lengths: Lengths,
  max_waiting: int,
) -> Plan:
  """Plans a batch.

  Args:
    packing: How.
    waiting: What comes first.
    take: Returns the next example, None at the end.
    num_rows: The rows of the batch.
    lengths: The places of a row, and those of its encoder if there is one.
    max_waiting: See the module; for FIRST_FIT and BEST_FIT.

  Returns:
    The plan; all rows are empty when nothing is left.
  """
  queue = _Queue(waiting, take)
  if packing is Packing.SPLIT:
    return _split(queue, num_rows, lengths[0])
  if packing is Packing.NONE:
    return _one_each(queue, num_rows)
  is_best = packing is Packing.BEST_FIT
  return _fit(queue, num_rows, lengths, max_waiting, is_best=is_best)


class _Queue:
  """What waits, and then what is taken."""

  def __init__(
    self, waiting: list[Item], take: Callable[[], Item | None]
  ) -> None:
    self.waiting = list(waiting)
    self._take = take

  def next(self) -> Item | None:
    return self.waiting.pop(0) if self.waiting else self._take()


def _split(queue: _Queue, num_rows: int, length: int) -> Plan:
  rows: list[list[Part]] = [[] for _ in range(num_rows)]
  number, free = 0, length
  while number < num_rows and (item := queue.next()) is not None:
    begin, total = item.begin, item.lengths[0]
    while begin < total and number < num_rows:
      end = min(total, begin + free)
      rows[number].append(Part(reference=item.reference, begin=begin, end=end))
      free -= end - begin
      begin = end
      if not free:
        number, free = number + 1, length
    if begin < total:
      queue.waiting.insert(0, dataclasses.replace(item, begin=begin))
  return Plan(rows=rows, waiting=queue.waiting)


def _one_each(queue: _Queue, num_rows: int) -> Plan:
  rows: list[list[Part]] = []
  while len(rows) < num_rows and (item := queue.next()) is not None:
    end = item.lengths[0]
    rows.append([Part(reference=item.reference, begin=item.begin, end=end)])
  rows.extend([] for _ in range(num_rows - len(rows)))
  return Plan(rows=rows, waiting=queue.waiting)


def _fit(
  queue: _Queue,
  num_rows: int,
  lengths: Lengths,
  max_waiting: int,
  *,
  is_best: bool,
) -> Plan:
  rows: list[list[Part]] = [[] for _ in range(num_rows)]
  free = np.tile(np.asarray(lengths, np.int64), (num_rows, 1))
  left: list[Item] = []

  def placed(item: Item) -> Item | None:
    """Puts as much as fits in rows; returns the rest."""
    while True:
      need = np.minimum(item.left, (lengths[0], *item.left[1:]))
      fits = (free >= need).all(axis=1)
      if not fits.any():
        return item
      row = int(
        np.where(fits, free[:, 0], lengths[0] + 1).argmin()
        if is_best
        else fits.argmax()
      )
      end = item.begin + int(need[0])
      part = Part(reference=item.reference, begin=item.begin, end=end)
      rows[row].append(part)
      free[row] -= need
      if end == item.lengths[0]:
        return None
      item = dataclasses.replace(item, begin=end)

  for item in queue.waiting:
    rest = placed(item)
    if rest is not None:
      left.append(rest)
  queue.waiting = []
  while len(left) < max_waiting and free[:, 0].any():
    item = queue.next()
    if item is None:
      break
    rest = placed(item)
    if rest is not None:
      left.append(rest)
  return Plan(rows=rows, waiting=left)
