"""Changes between two plans of a function, as a reviewer reads them."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Final

from paxon.runner import user_error
from paxon.runner.checkpoints import text_table
from paxon.runner.plan import result
from paxon.runner.plan.functions import plan_values

_FIELDS: Final = ("peak", "arguments", "temporaries", "flops", "step")
_MOST_CAUSES: Final = 3
_LIMIT: Final = re.compile(r"([^>]+)>\+([^,]+)(?:,|$)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
  """The largest increase of a value.

  Attributes:
    text: As given, such as `peak>+5%`.
    name: Of the value; see `plan_values`.
    amount: In the unit of the value, or as a share of the base.
    is_share: Whether it is a share.
  """

  text: str
  name: str
  amount: float
  is_share: bool

  def find_excess(self, base: result.Plan, head: result.Plan) -> str | None:
    """Returns by what the limit is exceeded; None if it is kept.

    Args:
      base: The plan before the change.
      head: The plan after it.

    Raises:
      UserError: The meshes have no such axis.
    """
    plan_values.check_axes(self.name, (base, head))
    old, new = (plan_values.find(self.name, each) for each in (base, head))
    if old.amount is None or new.amount is None:
      return f"{self.text}: {old} -> {new}, so it cannot be checked"
    allowed = self.amount * old.amount if self.is_share else self.amount
    if new.amount - old.amount <= allowed:
      return None
    return f"{self.text}: {old} -> {new}, {_format_change(old, new)}"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Two plans of one function for one target.

  Attributes:
    title: Function, target and verdict.
    rows: Name, base, head and change of each value.
    lines: Sentences on what has changed.
    excesses: Exceeded limits.
  """

  title: str
  rows: Sequence[Sequence[str]]
  lines: Sequence[str]
  excesses: Sequence[str]

  def to_text(self) -> str:
    """Returns the comparison for a terminal."""
    rows = [("", "base", "head", "change"), *self.rows]
    lines = text_table.format_lines(rows, right=[1, 2])
    lines += [*self.lines, *(f"exceeded: {each}" for each in self.excesses)]
    return "\n  ".join([self.title, *lines]) + "\n"

  def to_markdown(self) -> str:
    """Returns the comparison for a comment of GitHub."""
    rows = [("", "base", "head", "change"), ("---", "--:", "--:", "---")]
    lines = [f"| {' | '.join(row)} |" for row in [*rows, *self.rows]]
    items = [f"- {line}" for line in self.lines]
    items += [f"- **exceeded:** {each}" for each in self.excesses]
    return "\n".join([f"### {self.title}", "", *lines, "", *items]) + "\n"


def parse_limits(text: str) -> list[Limit]:
  """Returns the limits of a text such as `peak>+5%,all-gather>+1GiB`.

  Args:
    text: Limits, separated by commas; a name may contain commas, too.

  Raises:
    UserError: It cannot be read.
  """
  text = ",".join(part.strip() for part in text.split(","))
  matches = list(_LIMIT.finditer(text))
  is_whole = "".join(match[0] for match in matches) == text
  if not matches or not is_whole or text.endswith(","):
    raise user_error.UserError(
      f"--fail_if={text!r}: write limits such as peak>+5% or all-gather>+1GiB,"
      " separated by commas."
    )
  return [_parse_limit(*match.groups()) for match in matches]


def _parse_limit(name: str, amount: str) -> Limit:
  unit = plan_values.get_unit(name)
  share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", amount)
  if share:
    value: float | None = float(share[1]) / 100
  else:
    value = plan_values.parse_amount(amount, unit)
  if value is None:
    raise user_error.UserError(
      f"--fail_if: {name}>+{amount} needs an amount in %,"
      f" {', '.join(unit.scales)}."
    )
  return Limit(
    text=f"{name}>+{amount}",
    name=name,
    amount=value,
    is_share=share is not None,
  )


def compare(
  base: Sequence[result.Plan],
  head: Sequence[result.Plan],
  limits: Sequence[Limit] = (),
) -> list[Comparison]:
  """Compares the plans of each target.

  Args:
    base: Plans of a function before a change.
    head: Plans after it, for the same targets.
    limits: Of values.

  Raises:
    UserError: The targets differ, or there are two plans of one.
  """
  if not base or not head:
    raise user_error.UserError(
      f"The {'head' if base else 'base'} has no plans; make it by `paxon-plan"
      " run --json`."
    )
  olds, news = ({plan.target: plan for plan in each} for each in (base, head))
  if len(olds) < len(base) or len(news) < len(head):
    raise user_error.UserError(
      "There are several plans of one target; compare files of `paxon-plan"
      " run`, which have one of each."
    )
  if set(olds) != set(news):
    raise user_error.UserError(
      f"The base has plans of {', '.join(olds) or 'no target'}, but the head of"
      f" {', '.join(news) or 'no target'}; make both for the same targets."
    )
  return [_compare(old, news[target], limits) for target, old in olds.items()]


