r"""Ordered patterns from the names of one checkpoint to those of another model.

A pattern is a pair: a regular expression that must match a target's whole name,
and a template of the source's name, in which `\1` and `\g<word>` stand for
groups. `None` in place of the template leaves the target's initial value. The
first pattern that matches holds, and a name that none matches keeps its name:

  (r"params/encoder/(.*)", r"params/decoder/\1"),
  (r"params/head/.*", None),

This module knows names only: no shapes, no arrays, no jax.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import re

from paxon.runner.settings import training
from paxon.sharding import suggestions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matching:
  """Which source each target gets its value from.

  Attributes:
    sources: The source's name by target, for targets whose source exists.
    absent: The source's name by target, for targets whose source does not.
    initial: The targets that a pattern leaves at their initial values.
    unused: The sources that no target reads.
    uses: How many targets each pattern was the first to match.
  """

  sources: Mapping[str, str]
  absent: Mapping[str, str]
  initial: tuple[str, ...]
  unused: tuple[str, ...]
  uses: tuple[int, ...]


def match(
  targets: Sequence[str],
  sources: Iterable[str],
  *,
  patterns: Sequence[training.Pattern],
  field: str,
) -> Matching:
  """Finds the source of each target.

  Args:
    targets: The names of the model's variables.
    sources: The names that the checkpoint has.
    patterns: Ordered; see the module's docstring.
    field: Names the patterns in messages.

  Raises:
    training.PatternError: A pattern has no effect: it matches no target, or
      only targets that an earlier pattern matches.
  """
  training.check_patterns(patterns, field=field)
  compiled = [re.compile(expression) for expression, _ in patterns]
  known = list(sources)
  known_set = set(known)
  uses = [0] * len(patterns)
  found: dict[str, str] = {}
  absent: dict[str, str] = {}
  initial = []
  for target in targets:
    source: str | None = target
    for index, expression in enumerate(compiled):
      matched = expression.fullmatch(target)
      if matched:
        uses[index] += 1
        template = patterns[index][1]
        source = None if template is None else matched.expand(template)
        break
    if source is None:
      initial.append(target)
    elif source in known_set:
      found[target] = source
    else:
      absent[target] = source
  for index, count in enumerate(uses):
    if not count:
      raise _no_effect(targets, patterns, index, f"{field}[{index}]")
  read = set(found.values())
  return Matching(
    sources=found,
    absent=absent,
    initial=tuple(initial),
    unused=tuple(name for name in known if name not in read),
    uses=tuple(uses),
  )


def matches_any(
  name: str, expressions: Iterable[str], *, unused: set[str] | None = None
) -> bool:
  """Whether any of `expressions` matches the whole name.

  Args:
    name: Of a variable.
    expressions: Valid regular expressions.
    unused: Those that match are taken out of this set.
  """
  matching = [e for e in expressions if re.fullmatch(e, name)]
  if unused is not None:
    unused.difference_update(matching)
  return bool(matching)


def closest(expression: str, names: Iterable[str]) -> str:
  """Returns `; the closest name is 'x'.`, or `; known: ...`.

  Args:
    expression: One that matches nothing.
    names: What it could have matched.
  """
  names = list(names)
  found = closest_name(expression, names)
  if found is not None:
    return f"; the closest name is {found!r}."
  return suggestions.suggest(expression, names)


def closest_name(expression: str, names: Iterable[str]) -> str | None:
  """Returns the name that is most like an expression or a name, or None.

  Args:
    expression: One that matches nothing.
    names: What it could have matched.
  """
  names = list(names)
  # What stands for itself in most expressions is what was meant as a name.
  plain = re.sub(r"\(\?P?<\w+>|[\\^$()\[\]{}?+*|]|\.(?=[*+])", "", expression)
  found = suggestions.find_closest(plain.strip("/"), names)
  return (found or _sharing_a_part(plain, names) or [None])[0]


def _sharing_a_part(plain: str, names: Iterable[str]) -> list[str]:
  """Returns the names that have most folders close to those of `plain`."""
  parts = [part for part in plain.split("/") if part]

  def score(name: str) -> int:
    return sum(
      bool(suggestions.find_closest(part, name.split("/"))) for part in parts
    )

  best = sorted(names, key=lambda name: (-score(name), name))
  return [name for name in best[:1] if score(name)]


def _no_effect(
  targets: Sequence[str],
  patterns: Sequence[training.Pattern],
  index: int,
  place: str,
) -> training.PatternError:
  expression = patterns[index][0]
  hidden = [name for name in targets if re.fullmatch(expression, name)]
  if hidden:
    earlier = next(
      i for i in range(index) if re.fullmatch(patterns[i][0], hidden[0])
    )
    return training.PatternError(
      f"{place} ({expression!r}) has no effect: all that it matches, such as"
      f" {hidden[0]!r}, is taken by earlier patterns, such as"
      f" {patterns[earlier][0]!r}; put the more special one first."
    )
  return training.PatternError(
    f"{place} ({expression!r}) matches no variable of the model"
    + closest(expression, targets)
  )
