"""Metrics of a run: training metrics read one step late, and text lines.

Reading a step's metrics waits for that step. It happens after the next step has
been dispatched, so that the device always has work: one step runs, one waits,
and there are never more.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import time
from typing import Any

import jax
import numpy as np

from paxon.layers import summaries
from paxon.learners import loss_function
from paxon.learners import metrics as metrics_lib
from paxon.runner.monitoring import metrics_file, progress
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.session import example_views

TRAIN = "train"
# Read in every step; the others only where they are written, because each
# number is a separate transfer from the device.
_EVERY_STEP = ("loss", "grad_norm")
_SHOWN_FIRST = ("bits_per_byte", "loss", "log_pplx", "accuracy")

# Values by metric by split.
Results = Mapping[str, Mapping[str, float]]


class TrainMetrics:
  """Writes the metrics of every n-th step, as they are in that step."""

  def __init__(
    self,
    writer: metrics_file.SummaryWriter,
    *,
    every_steps: int,
    last_step: int,
    unit: str = "tokens",
    observer: observer_lib.Observer | None = None,
    check: Callable[[int, Mapping[str, float]], None] = lambda *_: None,
  ) -> None:
    """Starts the clock of the first step.

    Args:
      writer: Where metrics are written.
      every_steps: Interval of the steps that are written.
      last_step: A step that is always written.
      unit: Unit of the loss's weight (`BaseInput.unit`).
      observer: Callbacks for monitoring; by default none.
      check: Called with the step and the metrics that are read in every step,
        after they are written; a batch without targets has no loss.
    """
    self._writer = writer
    self._every_steps = every_steps
    self._last_step = last_step
    self._rate = metrics_file.name_rate(unit)
    self._observer = observer or observer_lib.Observer()
    self._check = check
    self._pending: tuple[int, loss_function.Metrics] | None = None
    self._throughput = Throughput()

  def add(self, step: int, metrics: loss_function.Metrics) -> None:
    """Takes the metrics of the step just dispatched; reads the one before."""
    before, self._pending = self._pending, (step, metrics)
    if before is not None:
      self._finish(*before)

  def drain(self) -> None:
    """Waits for the last step and writes its metrics if they are due."""
    if self._pending is not None:
      before, self._pending = self._pending, None
      self._finish(*before)

  def is_busy(self) -> bool:
    """Whether the devices are still running the last dispatched step."""
    return self._pending is not None and not all(
      x.is_ready() for x in jax.tree.leaves(self._pending[1]["loss"])
    )

  def pause(self) -> contextlib.AbstractContextManager[None]:
    """Drains, and excludes the context from the rate."""
    self.drain()
    return self._throughput.pause()

  def _finish(self, step: int, metrics: loss_function.Metrics) -> None:
    is_due = step % self._every_steps == 0 or step == self._last_step
    if not is_due:
      metrics = {k: metrics[k] for k in _EVERY_STEP if k in metrics}
    metrics, arrays = split_arrays(metrics)
    totals = metrics_lib.Totals()
    totals.add(metrics)
    self._throughput.add(totals.weight("loss"))
    values: dict[str, Any] = totals.means()
    self._observer.on_finish(step, values)
    if is_due:
      observed = self._observer.metrics(self._throughput.step_seconds())
      values[self._rate] = self._throughput.report()
      self._writer.write(step, TRAIN, values | observed)
      write_arrays(self._writer, step, arrays)
      write_distributions(self._writer, step, TRAIN, totals.distributions())
    checked = {name: values[name] for name in _EVERY_STEP if name in values}
    self._check(step, checked)


def split_arrays(
  metrics: loss_function.Metrics,
) -> tuple[loss_function.Metrics, loss_function.Metrics]:
  """Returns the metrics that are numbers, and those that are arrays."""
  arrays = {n: m for n, m in metrics.items() if summaries.num_dimensions(n)}
  return {n: m for n, m in metrics.items() if n not in arrays}, arrays


def write_arrays(
  writer: metrics_file.SummaryWriter,
  step: int,
  arrays: loss_function.Metrics,
) -> None:
  """Writes the arrays of a step; blocks until they are computed."""
  found: Mapping[str, tuple[np.ndarray, np.ndarray]] = jax.device_get(
    dict(arrays)
  )
  for group, (total, weight) in found.items():
    for name, value in metrics_lib.expand(group, total / weight):
      if name.endswith(summaries.HISTOGRAM):
        histogram = to_histogram(value)
        if histogram is not None:
          name = name.removesuffix(summaries.HISTOGRAM)
          writer.write_histogram(step, TRAIN, name, histogram)
      else:
        name = name.removesuffix(summaries.IMAGE)
        pixels = np.rint(255 * np.clip(np.nan_to_num(value), 0, 1))
        content = example_views.to_png(pixels.astype(np.uint8))
        writer.write_media(step, TRAIN, name, "image/png", content)


def to_histogram(values: np.ndarray) -> metrics_file.Histogram | None:
  """Returns the histogram of `summaries.record_histogram`; None if empty.

  Its extremes are the limits of its bins.
  """
  *counts, total, squares = values.tolist()
  limits = [*summaries.LIMITS, 2 * summaries.LIMITS[-1]]
  used = np.flatnonzero(np.asarray(counts))
  if not used.size:
    return None
  first, last = int(used[0]), int(used[-1])
  return metrics_file.Histogram(
    minimum=limits[first - 1] if first else 2 * limits[0],
    maximum=limits[last],
    count=sum(counts),
    total=total,
    total_squares=squares,
    limits=limits[first : last + 1],
    counts=counts[first : last + 1],
  )


class Throughput:
  """Tokens, or other units, per second of training time between reports."""

  def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Starts the clock."""
    self._clock = clock
    self._restart()

  def add(self, count: float) -> None:
    """Counts a finished step and its tokens."""
    self._count += count
    self._steps += 1

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Excludes the time spent in the context, such as an evaluation."""
    begin = self._clock()
    try:
      yield
    finally:
      self._start += self._clock() - begin

  def step_seconds(self) -> float:
    """Returns the mean step time since the last report."""
    return (self._clock() - self._start) / max(self._steps, 1)

  def report(self) -> float:
    """Returns the rate since the last report."""
    seconds = self._clock() - self._start
    rate = self._count / seconds if seconds > 0 else 0.0
    self._restart()
    return rate

  def _restart(self) -> None:
    self._start = self._clock()
    self._count = 0.0
    self._steps = 0


def write_distributions(
  writer: metrics_file.SummaryWriter,
  step: int,
  split: str,
  distributions: Mapping[str, metrics_lib.Distribution],
) -> None:
  """Writes the histograms of a split that have any weight."""
  for name, found in distributions.items():
    if not any(found.counts):
      continue
    histogram = metrics_file.Histogram(
      minimum=found.limits[0],
      maximum=found.limits[-1],
      count=sum(found.counts),
      total=found.total,
      total_squares=found.total_squares,
      limits=found.limits[1:],
      counts=found.counts,
    )
    writer.write_histogram(step, split, name, histogram)


def format_results(step: int, results: Results) -> Iterator[str]:
  """Yields one line for each evaluated split."""
  for split, values in results.items():
    names = [name for name in _SHOWN_FIRST if name in values]
    names += filter(metrics_file.is_rate, values)
    names += [name for name in values if name not in names]
    text = ", ".join(f"{name} {values[name]:.4g}" for name in names)
    yield f"step {step}: {split}: {text or progress.NO_TARGETS}"


def format_comparison(
  results: Results, baselines: Mapping[str, float]
) -> Iterator[str]:
  """Yields the bits per byte of the model and the baselines, best first."""
  own = {
    f"this model ({split})": values["bits_per_byte"]
    for split, values in results.items()
    if "bits_per_byte" in values
  }
  both = own | dict(baselines)
  for name in sorted(both, key=lambda name: both[name]):
    yield f"bits per byte: {both[name]:.4f} {name}"
