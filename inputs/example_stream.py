"""One order of examples, read from any position: the interface and the leaf.

A stream is a fixed sequence of examples. A position in it is a JSON value that
names the place between two of them; nothing else is remembered, so any number
of readers may stand at any places. What stands next is a reference, a JSON
value too, by which the example can be read, also later or by another process.
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from paxon.inputs import document_order, example_source, read_ahead

Position = Any
Reference = Any
Read = Callable[[Reference], example_source.Example]


class Stream(abc.ABC):
  """A sequence of examples with positions."""

  @abc.abstractmethod
  def start(self) -> Position:
    """Returns the position before the first example."""

  @abc.abstractmethod
  def following(
    self, position: Position, *, step: int
  ) -> tuple[Reference, Position] | None:
    """Returns what stands at a position, and the position after it.

    Args:
      position: Where to look.
      step: The batch that is being made, from 0; only mixtures whose weights
        change ask for it.

    Returns:
      None at the end of the stream.
    """

  @abc.abstractmethod
  def read(self, reference: Reference) -> example_source.Example:
    """Returns an example."""

  @abc.abstractmethod
  def check(self, position: Position) -> None:
    """Checks that there is such a position; reads nothing of what is before.

    Raises:
      ValueError: There is none.
    """

  @abc.abstractmethod
  def signature(self) -> dict[str, Any]:
    """Returns what a position is true of, JSON values."""

  @property
  @abc.abstractmethod
  def is_endless(self) -> bool:
    """Whether the stream never ends."""

  @abc.abstractmethod
  def epoch(self, position: Position) -> int:
    """Returns how many times all examples stand before a position."""

  def name(self, reference: Reference) -> str:
    """Returns the words for an example in messages."""
    return f"example {reference}"

  def num_tokens(self, reference: Reference) -> int | None:
    """Returns the places of an example, if known without reading it."""
    del reference
    return None

  def required_vocab_size(self) -> int | None:
    """Returns the number that all ids are below, if known."""
    return None

  def token_dtypes(self) -> dict[str, np.dtype] | None:
    """Returns the arrays [n] of every example, if known without reading."""
    return None

  def check_readable(self) -> None:  # noqa: B027
    """Raises ValueError where reading is bound to fail."""

  @abc.abstractmethod
  def leaves(self) -> "list[Stream]":
    """Returns the streams at the bottom, those that have sources."""

  def read_ahead_with(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Has others read, those leaves that have an index.

    Args:
      workers: Who reads; theirs are the sources of the leaves. None has nobody.
      every: Whether each host reads every example, so that they may be read
        before it is known which rows they are in.
    """
    for leaf in self.leaves():
      if leaf is not self:
        leaf.read_ahead_with(workers, every=every)

  def prepare(self, references: Sequence[Reference]) -> None:
    """Has others begin to read what `read` is going to be asked for."""
    del references


def check_place(value: Any, *, what: str) -> int:
  """Returns `value`, if it is a number of examples.

  Raises:
    ValueError: It is not.
  """
  if not isinstance(value, int) or isinstance(value, bool) or value < 0:
    raise ValueError(f"The state's {what} must be an integer, got {value!r}.")
  return value


@dataclasses.dataclass(kw_only=True, eq=False)
class Examples(Stream):
  """The examples of an indexed source, shuffled anew in every epoch.

  A position is one integer: how many examples have been read, over all epochs.

  Attributes:
    source: Where they are.
    shuffle_seed: The seed of each epoch's order. `None` is the source's order.
    num_epochs: After how many epochs the stream ends. `None` is never.
  """

  source: example_source.ExampleSource
  shuffle_seed: int | None
  num_epochs: int | None = None
  _ahead: read_ahead.ReadAhead | None = dataclasses.field(
    default=None, init=False, repr=False
  )
  _every: bool = dataclasses.field(default=False, init=False, repr=False)

  def __post_init__(self) -> None:
    if self.num_epochs is not None and self.num_epochs <= 0:
      raise ValueError(
        "Examples.num_epochs must be positive, or None for no end, got"
        f" {self.num_epochs}."
      )

  def start(self) -> int:
    """Returns 0."""
    return 0

  def following(self, position: int, *, step: int) -> tuple[int, int] | None:
    """Returns the number in the source, and the next position."""
    del step
    if self._is_end(position):
      return None
    if self._ahead is not None and self._every:
      self._ahead.expect(position, self._number_at)
    order = self._order
    number = order.document(*divmod(position, order.num_documents))
    return number, position + 1

  def read(self, reference: int) -> example_source.Example:
    """Returns an example of the source."""
    if self._ahead is not None:
      return self._ahead.get(reference)
    return self.source[reference]

  def read_ahead_with(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Has others read: what stands next, or what `prepare` is told.

    Where the source knows the places of its examples, a host reads those of its
    own rows only, and which they are is known when a batch is planned.
    """
    self._ahead = None if workers is None else workers.read_ahead(self.source)
    self._every = every or getattr(self.source, "num_tokens", None) is None

  def prepare(self, references: Sequence[int]) -> None:
    """Has others begin to read some examples."""
    if self._ahead is not None:
      self._ahead.fetch(references)

  def num_tokens(self, reference: int) -> int | None:
    """Returns the source's, if it knows lengths."""
    return example_source.call_optional(self.source, "num_tokens", reference)

  def numbers(self, begin: int, end: int) -> list[int]:
    """Returns the numbers in the source between two positions."""
    found = (self._number_at(place) for place in range(begin, end))
    return [number for number in found if number is not None]

  def check(self, position: Any) -> None:
    """Checks that there is such a position."""
    place = check_place(position, what="position")
    end = self._end
    if end is not None and place > end:
      raise ValueError(
        f"The state's position is {place}, and the stream ends after {end}"
        " examples."
      )

  def signature(self) -> dict[str, Any]:
    """Returns the source's size and signature, and the seed."""
    return (example_source.call_optional(self.source, "signature") or {}) | {
      "num_examples": len(self.source),
      "shuffle_seed": self.shuffle_seed,
    }

  @property
  def is_endless(self) -> bool:
    """Whether no number of epochs is given."""
    return self.num_epochs is None

  def epoch(self, position: int) -> int:
    """Returns the number of whole epochs."""
    return position // self._order.num_documents

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

  def _is_end(self, position: int) -> bool:
    end = self._end
    return end is not None and position >= end

  def _number_at(self, position: int) -> int | None:
    """Returns the number in the source of what stands at a position."""
    if self._is_end(position):
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
