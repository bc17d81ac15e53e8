"""Candidate changes of an experiment that reduce its memory.

A choice is one thing to change, with the assignments that do it; a candidate
is a set of choices of different kinds, of which the smallest that fits is
wanted. None of them changes what is learned but for rounding, except a narrower
dtype.
"""

from collections.abc import Iterator
import dataclasses
import enum
import itertools


class Kind(enum.Enum):
  """What a choice changes."""

  REMAT = "what the stack saves for the backward pass"
  MICROBATCHES = "how many parts a batch is computed in"
  MESH = "how arrays are split over devices"
  DTYPE = "how exactly the optimizer's state is kept"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """One thing to change.

  Attributes:
    kind: What.
    assignments: `path=value`; several where there are several places.
    words: The same for a reader.
  """

  kind: Kind
  assignments: tuple[str, ...]
  words: str


@dataclasses.dataclass(frozen=True)
class Candidate:
  """Choices of different kinds; none is the experiment as it is."""

  choices: tuple[Choice, ...] = ()

  @property
  def assignments(self) -> tuple[str, ...]:
    """Of all choices."""
    return tuple(a for choice in self.choices for a in choice.assignments)

  @property
  def overrides(self) -> tuple[str, ...]:
    """As they are typed."""
    return tuple(f"--fdl.{assignment}" for assignment in self.assignments)

  @property
  def words(self) -> str:
    """What is changed, for a reader."""
    words = [choice.words for choice in self.choices] or ["change nothing"]
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]

  @property
  def changes_numbers(self) -> bool:
    """Whether what is learned differs by more than the order of sums."""
    return any(choice.kind is Kind.DTYPE for choice in self.choices)

  def of_kind(self, kind: Kind) -> Choice | None:
    """Returns the choice of this kind, if there is one."""
    return next((c for c in self.choices if c.kind is kind), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
  """All choices that an experiment has, without what it has chosen already.

  Attributes:
    remat: From those that recompute least to those that save least.
    microbatches: From few to many.
    meshes: The promising first.
    dtypes: Narrower dtypes of the optimizer's state.
  """

  remat: tuple[Choice, ...] = ()
  microbatches: tuple[Choice, ...] = ()
  meshes: tuple[Choice, ...] = ()
  dtypes: tuple[Choice, ...] = ()

  def levels(self) -> Iterator[list[Candidate]]:
    """Yields candidates in groups, the smallest changes first.

    One change, then two, then three; at the end of each group of these once
    more with a narrower dtype, because only that changes what is learned.
    """
    lists = (self.remat, self.microbatches, self.meshes)
    for number in range(1, len(lists) + 1):
      yield [
        Candidate(choices)
        for kinds in itertools.combinations(lists, number)
        for choices in itertools.product(*kinds)
      ]
      yield [
        Candidate((*choices, dtype))
        for kinds in itertools.combinations(lists, number - 1)
        for choices in itertools.product(*kinds)
        for dtype in self.dtypes
      ]
