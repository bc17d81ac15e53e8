"""A source in two parts: what is trained on, and what is held out."""

from collections.abc import Callable
import dataclasses

from paxon.inputs import example_source


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
  """Every n-th example of another source, or all others.

  Attributes:
    source: All examples.
    every: One of so many is held out, the last of each group.
    is_held_out: Whether these are those, or the others.
  """

  source: example_source.ExampleSource
  every: int
  is_held_out: bool

  def __post_init__(self) -> None:
    if self.every < 2:
      raise ValueError(f"HeldOut.every must be at least 2, got {self.every}.")

  def __len__(self) -> int:
    count = len(self.source) // self.every
    return count if self.is_held_out else len(self.source) - count

  def __getitem__(self, index: int, /) -> example_source.Example:
    return self.source[self.number(index)]

  def number(self, index: int) -> int:
    """Returns the number in the other source of an example of this one.

    Raises:
      IndexError: There is no such example.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"There is no example {index} of {len(self)}.")
    if self.is_held_out:
      return index * self.every + self.every - 1
    return index + index // (self.every - 1)

  @property
  def num_tokens(self) -> Callable[[int], int] | None:
    """The places of an example by its number, if the other source knows."""
    known = getattr(self.source, "num_tokens", None)
    return None if known is None else lambda index: known(self.number(index))

  def required_vocab_size(self) -> int | None:
    """Asks the other source."""
    known = getattr(self.source, "required_vocab_size", None)
    return None if known is None else known()

  def check(self) -> None:
    """Asks the other source."""
    check = getattr(self.source, "check", None)
    if check is not None:
      check()
