"""`metrics.jsonl`: the figures of a run, one JSON object a line.

  {"step": 100, "split": "train", "loss": 2.3025850929940459, ...}

Numbers have 17 significant digits, enough to give back every float64. JSON has
no NaN and no infinity; they are the strings "NaN", "Infinity" and "-Infinity",
which Python's `float()` reads. There is one line per step and split: figures
that are written again replace the line. The file is written whole each time,
never appended to, so that it may lie in an object store.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import math
import time
from typing import Any

from etils import epath

from paxon.runner import files, flush_pace, run_dir, user_error
from paxon.runner.monitoring import summary_writer

_KEYS = ("step", "split")


@dataclasses.dataclass(frozen=True)
class Record:
  """One line.

  Attributes:
    step: The training step.
    split: `train`, the name of an evaluated split, or `baseline/<name>`.
    values: Figures by name.
  """

  step: int
  split: str
  values: Mapping[str, float]


class MetricsFile(summary_writer.SummaryWriter):
  """Writes `metrics.jsonl`; goes on with the lines that are there.

  Args:
    path: Of the file.
    resume_step: The step from which training goes on, 0 for a start: lines of
      later steps are dropped, because training writes them again. None keeps
      all lines.
    clock: Gives seconds; another one in tests.
  """

  def __init__(
    self,
    path: epath.PathLike,
    *,
    resume_step: int | None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._path = epath.Path(path)
    self._pace = flush_pace.FlushPace(clock)
    self._lines: dict[tuple[int, str], str] = {}
    if self._path.exists():
      for record in read(self._path):
        if resume_step is None or record.step <= resume_step:
          self._add(record)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records one line.

    Raises:
      ValueError: A figure is called `step` or `split`.
    """
    for key in _KEYS:
      if key in values:
        raise ValueError(f"A figure cannot be called {key!r}; it is a key.")
    self._add(Record(step=step, split=split, values=values))
    if self._pace.is_due():
      self.flush()

  def _add(self, record: Record) -> None:
    self._lines[record.step, record.split] = _to_line(record)

  def flush(self) -> None:
    """Writes the file."""
    text = "".join(f"{line}\n" for line in self._lines.values())
    self._pace.run(lambda: files.write_text(self._path, text))

  def close(self) -> None:
    """Writes the file a last time."""
    self.flush()


class DamagedFileError(user_error.UserError, ValueError):
  """A line is no record; the message names the file and the line."""


def read(path: epath.PathLike) -> list[Record]:
  """Returns the lines of a file, in order.

  Args:
    path: Of the file.

  Raises:
    DamagedFileError: A line is no record.
  """
  records = []
  lines = epath.Path(path).read_text().splitlines()
  for number, line in enumerate(lines, start=1):
    try:
      fields: dict[str, Any] = json.loads(line)
      step, split = fields.pop("step"), fields.pop("split")
      values = {name: float(value) for name, value in fields.items()}
      records.append(Record(step=int(step), split=str(split), values=values))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise DamagedFileError(
        f"{path}, line {number}, is no record of metrics ({error!r}):"
        f" {line[:80]!r}; remove the line or the file."
      ) from error
  return records


def read_run(folder: epath.PathLike) -> list[Record]:
  """Returns the figures of a run: of its training and of separate evaluations.

  Where both have figures of the same step and split, the separate ones stand.

  Args:
    folder: Of the run.

  Raises:
    DamagedFileError: A line is no record.
  """
  root = epath.Path(folder)
  found = {}
  for path in (root / run_dir.METRICS, root / run_dir.EVAL / run_dir.METRICS):
    for record in read(path) if path.exists() else ():
      found[record.step, record.split] = record
  return list(found.values())


def _to_line(record: Record) -> str:
  parts = [
    f'"step": {record.step}',
    f'"split": {json.dumps(record.split)}',
  ]
  for name, value in record.values.items():
    parts.append(f"{json.dumps(name)}: {_number(float(value))}")
  return f"{{{', '.join(parts)}}}"


def _number(value: float) -> str:
  if math.isnan(value):
    return '"NaN"'
  if math.isinf(value):
    return '"Infinity"' if value > 0 else '"-Infinity"'
  text = f"{value:.17g}"
  # Without a point a reader would take it for an int, and lose a minus zero.
  return text if "." in text or "e" in text else f"{text}.0"