def _compare(
  old: result.Plan, new: result.Plan, limits: Sequence[Limit]
) -> Comparison:
  names = " -> ".join(dict.fromkeys((old.experiment, new.experiment)))
  fits = " -> ".join(dict.fromkeys((old.fit, new.fit)))
  if fits == result.Fit.UNKNOWN.value:
    fits = "unknown whether it fits"
  rows = []
  for name in _FIELDS:
    left, right = (plan_values.find(name, each) for each in (old, new))
    rows.append((name, str(left), str(right), _format_change(left, right)))
  lines = [*_compare_mesh(old, new), *_compare_collectives(old, new)]
  for name in ("arguments", "temporaries"):
    lines += _compare_causes(name, old, new)
  lines += _compare_versions(old.versions, new.versions)
  excesses = [limit.find_excess(old, new) for limit in limits]
  return Comparison(
    title=f"{names} on {new.target}: {fits}",
    rows=rows,
    lines=lines,
    excesses=[excess for excess in excesses if excess is not None],
  )


def _format_change(old: plan_values.Value, new: plan_values.Value) -> str:
  if old.amount is None or new.amount is None:
    return "same" if old.amount == new.amount else "unknown"
  change = new.amount - old.amount
  if not change:
    return "same"
  text = _format_signed(old.unit, change)
  return f"{text} ({change / old.amount:+.1%})" if old.amount else text


def _format_signed(unit: plan_values.Unit, change: float | int) -> str:
  return f"{'+' if change > 0 else '-'}{unit.format(abs(change))}"


def _compare_mesh(old: result.Plan, new: result.Plan) -> Iterator[str]:
  left, right = (
    ",".join(f"{a}={n}" for a, n in plan.mesh.items()) or "one device"
    for plan in (old, new)
  )
  if left != right:
    yield f"mesh: {left} -> {right}"


def _compare_collectives(old: result.Plan, new: result.Plan) -> Iterator[str]:
  """Yields the payloads that are added or removed, by kind and axes."""
  names = dict.fromkeys(
    (each.kind, each.axes) for plan in (new, old) for each in plan.collectives
  )
  for kind, axes in names:
    left, right = (
      plan_values.sum_collectives(
        plan, [c for c in plan.collectives if (c.kind, c.axes) == (kind, axes)]
      )
      for plan in (old, new)
    )
    if left.amount is None or right.amount is None:
      yield "collectives: unknown, so they are not compared"
      return
    change = right.amount - left.amount
    moved = _list_changes(left, right)
    over = f" over {','.join(axes)}" if axes else ""
    if change:
      verb = "adds" if change > 0 else "removes"
      size = left.unit.format(abs(change))
      where = f" ({', '.join(moved)})" if moved else ""
      yield f"{verb} {size} of {kind}s{over}{where}"
    elif moved:
      yield f"moves {kind}s{over} ({', '.join(moved)})"


def _list_changes(old: plan_values.Value, new: plan_values.Value) -> list[str]:
  """Returns the largest changes of causes; of a single one only the name."""
  changes = {
    name: new.causes.get(name, 0) - old.causes.get(name, 0)
    for name in dict.fromkeys([*new.causes, *old.causes])
  }
  ordered = sorted(
    ((name, change) for name, change in changes.items() if change),
    key=lambda item: -abs(item[1]),
  )
  if len(ordered) == 1:
    return [ordered[0][0]]
  texts = [
    f"{_format_signed(old.unit, change)} {name}"
    for name, change in ordered[:_MOST_CAUSES]
  ]
  more = len(ordered) - len(texts)
  return [*texts, f"and {more} more"] if more else texts


def _compare_causes(
  name: str, old: result.Plan, new: result.Plan
) -> Iterator[str]:
  left, right = (plan_values.find(name, each) for each in (old, new))
  if left.amount != right.amount and (moved := _list_changes(left, right)):
    yield f"{name}: {'; '.join(moved)}"


def _compare_versions(
  old: Mapping[str, str], new: Mapping[str, str]
) -> Iterator[str]:
  changed = [
    f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
    for name in dict.fromkeys([*old, *new])
    if old.get(name) != new.get(name)
  ]
  if changed:
    yield f"versions: {', '.join(changed)}"
