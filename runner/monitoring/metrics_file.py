"""Writers of metrics, and `metrics.jsonl`: one JSON object per line.

  {"step": 100, "split": "train", "loss": 2.3025850929940459, ...}

Numbers have 17 significant digits, enough to restore every float64. NaN and
infinities, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity",
which Python's `float()` parses. There is one line per step and split: writing
it again replaces it. The file is always written whole, so that it may be in an
object store.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import time
from typing import Any

from etils import epath

from paxon.runner import files, run_dir

_KEYS = ("step", "split")
# The metrics of baselines are written at step 0 under the split
# `baseline/<name>`, so that a report needs no other source.
BASELINE_PREFIX = "baseline/"
_NUMBERS = frozenset({int, float})
# Written for values that JSON does not have.
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
# End of the name of a rate, such as `tokens_per_second`.
RATE = "_per_second"


def name_rate(unit: str) -> str:
  """Returns the metric of a rate of training, of `tokens` or `images`."""
  return f"{unit}{RATE}"


def is_rate(metric: str) -> bool:
  """Whether a metric is that of a rate."""
  return metric.endswith(RATE)


def to_words(metric: str) -> str:
  """Returns the name of a metric as text."""
  return metric.replace("_", " ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histogram:
  """The distribution of the finite values of an array.

  Attributes:
    minimum: The least value.
    maximum: The largest value.
    count: The number of finite values.
    total: Their sum.
    total_squares: The sum of their squares.
    limits: Upper limits of the bins, ascending, the last one `maximum`.
    counts: Values in each bin.
  """

  minimum: float
  maximum: float
  count: float
  total: float
  total_squares: float
  limits: Sequence[float]
  counts: Sequence[float]


class SummaryWriter(abc.ABC):
  """Writes metrics by step and split."""

  @abc.abstractmethod
  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records metrics after a training step.

    The split is `train`, an evaluated split, or `baseline/<name>`.
    """

  def write_text(  # noqa: B027
    self, step: int, split: str, name: str, text: str
  ) -> None:
    """Records a text, such as samples; most writers have no place for it."""

  def write_histogram(  # noqa: B027
    self, step: int, split: str, name: str, histogram: Histogram
  ) -> None:
    """Records a distribution; most writers have no place for it."""

  def write_media(  # noqa: B027
    self, step: int, split: str, name: str, kind: str, content: bytes
  ) -> None:
    """Records a file of the kind `image/png` or `audio/wav`."""

  def flush(self) -> None:  # noqa: B027
    """Makes everything written so far durable.

    Called before a checkpoint is committed, because a resumed run does not
    write these metrics again. Writers also flush periodically.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Flushes and releases all resources."""


class CompositeWriter(SummaryWriter):
  """Forwards all calls to several writers, in order."""

  def __init__(self, writers: Sequence[SummaryWriter]):
    self._writers = tuple(writers)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records metrics in every writer."""
    for writer in self._writers:
      writer.write(step, split, values)

  def write_text(self, step: int, split: str, name: str, text: str) -> None:
    """Records a text in every writer."""
    for writer in self._writers:
      writer.write_text(step, split, name, text)

  def write_histogram(
    self, step: int, split: str, name: str, histogram: Histogram
  ) -> None:
    """Records a distribution in every writer."""
    for writer in self._writers:
      writer.write_histogram(step, split, name, histogram)

  def write_media(
    self, step: int, split: str, name: str, kind: str, content: bytes
  ) -> None:
    """Records an image or a sound in every writer."""
    for writer in self._writers:
      writer.write_media(step, split, name, kind, content)

  def flush(self) -> None:
    """Flushes every writer."""
    for writer in self._writers:
      writer.flush()

  def close(self) -> None:
    """Closes every writer, even if one of them fails."""
    with contextlib.ExitStack() as stack:
      for writer in reversed(self._writers):
        stack.callback(writer.close)


@dataclasses.dataclass(frozen=True)
class Record:
  """One line.

  Attributes:
    step: The training step.
    split: `train`, the name of an evaluated split, or `baseline/<name>`.
    values: Metrics by name.
  """

  step: int
  split: str
  values: Mapping[str, float]


def is_baseline(record: Record) -> bool:
  """Whether metrics are those of a baseline."""
  return record.split.startswith(BASELINE_PREFIX)


def to_record(fields: dict[str, Any]) -> Record:
  """Returns the record of a parsed line, whose mapping is emptied.

  Raises:
    KeyError: It has no step or split.
    TypeError: A value is not a number.
    ValueError: The step is negative, or a name is not valid Unicode.
  """
  step, split = fields.pop("step"), fields.pop("split")
  files.check_type("step", step, int)
  files.check_type("split", split, str)
  if step < 0:
    raise ValueError(f"its step is {step}")
  # JSON can encode lone surrogates, which no file or page can hold.
  "".join((split, *fields)).encode()
  values = {}
  for name, value in fields.items():
    # Not `check_type` for each: there may be millions.
    if type(value) not in _NUMBERS and value not in _NOT_FINITE:
      files.check_type(name, value, float)
    values[name] = float(value)
  return Record(step=step, split=split, values=values)


class MetricsFile(SummaryWriter):
  """Writes `metrics.jsonl` and keeps its existing lines.

  Args:
    path: The path of the file.
    resume_step: The step from which training resumes, or 0. Lines of later
      steps are dropped, because training writes them again. None keeps all
      lines.
    clock: Returns seconds; replaced in tests.
  """

  def __init__(
    self,
    path: epath.PathLike,
    *,
    resume_step: int | None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._path = epath.Path(path)
    self._pace = files.FlushPace(clock)
    self._lines: dict[tuple[int, str], str] = {}
    if self._path.exists():
      for record in read(self._path):
        if resume_step is None or record.step <= resume_step:
          self._add(record)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records one line; raises ValueError for metrics `step` and `split`."""
    for key in _KEYS:
      if key in values:
        raise ValueError(
          f"A metric cannot be named {key!r}, which is reserved."
        )
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
    """Flushes."""
    self.flush()


def read(path: epath.PathLike) -> list[Record]:
  """Returns the lines of a file, in order; raises files.DamagedFileError."""
  return files.read_json_lines(path, to_record, kind="metrics")


def read_run(folder: epath.PathLike) -> list[Record]:
  """Returns the metrics of a run, from training and separate evaluations.

  For the same step and split, those of the separate evaluation take precedence.

  Raises:
    files.DamagedFileError: A line cannot be parsed.
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
  # Without a point it would parse as an int, which loses a minus zero.
  return text if "." in text or "e" in text else f"{text}.0"
