"""The part of the page on time: the bound, and apart from it the estimate."""

from collections.abc import Sequence
from typing import Final

from paxon.runner import units
from paxon.runner.plan import result
from paxon.runner.plan.web_page import bars, markup

PRODUCTS, MEMORY, FAST, NETWORK, EXPOSED, _, _, OVERHEAD = range(bars.STYLES)

_LEGEND: Final = (
  ("matmuls", PRODUCTS),
  ("memory", MEMORY),
  ("fast link", FAST),
  ("network", NETWORK),
  ("exposed communication", EXPOSED),
  ("kernel launch gaps", OVERHEAD),
)


def section(plan: result.Plan) -> list[str]:
  """Returns the HTML of a plan's times; nothing if it has none."""
  bound, estimate = plan.bound, plan.estimate
  if bound is None:
    return []
  rows = [bars.Row(f"bound: {s.name}", (s,)) for s in _limits(bound)]
  if estimate is not None:
    rows.append(row(plan, "estimate of a step"))
  parts = ["<h3>Time of a step</h3>", '<p class="soft">']
  parts.append(
    "The bound is at datasheet rates, everything overlapped: the"
    " longest of its bars, and no estimate."
  )
  if estimate is not None:
    parts.append(
      "The estimate is apart from it; the line at its end is its error band."
      f" Its factors: {markup.escape(estimate.source)}"
    )
  parts.append("</p>")
  parts.append(
    bars.draw(rows, title="Bound and estimate of a step", form=units.seconds)
  )
  parts.append(legend(rows))
  tables = [
    markup.table(
      ("", "at least, at most"), _bound_figures(bound), caption="Bound"
    )
  ]
  if estimate is not None:
    tables.append(
      markup.table(
        ("", "estimated", "from", "to"),
        _estimate_figures(estimate),
        caption="Estimate",
      )
    )
  return [*parts, '<div class="side">', *tables, "</div>"]


def row(plan: result.Plan, label: str) -> bars.Row:
  """Returns the bar of the estimate, or that of the bound without one.

  Args:
    plan: One with a bound.
    label: Beside the bar.
  """
  found = plan.estimate
  if found is None:
    assert plan.bound is not None
    slowest = max(_limits(plan.bound), key=lambda s: s.value)
    return bars.Row(
      label, (slowest,), text=f"\u2265 {units.seconds(plan.bound.step)}"
    )
  segments = [
    bars.Segment("matmuls", found.compute, PRODUCTS),
    bars.Segment("memory", found.memory, MEMORY),
    bars.Segment("kernel launch gaps", found.overhead, OVERHEAD),
    *(
      bars.Segment(f"waiting for {axes or 'links'}", seconds, EXPOSED)
      for axes, seconds in found.exposed.items()
    ),
  ]
  low, high = found.band
  return bars.Row(
    label,
    tuple(segments),
    text=units.seconds(found.step),
    whisker=(low * found.step, high * found.step),
  )


def legend(rows: Sequence[bars.Row]) -> str:
  """Names the colors that are there."""
  styles = {s.style for row in rows for s in row.segments if s.value}
  return bars.legend([entry for entry in _LEGEND if entry[1] in styles])


def _limits(bound: result.Bound) -> list[bars.Segment]:
  rows = [
    ("matmuls", bound.compute, PRODUCTS),
    ("memory", bound.memory, MEMORY),
    ("fast link", bound.fast_link, FAST),
    ("network", bound.network, NETWORK),
  ]
  return [bars.Segment(n, v, style) for n, v, style in rows if v is not None]


def _bound_figures(bound: result.Bound) -> list[tuple[str, str]]:
  rows = [(s.name, units.seconds(s.value)) for s in _limits(bound)]
  rows.append(("a step", units.seconds(bound.step)))
  if bound.tokens_per_second is not None:
    rows.append(("tokens/s", f"{bound.tokens_per_second:,.0f}"))
  return [*rows, ("MFU", units.share(bound.mfu))]


def _estimate_figures(found: result.Estimate) -> list[tuple[str, ...]]:
  low, high = found.band

  def alone(name: str, seconds: float) -> tuple[str, ...]:
    return name, units.seconds(seconds), "", ""

  rows = [
    alone("matmuls", found.compute),
    alone("memory", found.memory),
    alone("kernel launch gaps", found.overhead),
    *(
      alone(f"waiting for {axes or 'links'}", seconds)
      for axes, seconds in found.exposed.items()
    ),
    (
      "a step",
      *(units.seconds(found.step * f) for f in (1, low, high)),
    ),
    alone("a step at datasheet rates", found.datasheet_step),
  ]
  if found.tokens_per_second is not None:
    tokens = found.tokens_per_second
    rows.append(("tokens/s", *(f"{tokens / f:,.0f}" for f in (1, high, low))))
  return [
    *rows,
    ("MFU", *(units.share(found.mfu / f) for f in (1, high, low))),
    (
      "MFU at datasheet rates",
      units.share(found.datasheet_mfu),
      "",
      "",
    ),
    ("MFU if only matmuls took time", units.share(found.ceiling_mfu), "", ""),
  ]
