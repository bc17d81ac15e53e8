"""Sections of a report on changes: those that fit, and results of a search."""

from collections.abc import Iterator, Sequence
import shlex

from paxon.runner import units
from paxon.runner.plan import advice, result, sections


def make_sections(plan: result.Plan) -> Iterator[sections.Section]:
  """Yields the changes that make the program fit, and the search results."""
  does_not_fit = result.Fit.DOES_NOT_FIT.value
  slow = []
  for change in plan.verified_changes:
    if change.fit != does_not_fit and advice.is_too_slow(plan, change):
      slow.append(change)
    elif change.fit != does_not_fit:
      how = f"It {change.fit} (compiled)"
      if not change.compiled:
        how = "It may fit (analytical estimate, not compiled)"
      yield sections.Section(
        f"{how} if you {change.words}. Add to the command:",
        lines=(
          _paste(change),
          f"{_peaks(change, plan)}; {_times(change, plan)}",
        ),
      )
  if slow:
    yield sections.Section(
      "Changes that fit, but make steps more than"
      f" {advice.MAX_SLOWDOWN:g} times slower:",
      [(_paste(c), _peaks(c, plan), _times(c, plan)) for c in slow],
    )
  others = [c for c in plan.verified_changes if c.fit == does_not_fit]
  if others:
    yield sections.Section(
      "Smaller changes that were compiled but do not fit:",
      [(_paste(change), _peaks(change, plan)) for change in others],
    )
  if plan.search:
    compiled = sum(change.compiled for change in plan.search)
    yield sections.Section(
      f"Layouts by step time, then memory: {compiled} compiled of"
      f" {plan.num_layouts:,} whose state fits (~ analytical estimate)",
      [_layout(change) for change in plan.search],
      ("step", "peak", "recomputed", "result", "add to the command"),
    )


def _layout(change: result.Change) -> Sequence[str]:
  mark = "" if change.compiled else "~"
  step, peak, least = change.estimate, change.peak, ""
  if step is None:
    step, least = change.bound, ">= " if change.compiled else ""
  return (
    "-" if step is None else mark + least + units.seconds(step),
    "-" if peak is None else mark + units.size(peak),
    units.share(change.recomputed_share) if change.compiled else "-",
    change.reason or change.fit,
    _paste(change) or "(nothing)",
  )


def _paste(change: result.Change) -> str:
  """Returns the overrides, quoted for a shell."""
  return " ".join(shlex.quote(override) for override in change.overrides)


def _peaks(change: result.Change, plan: result.Plan) -> str:
  sizes = [
    units.size(size)
    for size in (plan.memory.peak, change.peak)
    if size is not None
  ]
  text = f"peak {' -> '.join(sizes) or 'unknown'}"
  usable = plan.memory.usable
  return text if usable is None else f"{text} of {units.size(usable)}"


def _times(change: result.Change, plan: result.Plan) -> str:
  before = None if plan.estimate is None else plan.estimate.step
  after, name = change.estimate, "estimated step time"
  if before is None or after is None:
    before = None if plan.bound is None else plan.bound.step
    after, name = change.bound, "step time at least"
  times = [units.seconds(t) for t in (before, after) if t is not None]
  text = f"{name} {' -> '.join(times) or 'unknown'}"
  if change.compiled:
    share = units.share(change.recomputed_share)
    text += f"; {share} of FLOPs are recomputed"
  return text
