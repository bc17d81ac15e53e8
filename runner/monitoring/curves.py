"""Curves of runs for a page, read from a bounded number of metric lines.

Parsing a million lines of JSON takes ten seconds. Of a long file, only some
training lines are parsed, evenly spaced, with the last one, and all lines of
other splits. Curves are reduced to the extremes of equal groups of points, so
that the spikes of the parsed lines remain.
"""

from collections.abc import Mapping, Sequence
import json
import math
import os
import re
from typing import Any, TypeVar

from etils import epath

from paxon.runner import files, run_dir
from paxon.runner.monitoring import metrics_file

_Step = TypeVar("_Step", int, float)
Record = metrics_file.Record

# More than most lines have.
_LINE_BYTES = 1_000
_TRAIN = b'"split": "train"'
_OTHER_SPLIT = re.compile(rb'"split": "(?!train")')
# Significant digits of a value on a page.
_DIGITS = 6


def read(folder: epath.PathLike, *, max_lines: int) -> list[Record]:
  """Returns metrics of a run and of separate evaluations by step.

  Damaged lines are skipped: each hides one point, not the run.

  Args:
    folder: The run directory.
    max_lines: Bound on the training lines that are parsed.

  Raises:
    files.DamagedFileError: A file cannot be read, or has no valid line.
  """
  root = epath.Path(folder)
  found = {}
  for path in (root / run_dir.METRICS, root / run_dir.EVAL / run_dir.METRICS):
    try:
      data = files.read_bytes(path, max_bytes=files.MAX_LINES_BYTES)
    except FileNotFoundError:
      continue
    is_valid = not data.strip()
    for line in _choose_lines(data, max_lines):
      try:
        record = metrics_file.to_record(json.loads(line))
      except files.PARSE_ERRORS:
        continue
      is_valid = True
      found[record.step, record.split] = record
    if not is_valid:
      raise files.DamagedFileError(
        f"{os.fspath(path)} has no valid line of metrics."
      )
  return sorted(found.values(), key=lambda record: record.step)


def _choose_lines(data: bytes, limit: int) -> list[bytes]:
  """Returns all lines, or about `limit` of the training lines and the others.

  The lines are found by their offsets: splitting long files takes seconds.
  """
  # Long files are not counted to their end.
  first = limit * _LINE_BYTES
  if data.count(b"\n", 0, first) <= limit and data.count(b"\n") <= limit:
    return data.splitlines()
  offsets = {len(data) * i // limit for i in range(limit)}
  offsets.update(match.start() for match in _OTHER_SPLIT.finditer(data))
  # The last line ends with the file.
  offsets |= {max(0, len(data) - 2), max(0, data.rfind(_TRAIN))}
  starts = sorted({data.rfind(b"\n", 0, each) + 1 for each in offsets})
  return [data[start : data.find(b"\n", start)] for start in starts]


def thin(
  curve: Sequence[tuple[_Step, float]], limit: int
) -> list[tuple[_Step, float]]:
  """Returns at most about `limit` points, with the extremes of each group."""
  if len(curve) <= limit:
    return list(curve)
  size = math.ceil(2 * len(curve) / limit)
  kept: list[tuple[_Step, float]] = []
  for start in range(0, len(curve), size):
    group = curve[start : start + size]
    finite = [point for point in group if math.isfinite(point[1])]
    if len(finite) < len(group):
      kept.append((group[0][0], math.nan))
    if finite:
      low = min(finite, key=lambda point: point[1])
      kept += sorted({low, max(finite, key=lambda point: point[1])})
  # The newest point is the one that is looked for.
  return kept if kept[-1] == curve[-1] else [*kept, curve[-1]]


def make_tables(
  runs: Mapping[str, Sequence[Record]],
  metrics: Sequence[str] | None = None,
  *,
  max_points: int,
) -> dict[str, Any]:
  """Returns the curves of runs as a page reads them.

  Args:
    runs: Metrics by the name of the run, by step.
    metrics: Names of the metrics; None for all.
    max_points: Bound on the points of a curve.

  Returns:
    `metrics`, the names of all metrics, and `curves[metric][run][split]`, each
    `[steps, values]`; a value that is not finite is None.
  """
  names: set[str] = set()
  tables: dict[str, dict[str, Any]] = {name: {} for name in metrics or ()}
  for run, records in runs.items():
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for record in records:
      names.update(record.values)
      for name in record.values if metrics is None else metrics:
        value = record.values.get(name)
        if value is not None:
          point = record.step, value
          curves.setdefault((name, record.split), []).append(point)
    for (name, split), curve in curves.items():
      kept = thin(curve, max_points)
      table = [[step for step, _ in kept], [_number(v) for _, v in kept]]
      tables.setdefault(name, {}).setdefault(run, {})[split] = table
  return {"metrics": sorted(names), "curves": tables}


def _number(value: float) -> float | None:
  return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
