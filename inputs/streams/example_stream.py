"""Streams of examples with positions: the interface, and shuffled sources.

A stream is a fixed sequence of examples. A position is a JSON value for a point
between two examples. Streams hold no position, so any number of readers can
share one. A reference, also a JSON value, identifies an example, which can be
read later or by another process.
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import example_source
from paxon.inputs.streams import document_order, read_ahead

Position = Any
Reference = Any
Read = Callable[[Reference], example_source.Example]


class Stream(abc.ABC):
  """A sequence of examples with positions."""

  @abc.abstractmethod
  def start(self) -> Position:
    """Returns the position before the first example."""

  @abc.abstractmethod
  def next_example(
    self, position: Position, *, step: int
  ) -> tuple[Reference, Position] | None:
    """Returns the next example's reference and the position after it.

    None is the end of the stream. `step` is the index of the current batch,
    from 0; used by mixtures whose weights change.
    """

  @abc.abstractmethod
  def read(self, reference: Reference) -> example_source.Example:
    """Returns an example."""

  @abc.abstractmethod
  def check(self, position: Position) -> None:
    """Checks a position without reading the examples before it.

    Raises:
      ValueError: The position is invalid.
    """

  @abc.abstractmethod
  def signature(self) -> dict[str, Any]:
    """Returns the JSON values that determine the meaning of positions."""

  @property
  @abc.abstractmethod
  def is_endless(self) -> bool:
    """Whether the stream never ends."""

  @abc.abstractmethod
  def epoch(self, position: Position) -> int:
    """Returns the number of epochs completed at a position."""

  def name(self, reference: Reference) -> str:
    """Returns the name of an example for messages."""
    return f"example {reference}"

  def num_tokens(self, reference: Reference) -> int | None:
    """Returns an example's number of tokens, if known without reading it."""
    del reference
    return None

  def required_vocab_size(self) -> int | None:
    """Returns the exclusive upper bound of all ids, None if unknown."""
    return None

  def token_dtypes(self) -> dict[str, np.dtype] | None:
    """Returns the dtypes of the arrays [n] by key, if known without reading."""
    return None

  def check_readable(self) -> None:  # noqa: B027
    """Raises ValueError if reading would fail."""

  @abc.abstractmethod
  def leaves(self) -> "list[Stream]":
    """Returns the leaf streams, those that have sources."""

  def set_workers(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Sets the workers that read the leaves; None reads directly.

    With `every` each host reads every example, so examples can be read before
    the batch is planned.
    """
    for leaf in self.leaves():
      if leaf is not self:
        leaf.set_workers(workers, every=every)

  def prepare(self, references: Sequence[Reference]) -> None:
    """Starts reading examples in the background that `read` will return."""
    del references


def check_position(value: Any, *, what: str) -> int:
  """Returns `value` if it is a nonnegative integer.

  Raises:
    ValueError: It is not.
  """
  if not isinstance(value, int) or isinstance(value, bool) or value < 0:
    raise ValueError(f"The state's {what} must be an integer, got {value!r}.")
  return value


@dataclasses.dataclass(kw_only=True, eq=False)
class Examples(Stream):
  """The examples of a random-access source, shuffled in each epoch.

  A position is the number of examples read over all epochs. If an example of
  the source holds several (`example_source.PART`), a position within it is a
  list: this number, and that of the next one.

  Attributes:
    source: The source of the examples.
    shuffle_seed: The seed of each epoch's order. `None` keeps the source's.
    num_epochs: The number of epochs. `None` repeats without end.
  """

  source: example_source.ExampleSource
  shuffle_seed: int | None
  num_epochs: int | None = None
  _ahead: read_ahead.ReadAhead | None = dataclasses.field(
    default=None, init=False, repr=False
  )
  _every: bool = dataclasses.field(default=False, init=False, repr=False)
  # The last example that holds several, by its index in the source.
  _last: tuple[int, example_source.Example] | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def __post_init__(self) -> None:
    checks.check_positive(self, optional=["num_epochs"])

  def start(self) -> int:
    """Returns 0."""
    return 0

  def next_example(
    self, position: Position, *, step: int
  ) -> tuple[Reference, Position] | None:
    """Returns the example's index in the source, and the next position."""
    del step
    place, part = _split(position)
    number = self._number_at(place)
    if number is None:
      return None
    if self._ahead is not None and self._every:
      self._ahead.expect(place, self._number_at)
    if not self._has_parts:
      return number, place + 1
    count = example_source.count_parts(self._read(number))
    after = [place, part + 1] if part + 1 < count else place + 1
    return [number, part] if count > 1 else number, after

  def read(self, reference: Reference) -> example_source.Example:
    """Returns an example of the source."""
    number, part = _split(reference)
    if not self._has_parts:
      return self._read(number)
    return example_source.select_part(self._read(number), part)

  def _read(self, number: int) -> example_source.Example:
    """Returns an example of the source; with parts the last one is kept."""
    last = self._last
    if last is not None and last[0] == number:
      return last[1]
    if self._ahead is not None:
      found = self._ahead.get(number)
    else:
      found = self.source[number]
    self._last = (number, found) if self._has_parts else None
    return found

  @property
  def _has_parts(self) -> bool:
    return example_source.find_optional(self.source, "has_parts", False)

  def set_workers(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Sets the workers, which read ahead or after `prepare`.

    If the source has `num_tokens`, batches are planned without reading, and
    each host reads only the examples of its own sequences.
    """
    self._ahead = None if workers is None else workers.read_ahead(self.source)
    counts = example_source.find_optional(self.source, "num_tokens")
    self._every = every or counts is None

  def prepare(self, references: Sequence[Reference]) -> None:
    """Starts reading examples in the background."""
    if self._ahead is not None:
      self._ahead.fetch([_split(reference)[0] for reference in references])

  def num_tokens(self, reference: Reference) -> int | None:
    """Returns the `num_tokens` of the source, if it has one."""
    return example_source.call_optional(self.source, "num_tokens", reference)

  def name(self, reference: Reference) -> str:
    """Returns the source's name of an example, such as a file and a line."""
    number, _ = _split(reference)
    found = example_source.call_optional(self.source, "name", number)
    return super().name(reference) if found is None else found

  def numbers(self, begin: Position, end: Position) -> list[int]:
    """Returns the indices in the source between two positions."""
    (begin, _), (end, part) = _split(begin), _split(end)
    places = range(begin, end + (part > 0))
    found = (self._number_at(place) for place in places)
    return [number for number in found if number is not None]

  def check(self, position: Any) -> None:
    """Checks a position."""
    if self._has_parts and isinstance(position, list) and len(position) == 2:
      place = check_position(position[0], what="position")
      check_position(position[1], what="position")
    else:
      place = check_position(position, what="position")
    end = self._end
    if end is not None and place > end:
      raise ValueError(
        f"The state's position is {place}, and the stream ends after {end}"
        " examples."
      )

  def signature(self) -> dict[str, Any]:
    """Returns the source's size, content and signature, and the seed."""
    found = example_source.call_optional(self.source, "signature") or {}
    if "num_documents" not in found:
      found = found | {"num_examples": len(self.source)}
    if "content" not in found:
      found = found | {"content": self._content}
    return found | {"shuffle_seed": self.shuffle_seed}

  @functools.cached_property
  def _content(self) -> str:
    return example_source.content_hash(self.source)

  @property
  def is_endless(self) -> bool:
    """Whether `num_epochs` is None."""
    return self.num_epochs is None

  def epoch(self, position: Position) -> int:
    """Returns the number of completed epochs."""
    return _split(position)[0] // self._order.num_documents

  def leaves(self) -> list[Stream]:
    """Returns itself."""
    return [self]

  def required_vocab_size(self) -> int | None:
    """Returns the source's."""
    return example_source.call_optional(self.source, "required_vocab_size")

  def token_dtypes(self) -> dict[str, np.dtype] | None:
    """Returns the source's."""
    return example_source.call_optional(self.source, "token_dtypes")

  def check_readable(self) -> None:
    """Raises ValueError if the source is empty, or its own check fails."""
    _ = self._order
    example_source.call_optional(self.source, "check")

  def _number_at(self, position: int) -> int | None:
    """Returns the source index at a position, None at the end."""
    if self._end is not None and position >= self._end:
      return None
    order = self._order
    return order.document(*divmod(position, order.num_documents))

  @property
  def _end(self) -> int | None:
    if self.num_epochs is None:
      return None
    return self.num_epochs * self._order.num_documents

  @functools.cached_property
  def _order(self) -> document_order.DocumentOrder:
    if not len(self.source):
      raise ValueError(f"The source holds no examples: {self.source!r}.")
    return document_order.DocumentOrder(
      num_documents=len(self.source), seed=self.shuffle_seed
    )


def _split(value: Any) -> tuple[int, int]:
  """Returns the numbers of an example and of a part of it."""
  return (value[0], value[1]) if isinstance(value, list | tuple) else (value, 0)
