"""Changes as lines for a terminal, with what to paste."""

import shlex

from paxon.runner import units
from paxon.runner.plan import result


def verified(plan: result.Plan) -> list[str]:
  """Returns what makes a program fit that does not, or nothing.

  Args:
    plan: With its verified changes.
  """
  fitting = [c for c in plan.verified_changes if c.fit != _DOES_NOT_FIT]
  others = [c for c in plan.verified_changes if c.fit == _DOES_NOT_FIT]
  lines = []
  for change in fitting:
    how = "compiled" if change.compiled else "analytical estimate"
    lines += [
      f"It {change.fit} ({how}) if you {change.words}. Add to the command:",
      f"  {paste(change)}",
      f"  peak {_peaks(change, plan)}; {_time(change)};"
      f" {100 * change.recomputed_share:.0f} % of FLOPs are recomputed",
    ]
  if others:
    lines.append("Smaller changes that were compiled but do not fit:")
  for change in others:
    lines.append(f"  {paste(change)}  (peak {_peaks(change, plan)})")
  return lines


def front(plan: result.Plan) -> list[str]:
  """Returns the Pareto front, one line a point, or nothing.

  Args:
    plan: With what `--plan_search` found.
  """
  if not plan.search:
    return []
  how = "compiled" if plan.search[0].compiled else "analytical estimate"
  rows = [("step >=", "estimate", "peak", "recomputed", "add to the command")]
  for change in plan.search:
    rows.append(
      (
        _seconds(change.bound_after),
        _seconds(change.estimate_after),
        _bytes(change.peak_after),
        f"{100 * change.recomputed_share:.0f} %",
        paste(change) or "(nothing)",
      )
    )
  if not any(change.estimate_after for change in plan.search):
    rows = [(row[0], *row[2:]) for row in rows]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    f"Pareto front of step time and memory ({how}), fastest first",
    *(
      "  "
      + "  ".join(
        cell.ljust(w) for cell, w in zip(row, widths, strict=True)
      ).rstrip()
      for row in rows
    ),
  ]


def paste(change: result.Change) -> str:
  """Returns the assignments as a shell takes them."""
  return " ".join(shlex.quote(override) for override in change.overrides)


_DOES_NOT_FIT = result.Fit.DOES_NOT_FIT.value


def _peaks(change: result.Change, plan: result.Plan) -> str:
  text = _bytes(change.peak_after)
  if change.peak_before is not None:
    text = f"{_bytes(change.peak_before)} -> {text}"
  usable = plan.memory.usable
  return text if usable is None else f"{text} of {_bytes(usable)}"


def _time(change: result.Change) -> str:
  if change.estimate_before is not None and change.estimate_after is not None:
    before, after = change.estimate_before, change.estimate_after
    name = "estimated step time"
  else:
    before, after = change.bound_before, change.bound_after
    name = "step time at least"
  if before is None:
    return f"{name} {_seconds(after)}"
  return f"{name} {_seconds(before)} -> {_seconds(after)}"


def _bytes(size: float | int | None) -> str:
  return "-" if size is None else units.size(size)


def _seconds(seconds: float | int | None) -> str:
  return "-" if seconds is None else units.seconds(seconds)
