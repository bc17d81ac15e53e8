"""One order of examples that have no index: shuffled within windows.

The examples of an epoch come in a fixed order, `shuffle_window` at a time; each
window is shuffled by a keyed permutation of its own. A position is (epoch,
place), and to go on there only its window is read. A larger window shuffles
better and costs more memory; where there is an index, use `example_stream`.
"""

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

from paxon.inputs import document_order, example_source, example_stream

# Waiting examples are read again after the window has moved on.
_KEPT_WINDOWS = 2


@dataclasses.dataclass(kw_only=True, eq=False)
class SequentialExamples(example_stream.Stream):
  """The examples of a sequential source.

  Attributes:
    source: Where they are.
    shuffle_seed: The seed of the order in windows. `None` is the source's.
    shuffle_window: Examples that are held and shuffled together.
    num_epochs: After how many epochs the stream ends. `None` is never.
  """

  source: example_source.SequentialSource
  shuffle_seed: int | None
  shuffle_window: int = 1024
  num_epochs: int | None = None
  _windows: dict[int, list[example_source.Example]] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )
  # Where the iterator stands, and the iterator.
  _reader: tuple[int, Iterator[example_source.Example]] | None = (
    dataclasses.field(default=None, init=False, repr=False)
  )

  def __post_init__(self) -> None:
    for name, value in (
      ("shuffle_window", self.shuffle_window),
      ("num_epochs", 1 if self.num_epochs is None else self.num_epochs),
    ):
      if value <= 0:
        raise ValueError(
          f"SequentialExamples.{name} must be positive, got {value}."
        )

  def start(self) -> list[int]:
    """Returns the first epoch's first place."""
    return [0, 0]

  def following(
    self, position: list[int], *, step: int
  ) -> tuple[int, list[int]] | None:
    """Returns the number of a record, and the next position."""
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
    """Returns an example; its window is read again if it is gone."""
    number, offset = divmod(reference, self.shuffle_window)
    return self._window(number)[offset]

  def check(self, position: Any) -> None:
    """Checks that the position is one; whether it is there, reading shows."""
    if not isinstance(position, list) or len(position) != 2:
      raise ValueError(
        f"The state's position must be an epoch and a place, got {position!r}."
      )
    for value, what in zip(position, ("epoch", "place"), strict=True):
      example_stream.check_place(value, what=what)

  def signature(self) -> dict[str, Any]:
    """Returns the window and the seed."""
    return {
      "shuffle_window": self.shuffle_window,
      "shuffle_seed": self.shuffle_seed,
    }

  @property
  def is_endless(self) -> bool:
    """Whether no number of epochs is given."""
    return self.num_epochs is None

  def epoch(self, position: list[int]) -> int:
    """Returns the number of whole epochs."""
    return position[0]

  def leaves(self) -> list[example_stream.Stream]:
    """Returns itself."""
    return [self]

  def required_vocab_size(self) -> int | None:
    """Returns the source's."""
    return example_source.call_optional(self.source, "required_vocab_size")

  def _order(self, epoch: int, number: int, size: int, offset: int) -> int:
    order = document_order.DocumentOrder(
      num_documents=size, seed=self.shuffle_seed
    )
    # Every window of every epoch has an order of its own.
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
