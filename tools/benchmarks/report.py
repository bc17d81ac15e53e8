"""Tables of comparisons, and facts of the machine."""

from collections.abc import Sequence
import datetime
import os
import pathlib
import platform
from typing import Any

import jax

from paxon.runner.checkpoints import text_table
from paxon.tools.benchmarks import timing

_COLUMNS = ("case", "compared", "median", "over", "ratio", "limit", "")


def rows(comparisons: Sequence[timing.Comparison]) -> list[list[str]]:
  """Returns a table of cells, a row per comparison, with headings first."""
  table = [list(_COLUMNS)]
  for one in comparisons:
    ratio = one.ratio
    table.append(
      [
        one.case,
        f"{one.first} / {one.second}",
        duration(timing.median_interval(one.pairs.first).median),
        duration(timing.median_interval(one.pairs.second).median),
        f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        "" if one.limit is None else f"{one.limit:.2f}",
        one.verdict,
      ]
    )
  return table


def to_text(comparisons: Sequence[timing.Comparison]) -> str:
  """Returns a table for the terminal, followed by the facts."""
  lines = text_table.format_lines(rows(comparisons))
  return "\n".join([*lines, *facts(comparisons)])


def facts(comparisons: Sequence[timing.Comparison]) -> list[str]:
  """Returns one line of facts for each comparison that has any."""
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


def environment(now: datetime.datetime) -> dict[str, Any]:
  """Returns the date, versions and devices as JSON values."""
  devices = jax.devices()
  return {
    "date": now.date().isoformat(),
    "jax": jax.__version__,
    "python": platform.python_version(),
    "device": devices[0].device_kind,
    "num_devices": len(devices),
    "cpu": cpu_model(),
    "cores": len(os.sched_getaffinity(0)),
    "load_before": round(os.getloadavg()[0], 2),
  }


def cpu_model(path: str = "/proc/cpuinfo") -> str:
  """Returns the model name of the processor."""
  try:
    lines = pathlib.Path(path).read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  names = [line.partition(":")[2] for line in lines if "model name" in line]
  return names[0].strip() if names else platform.machine()
