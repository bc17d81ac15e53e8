"""The differences of two configurations, and what each of them does.

Works on texts that `dump.to_text` wrote, so that runs of the past can be
compared without importing what they were made of.
"""

import dataclasses

from paxon.runner.configuration import effects

_NOTHING = "nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """One place where two configurations differ.

  Attributes:
    path: The place.
    before: What stands there in the first, `nothing` if there is no such place.
    after: The same of the second.
    rule: What the difference does; where the owners are of two classes, the
      graver of both.
  """

  path: str
  before: str
  after: str
  rule: effects.Rule

  def __str__(self) -> str:
    return f"{self.path}: {self.before} -> {self.after}"


def differences(before: str, after: str) -> list[Difference]:
  """Returns all differences in the order of the dumps.

  Args:
    before: The first dump.
    after: The second one.
  """
  old, new = values(before), values(after)
  return [
    Difference(
      path=path,
      before=old.get(path, _NOTHING),
      after=new.get(path, _NOTHING),
      rule=_graver(path, old, new),
    )
    for path in old | new
    if old.get(path) != new.get(path)
  ]


def grouped(
  found: list[Difference],
) -> dict[effects.Effect, list[Difference]]:
  """Returns the differences by effect, the gravest effect first."""
  groups = {
    effect: [each for each in found if each.rule.effect is effect]
    for effect in effects.Effect
  }
  return {effect: group for effect, group in groups.items() if group}


def values(text: str) -> dict[str, str]:
  """Returns what a dump says, by path; parts have the name of their class."""
  result = {}
  for line in text.splitlines():
    path, equals, value = line.partition(" = ")
    if not equals:
      path, _, value = line.partition(": ")
    result[path] = value
  return result


def _graver(
  path: str, old: dict[str, str], new: dict[str, str]
) -> effects.Rule:
  order = list(effects.Effect)
  if path in old and path in new:
    known = effects.rule_of_parts(old[path], new[path])
    if known is not None:
      return known
  rules = [effects.rule_of(path, each) for each in (old, new) if path in each]
  return min(
    rules, key=lambda rule: (order.index(rule.effect), rule.may_change)
  )
