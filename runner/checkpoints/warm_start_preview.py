"""What a warm start will do, told in a few lines or name by name."""

from collections.abc import Iterable
import math
import os

from paxon.runner.checkpoints import (
  name_groups,
  stored_checkpoint,
  text_table,
  warm_start_plan,
)

# More lines than these for one kind of name would bury the others.
_MAX_GROUPS = 8


def summary(plan: warm_start_plan.Plan) -> list[str]:
  """Returns counts, and the names that are not simply read.

  Args:
    plan: What is read.
  """
  matching, start = plan.matching, plan.start
  every = [n for n in plan.targets if stored_checkpoint.is_variable(n)]
  shown = [
    f"warm start from step {plan.checkpoint.step} of"
    f" {os.fspath(plan.checkpoint.folder)}",
    _line(
      "read",
      f"{len(matching.sources)} of {len(every)} variables,"
      f" {_values(plan, matching.sources):,} of {_values(plan, every):,} values"
      + (", averaged" if start.averaged else ""),
    ),
  ]
  for (expression, template), count in zip(
    start.patterns, matching.uses, strict=True
  ):
    source = "initial values" if template is None else template
    shown.append(_line("", f"{expression} <- {source}: {count}"))
  shown.append(_line("training", _state(plan)))
  shown += _groups("initial", matching.initial, every)
  shown += _groups("missing", matching.absent, every)
  others = [n for n in plan.targets if not stored_checkpoint.is_variable(n)]
  shown += _groups("fresh", plan.kept, others)
  shown += _groups("unused", matching.unused, plan.checkpoint.variables())
  return shown


def table(plan: warm_start_plan.Plan) -> list[str]:
  """Returns a line for each name, and for each unused one.

  The names are those of variables, and of all the state where it is read too.

  Args:
    plan: What is read.
  """
  rows = []
  for name, spec in plan.targets.items():
    is_variable = stored_checkpoint.is_variable(name)
    if not (is_variable or plan.start.training_state):
      continue
    shape = text_table.shape(spec.shape)
    source = plan.averages.get(name, plan.reads.get(name))
    if source is None:
      why = "missing" if name in plan.matching.absent else "initial"
      rows.append((why, name, shape, ""))
    else:
      renamed = "" if source == name else f"<- {source}"
      rows.append(("read", name, shape, renamed))
  rows += [("unused", "", "", f"<- {name}") for name in plan.matching.unused]
  return text_table.lines(rows)


def _state(plan: warm_start_plan.Plan) -> str:
  """Says what comes along beside the variables."""
  if not plan.start.training_state:
    return "begins at step 0 with a new optimizer"
  variables = plan.matching.sources
  others = [name for name in plan.reads if name not in variables]
  begins = plan.checkpoint.step if "step" in others else 0
  return f"begins at step {begins}; {len(others)} arrays beside variables read"


def _groups(kind: str, names: Iterable[str], among: Iterable[str]) -> list[str]:
  groups = name_groups.collapse(names, among=among)
  if not groups:
    return []
  shown = [_label(group) for group in groups[:_MAX_GROUPS]]
  rest = sum(len(group.names) for group in groups[_MAX_GROUPS:])
  if rest:
    shown.append(f"and {rest} more")
  return [_line(kind, shown[0]), *(_line("", text) for text in shown[1:])]


def _label(group: name_groups.Group) -> str:
  count = len(group.names)
  return f"{group.label} ({count})" if count > 1 else group.label


def _values(plan: warm_start_plan.Plan, names: Iterable[str]) -> int:
  return sum(math.prod(plan.targets[name].shape) for name in names)


def _line(kind: str, text: str) -> str:
  return f"  {kind:<10}{text}"
