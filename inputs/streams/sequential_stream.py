"""A stream over a sequential source, shuffled within windows.

The examples of an epoch are read in a fixed order in windows of
`shuffle_window`; each window is shuffled by its own keyed permutation. A
position is (epoch, index), and resuming reads only the current window. A larger
window shuffles better and uses more memory. For sources with random access use
`example_stream`.
"""

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

from paxon.inputs import checks
from paxon.inputs.sources import example_source
from paxon.inputs.streams import document_order, example_stream

# Pending references may still point into the previous window.
_KEPT_WINDOWS = 2


@dataclasses.dataclass(kw_only=True, eq=False)
class SequentialExamples(example_stream.Stream):
  """The examples of a sequential source.

  Attributes:
    source: The source of the examples.
    shuffle_seed: The shuffle seed. `None` keeps the source's order.
    shuffle_window: The number of examples held in memory and shuffled together.
    num_epochs: The number of epochs. `None` repeats without end.
  """

  source: example_source.SequentialSource
  shuffle_seed: int | None
  shuffle_window: int = 1024
  num_epochs: int | None = None
  _windows: dict[int, list[example_source.Example]] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )
  # The index of the iterator's next example, and the iterator.
  _reader: tuple[int, Iterator[example_source.Example]] | None = (
    dataclasses.field(default=None, init=False, repr=False)
  )

  def __post_init__(self) -> None:
    checks.check_positive(self, "shuffle_window", optional=["num_epochs"])

  def start(self) -> list[int]:
    """Returns [epoch 0, index 0]."""
    return [0, 0]

  def next_example(
    self, position: list[int], *, step: int
  ) -> tuple[int, list[int]] | None:
    """Returns the index of an example, and the position after it."""
    epoch, place = position
    while self.num_epochs is None or epoch < self.num_epochs:
      number, offset = divmod(place, self.shuffle_window)
      size = len(self._window(number))
      if offset < size:
        first = number * self.shuffle_window
        return first + self._order(epoch, number, size, offset), [
          epoch,
          place + 1,
        ]
      if not place:
        raise ValueError(f"The source holds no examples: {self.source!r}.")
      epoch, place = epoch + 1, 0
    return None

  def read(self, reference: int) -> example_source.Example:
    """Returns an example; reads its window again if necessary."""
    number, offset = divmod(reference, self.shuffle_window)
    return self._window(number)[offset]

  def check(self, position: Any) -> None:
    """Checks the format of a position, not whether it exists."""
    if not isinstance(position, list) or len(position) != 2:
      raise ValueError(
        f"The state's position must be an epoch and an index, got {position!r}."
      )
    for value, what in zip(position, ("epoch", "index"), strict=True):
      example_stream.check_position(value, what=what)

  def signature(self) -> dict[str, Any]:
    """Returns the window and the seed."""
    return {
      "shuffle_window": self.shuffle_window,
      "shuffle_seed": self.shuffle_seed,
    }

  @property
  def is_endless(self) -> bool:
    """Whether `num_epochs` is None."""
    return self.num_epochs is None

  def epoch(self, position: list[int]) -> int:
    """Returns the number of completed epochs."""
    return position[0]

  def leaves(self) -> list[example_stream.Stream]:
    """Returns itself."""
    return [self]

  def required_vocab_size(self) -> int | None:
    """Returns the `required_vocab_size` of the source, if it has one."""
    return example_source.call_optional(self.source, "required_vocab_size")

  def _order(self, epoch: int, number: int, size: int, offset: int) -> int:
    order = document_order.DocumentOrder(
      num_documents=size, seed=self.shuffle_seed
    )
    # Each window of each epoch has its own order.
    return order.document((epoch << 40) + number, offset)

  def _window(self, number: int) -> list[example_source.Example]:
    """Returns the examples of a window, fewer or none at the end."""
    if number not in self._windows:
      begin = number * self.shuffle_window
      if self._reader is None or self._reader[0] != begin:
        self._reader = begin, self.source.iterate(begin)
      examples = list(itertools.islice(self._reader[1], self.shuffle_window))
      self._reader = begin + len(examples), self._reader[1]
      while len(self._windows) >= _KEPT_WINDOWS:
        self._windows.pop(next(iter(self._windows)))
      self._windows[number] = examples
    return self._windows[number]
