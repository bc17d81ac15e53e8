"""A stream without the examples that a predicate rejects."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream, read_ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinTokens:
  """Keeps examples with at least so many tokens.

  Attributes:
    tokens: The minimum.
  """

  tokens: int

  def __call__(self, example: example_source.Example) -> bool:
    """Returns whether to keep an example."""
    return example_source.num_tokens(example) >= self.tokens


@dataclasses.dataclass(kw_only=True, eq=False)
class Filtered(example_stream.Stream):
  """The examples of another stream for which `keep` is true.

  A position is the other stream's, so no example is tested twice.

  Attributes:
    stream: The other stream.
    keep: Returns whether to keep an example; a function of the example alone.
    max_rejected: The number of consecutive rejected examples after which
      reading is an error.
  """

  stream: example_stream.Stream
  keep: Callable[[example_source.Example], bool]
  max_rejected: int = 1_000_000
  _last: tuple[Any, example_source.Example] | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def __post_init__(self) -> None:
    checks.check_positive(self, "max_rejected")

  def start(self) -> Any:
    """Returns the other stream's."""
    return self.stream.start()

  def next_example(self, position: Any, *, step: int) -> tuple[Any, Any] | None:
    """Returns the next example that is kept, and the position after it.

    Raises:
      ValueError: A whole epoch, or the whole stream, has none, or more than
        `max_rejected` consecutive examples are rejected.
    """
    epoch = self.stream.epoch(position)
    is_start, rejected = position == self.stream.start(), 0
    while found := self.stream.next_example(position, step=step):
      reference, position = found
      example = self.stream.read(reference)
      if self.keep(example):
        self._last = reference, example
        return reference, position
      rejected += 1
      if self.stream.epoch(position) > epoch + 1:
        raise self._nothing_to_read("every example of a whole epoch")
      if rejected > self.max_rejected:
        raise self._nothing_to_read(f"{rejected} consecutive examples")
    if is_start and rejected:
      raise self._nothing_to_read("every example of the stream")
    return None

  def read(self, reference: Any) -> example_source.Example:
    """Returns an example."""
    if self._last is not None and self._last[0] == reference:
      return self._last[1]
    return self.stream.read(reference)

  def _nothing_to_read(self, what: str) -> ValueError:
    return ValueError(
      f"Filtered.keep ({self.keep!r}) rejected {what}, so nothing is"
      f" left to read (max_rejected is {self.max_rejected})."
    )

  def name(self, reference: Any) -> str:
    """Returns the name of an example for messages."""
    return self.stream.name(reference)

  def num_tokens(self, reference: Any) -> int | None:
    """Returns None: the filter has already read the example."""
    del reference

  def check(self, position: Any) -> None:
    """Calls the other stream's."""
    self.stream.check(position)

  def signature(self) -> dict[str, Any]:
    """Returns the other stream's: a position means the same in both."""
    return self.stream.signature()

  @property
  def is_endless(self) -> bool:
    """Whether the other stream is."""
    return self.stream.is_endless

  def epoch(self, position: Any) -> int:
    """Calls the other stream's."""
    return self.stream.epoch(position)

  def set_workers(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Calls the other stream's; each host reads every example."""
    del every
    self.stream.set_workers(workers, every=True)

  def prepare(self, references: Sequence[Any]) -> None:
    """Calls the other stream's."""
    self.stream.prepare(references)

  def leaves(self) -> list[example_stream.Stream]:
    """Returns the leaves of the other stream."""
    return self.stream.leaves()

  def token_dtypes(self) -> dict[str, np.dtype] | None:
    """Returns the other stream's."""
    return self.stream.token_dtypes()

  def required_vocab_size(self) -> int | None:
    """Calls the other stream's."""
    return self.stream.required_vocab_size()

  def check_readable(self) -> None:
    """Calls the other stream's."""
    self.stream.check_readable()
