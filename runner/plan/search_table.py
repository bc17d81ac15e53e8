"""Changes and layouts as lines for a terminal, with the flags to add."""

import shlex

from paxon.runner import units
from paxon.runner.plan import result


def verified(plan: result.Plan) -> list[str]:
  """Returns the change that makes a program fit, or nothing.

  Args:
    plan: With its verified changes.
  """
  fitting = [c for c in plan.verified_changes if c.fit != _DOES_NOT_FIT]
  others = [c for c in plan.verified_changes if c.fit == _DOES_NOT_FIT]
  lines = []
  for change in fitting:
    how = f"It {change.fit} (compiled)"
    if not change.compiled:
      how = "It may fit (analytical estimate, not compiled)"
    lines += [
      f"{how} if you {change.words}. Add to the command:",
      f"  {paste(change)}",
      f"  peak {_peaks(change, plan)}; {_time(change)}"
      + f"; {100 * change.recomputed_share:.0f} % of FLOPs are recomputed"
      * change.compiled,
    ]
  if others:
    lines.append("Smaller changes that were compiled but do not fit:")
  for change in others:
    lines.append(f"  {paste(change)}  (peak {_peaks(change, plan)})")
  return lines


def layouts(plan: result.Plan) -> list[str]:
  """Returns the table of `--plan_search`, one line a layout, or nothing.

  Args:
    plan: With what `--plan_search` found.
  """
  if not plan.search:
    return []
  compiled = sum(change.compiled for change in plan.search)
  rows = [("step", "peak", "result", "add to the command")]
  for change in plan.search:
    step = change.estimate_after or change.bound_after
    mark = "" if change.compiled else "~"
    least = ">= " if change.compiled and not change.estimate_after else ""
    rows.append(
      (
        mark + least + _seconds(step),
        mark + _bytes(change.peak_after),
        change.reason,
        paste(change) or "(nothing)",
      )
    )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    f"Layouts by step time, then memory: {compiled} compiled of"
    f" {plan.num_layouts:,} whose state fits (~ analytical estimate)",
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
