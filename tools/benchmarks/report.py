"""Comparisons as a table, for the terminal and for docs/benchmarks.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from paxon.tools.benchmarks import comparison, intervals

_COLUMNS = ("case", "compared", "median", "over", "ratio", "limit", "")


def rows(comparisons: Sequence[comparison.Comparison]) -> list[list[str]]:
  """Returns one row of cells for each comparison, headings first."""
  table = [list(_COLUMNS)]
  for one in comparisons:
    ratio = one.ratio
    table.append(
      [
        one.case,
        f"{one.first} / {one.second}",
        duration(intervals.of_median(one.pairs.first).median),
        duration(intervals.of_median(one.pairs.second).median),
        f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        "" if one.limit is None else f"{one.limit:.2f}",
        one.verdict,
      ]
    )
  return table


def to_text(comparisons: Sequence[comparison.Comparison]) -> str:
  """Returns a table for the terminal, with the facts below it."""
  table = rows(comparisons)
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = [
    "  ".join(
      cell.ljust(width) for cell, width in zip(row, widths, strict=True)
    ).rstrip()
    for row in table
  ]
  return "\n".join([*lines, *facts(comparisons)])


def to_markdown(
  comparisons: Sequence[comparison.Comparison],
  *,
  environment: Mapping[str, Any],
  command: str,
) -> str:
  """Returns the page of a measurement.

  Args:
    comparisons: What was measured.
    environment: On what, see `environment.describe`.
    command: How to measure it again.
  """
  head, *body = rows(comparisons)
  lines = [
    "# Benchmarks",
    "",
    f"Made by `{command}`; changes by hand are lost.",
    "",
    ", ".join(f"{name} {value}" for name, value in environment.items()) + ".",
    "",
    f"| {' | '.join(head)} |",
    f"|{' --- |' * len(head)}",
    *(f"| {' | '.join(row)} |" for row in body),
    "",
    "Times are medians of one unit of work. The ratio is the median of the",
    "ratios of neighbouring rounds, with a bootstrap interval of 95 %. A limit",
    "`holds` if the whole interval is within it, `fails` if none of it is, and",
    "is `open` otherwise.",
    "",
    *(f"- {line}" for line in facts(comparisons)),
  ]
  return "\n".join(lines).rstrip() + "\n"


def facts(comparisons: Sequence[comparison.Comparison]) -> list[str]:
  """Returns one line on each comparison that has more to tell."""
  return [
    f"{one.case}: "
    + ", ".join(f"{name} {_short(value)}" for name, value in one.facts.items())
    for one in comparisons
    if one.facts
  ]


def duration(seconds: float) -> str:
  """Returns seconds with a unit and three digits."""
  for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
    if seconds * factor >= 1:
      return f"{seconds * factor:.3g} {unit}"
  return f"{seconds * 1e9:.3g} ns"


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)
