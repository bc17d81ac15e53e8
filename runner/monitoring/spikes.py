"""Detection of spikes of the loss and the gradient norm, with their batches.

A value is a spike if it is not finite, or if it exceeds both

  median + num_deviations * 1.4826 * MAD      of the last `window` steps,
  median * (1 + rise)                         so that noise does not trigger,

or if it exceeds `median * factor`, however noisy the steps were. 1.4826 times
the median absolute deviation (MAD) is a robust estimate of the standard
deviation. Only the first step of a lasting spike is reported.

A report contains the data position before and after the batch, so that
`read_batch` can read the batch again.
"""

import bisect
import collections
from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from etils import epath

from paxon.inputs import base_input
from paxon.runner import files
from paxon.runner.settings import monitoring

_TO_SIGMA = 1.4826
# The smallest relative rise of a spike. Gradient norms often double.
_RISES = {"loss": 0.05, "grad_norm": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spike:
  """One spike.

  Attributes:
    step: Its training step.
    metric: `loss` or `grad_norm`.
    value: The value of the metric.
    expected: The median of the previous steps; NaN without any.
    limit: The limit that the value exceeds; NaN if the value is not finite.
    position_before: The state of the input before the batch.
    position_after: The state after the batch.
    documents: The document numbers of the batch, if the input has them.
  """

  step: int
  metric: str
  value: float
  expected: float
  limit: float
  position_before: Mapping[str, Any]
  position_after: Mapping[str, Any]
  documents: Sequence[int] | None = None

  def line(self) -> str:
    """Returns one line for the terminal; the file has the data positions."""
    line = f"spike at step {self.step}: {self.metric} {self.value:.4g}"
    if math.isnan(self.expected):
      return line
    return f"{line}, expected {self.expected:.4g}"


class Detector:
  """Detects spikes of one metric."""

  def __init__(
    self, settings: monitoring.SpikeSettings, *, factor: float, rise: float
  ) -> None:
    """Starts with an empty window; see the module for `factor` and `rise`."""
    self._settings = settings
    self._factor = factor
    self._rise = rise
    self._values: collections.deque[float] = collections.deque()
    # The same values, sorted incrementally.
    self._sorted: list[float] = []
    self._was_high = False

  def find(self, value: float) -> tuple[float, float] | None:
    """Adds the value of the next step; non-finite ones do not enter the window.

    Returns:
      The median and the limit if a spike begins, else None.
    """
    is_finite = math.isfinite(value)
    median, limit = _median(self._sorted), math.nan
    # A fast path: most values are below the limit for a deviation of 0.
    if not is_finite or value > self._find_limit(median, 0.0):
      limit = self._limit(median)
    is_high = not is_finite or value > limit
    is_new, self._was_high = is_high and not self._was_high, is_high
    if is_finite:
      self._add(value)
    return (median, limit) if is_new else None

  def _add(self, value: float) -> None:
    if len(self._values) == self._settings.window:
      first = self._values.popleft()
      del self._sorted[bisect.bisect_left(self._sorted, first)]
    self._values.append(value)
    bisect.insort(self._sorted, value)

  def _limit(self, median: float) -> float:
    """Returns the limit; NaN with fewer than `min_steps` values."""
    if len(self._values) < self._settings.min_steps:
      return math.nan
    gaps = sorted(abs(value - median) for value in self._sorted)
    return self._find_limit(median, _TO_SIGMA * _median(gaps))

  def _find_limit(self, median: float, deviation: float) -> float:
    """Returns the limit for a deviation, in which it increases."""
    limit = median + max(
      self._settings.num_deviations * deviation, self._rise * abs(median)
    )
    return min(limit, self._factor * median) if median > 0 else limit


class SpikeReport:
  """Writes `spikes.jsonl` and prints each spike."""

  def __init__(
    self,
    settings: monitoring.SpikeSettings,
    path: epath.PathLike,
    *,
    resume_step: int = 0,
    train_input: base_input.BaseInput | None = None,
  ) -> None:
    """Reads the existing file; drops spikes after `resume_step`."""
    self._train_input = train_input
    self._path = epath.Path(path)
    factors = {
      "loss": settings.loss_factor,
      "grad_norm": settings.grad_norm_factor,
    }
    self._detectors = {
      metric: Detector(settings, factor=factors[metric], rise=rise)
      for metric, rise in _RISES.items()
    }
    self._spikes: list[Spike] = []
    if self._path.exists():
      self._spikes = [s for s in read(self._path) if s.step <= resume_step]

  def observe(
    self,
    step: int,
    values: Mapping[str, float],
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
  ) -> list[Spike]:
    """Adds the metrics and data positions of the next step; returns its spikes.

    The positions are those of the input before and after the batch.
    """
    found: list[Spike] = []
    for metric, detector in self._detectors.items():
      if metric not in values:
        continue
      limits = detector.find(values[metric])
      if limits is not None:
        found.append(
          Spike(
            step=step,
            metric=metric,
            value=values[metric],
            expected=limits[0],
            limit=limits[1],
            position_before=before,
            position_after=after,
            documents=self._documents(before, after),
          )
        )
    if found:
      self._spikes += found
      text = files.to_json_lines(map(dataclasses.asdict, self._spikes))
      files.write_text(self._path, text)
      print("\n".join(spike.line() for spike in found), flush=True)
    return found

  def _documents(
    self, before: Mapping[str, Any], after: Mapping[str, Any]
  ) -> list[int] | None:
    if self._train_input is None:
      return None
    return self._train_input.documents_between(dict(before), dict(after))


def read(path: epath.PathLike) -> list[Spike]:
  """Returns the spikes of a run, in order; raises files.DamagedFileError."""
  not_finite = ("value", "expected", "limit")
  return files.read_json_lines(
    path,
    lambda value: files.to_record(Spike, value, not_finite=not_finite),
    kind="spike",
  )


def read_batch(
  spike: Spike, train_input: base_input.BaseInput
) -> base_input.Batch:
  """Reads the batch of a spike again; raises ValueError for other data."""
  train_input.set_state(dict(spike.position_before))
  return train_input.get_next()


def _median(in_order: Sequence[float]) -> float:
  """Returns the median of sorted values; NaN without any."""
  if not in_order:
    return math.nan
  half = len(in_order) // 2
  return (in_order[half] + in_order[-half - 1]) / 2
