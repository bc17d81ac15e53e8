"""Reports of jumps of the loss or the gradient's norm, with their batches.

A value jumps if it is not finite, or if it lies above both of

  median + num_deviations * 1.4826 * MAD      of the last `window` steps,
  median * (1 + rise)                         so that noise is none of it,

or above `median * factor`, however noisy the steps were. 1.4826 times the
median absolute deviation (MAD) estimates a standard deviation that outliers do
not move. A jump that lasts is reported at its first step.

A report holds the position of the data before and after the batch, so the batch
can be read again: `read_batch`.
"""

import bisect
import collections
from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
from typing import Any

from etils import epath

from paxon.inputs import base_input
from paxon.runner import files, user_error
from paxon.runner.settings import monitoring

_TO_SIGMA = 1.4826
# The least relative rise of a jump. The norm of a gradient often doubles.
_RISES = {"loss": 0.05, "grad_norm": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spike:
  """One jump.

  Attributes:
    step: In which it happened.
    metric: `loss` or `grad_norm`.
    value: Of the metric.
    expected: The median of the steps before; NaN without any.
    limit: Above which the value jumped; NaN if it is not finite itself.
    position_before: The state of the input from which the batch was read.
    position_after: Its state after the batch.
    documents: The numbers of the batch's documents, where the input can tell.
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
    """Returns one line for the terminal."""
    return (
      f"spike at step {self.step}: {self.metric} {self.value:.4g}, expected"
      f" {self.expected:.4g} (limit {self.limit:.4g}); its batch was read from"
      f" {json.dumps(self.position_before)} to"
      f" {json.dumps(self.position_after)}"
    )


class Detector:
  """Finds jumps of one metric."""

  def __init__(
    self, settings: monitoring.SpikeSettings, *, factor: float, rise: float
  ) -> None:
    """Starts without any step.

    Args:
      settings: The window and the deviations.
      factor: Times the median is always a jump.
      rise: The least relative rise of a jump.
    """
    self._settings = settings
    self._factor = factor
    self._rise = rise
    self._values: collections.deque[float] = collections.deque()
    # The same values in order, so that a step needs no sort.
    self._in_order: list[float] = []
    self._was_high = False

  def find(self, value: float) -> tuple[float, float] | None:
    """Takes the value of the next step.

    Args:
      value: May be NaN or infinite; then it is no part of the window.

    Returns:
      The median and the limit if the value jumps and the one before did not.
    """
    is_finite = math.isfinite(value)
    median, limit = _middle(self._in_order), math.nan
    # Nearly all values lie below what any deviation would allow.
    if not is_finite or value > self._bounded(median, 0.0):
      limit = self._limit(median)
    is_high = not is_finite or value > limit
    is_new, self._was_high = is_high and not self._was_high, is_high
    if is_finite:
      self._add(value)
    return (median, limit) if is_new else None

  def _add(self, value: float) -> None:
    if len(self._values) == self._settings.window:
      first = self._values.popleft()
      del self._in_order[bisect.bisect_left(self._in_order, first)]
    self._values.append(value)
    bisect.insort(self._in_order, value)

  def _limit(self, median: float) -> float:
    """Returns above what a value jumps; NaN before `min_steps` of them."""
    if len(self._values) < self._settings.min_steps:
      return math.nan
    gaps = sorted(abs(value - median) for value in self._in_order)
    return self._bounded(median, _TO_SIGMA * _middle(gaps))

  def _bounded(self, median: float, deviation: float) -> float:
    """Returns the limit for a deviation; the larger, the higher."""
    limit = median + max(
      self._settings.num_deviations * deviation, self._rise * abs(median)
    )
    return min(limit, self._factor * median) if median > 0 else limit


class SpikeReport:
  """Writes `spikes.jsonl` and says each jump on the terminal."""

  def __init__(
    self,
    settings: monitoring.SpikeSettings,
    path: epath.PathLike,
    *,
    resume_step: int = 0,
    train_input: base_input.BaseInput | None = None,
  ) -> None:
    """Goes on with the file that is there.

    Args:
      settings: What counts as a jump.
      path: Of the file, which is made at the first jump.
      resume_step: Jumps of later steps are dropped: they are made again.
      train_input: Is asked for the documents of a batch.
    """
    self._train_input = train_input
    self._path = epath.Path(path)
    self._detectors = {
      metric: Detector(
        settings, factor=getattr(settings, f"{metric}_factor"), rise=rise
      )
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
    """Takes the metrics of the next step; returns its jumps.

    Args:
      step: Its number.
      values: Its metrics, of which `loss` and `grad_norm` count.
      before: The position of the data before its batch.
      after: The same after it.
    """
    found: list[Spike] = []
    for metric, detector in self._detectors.items():
      if metric not in values:
        continue
      jump = detector.find(values[metric])
      if jump is not None:
        found.append(
          Spike(
            step=step,
            metric=metric,
            value=values[metric],
            expected=jump[0],
            limit=jump[1],
            position_before=before,
            position_after=after,
            documents=self._documents(before, after),
          )
        )
    if found:
      self._spikes += found
      lines = [json.dumps(dataclasses.asdict(s)) for s in self._spikes]
      files.write_text(self._path, "".join(f"{line}\n" for line in lines))
      print("\n".join(spike.line() for spike in found), flush=True)
    return found

  def _documents(
    self, before: Mapping[str, Any], after: Mapping[str, Any]
  ) -> list[int] | None:
    if self._train_input is None:
      return None
    return self._train_input.documents_between(dict(before), dict(after))


def read(path: epath.PathLike) -> list[Spike]:
  """Returns the jumps of a run, in order.

  Args:
    path: Of `spikes.jsonl`.

  Raises:
    UserError: A line is no jump.
  """
  spikes = []
  lines = epath.Path(path).read_text().splitlines()
  for number, line in enumerate(lines, start=1):
    try:
      spikes.append(Spike(**json.loads(line)))
    except (ValueError, TypeError) as error:
      raise user_error.UserError(
        f"{path}, line {number}, is no record of a spike ({error!r}):"
        f" {line[:80]!r}; remove the line or the file."
      ) from error
  return spikes


def read_batch(
  spike: Spike, train_input: base_input.BaseInput
) -> base_input.Batch:
  """Reads the batch of a jump again; moves the input.

  Args:
    spike: From `read`.
    train_input: The run's, such as `job.train_input`.

  Raises:
    ValueError: The position belongs to other data.
  """
  train_input.set_state(dict(spike.position_before))
  return train_input.get_next()


def _middle(in_order: Sequence[float]) -> float:
  """Returns the median of sorted values; NaN of none."""
  if not in_order:
    return math.nan
  half = len(in_order) // 2
  return (in_order[half] + in_order[-half - 1]) / 2
