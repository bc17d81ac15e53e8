"""Training metrics, read one step late.

Reading a step's metrics waits for that step. It happens after the next step has
been dispatched, so the device always has work: one step runs, one waits, and
never are there more.
"""

import contextlib
from typing import Any

import jax

from paxon.learners import loss_function
from paxon.learners import metrics as metrics_lib
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.monitoring import summary_writer
from paxon.runner.training import throughput

TRAIN = "train"
# Read in every step; the others only where they are written, because each
# number is moved from a device by itself.
_WATCHED = ("loss", "grad_norm")


class TrainSummaries:
  """Writes the metrics of every n-th step as they are in that step."""

  def __init__(
    self,
    writer: summary_writer.SummaryWriter,
    *,
    every_steps: int,
    last_step: int,
    observer: observer_lib.Observer | None = None,
  ) -> None:
    """Starts the time of the first step.

    Args:
      writer: Where values go.
      every_steps: Interval of summaries.
      last_step: Is written too.
      observer: Is told of each finished step, and adds figures to what is
        written.
    """
    self._writer = writer
    self._every_steps = every_steps
    self._last_step = last_step
    self._observer = observer or observer_lib.Observer()
    self._pending: tuple[int, loss_function.Metrics] | None = None
    self._throughput = throughput.Throughput()

  def add(self, step: int, metrics: loss_function.Metrics) -> None:
    """Takes the metrics of a step just dispatched; finishes the one before."""
    before, self._pending = self._pending, (step, metrics)
    if before is not None:
      self._finish(*before)

  def drain(self) -> None:
    """Waits for the last step and writes its metrics if they are due."""
    if self._pending is not None:
      before, self._pending = self._pending, None
      self._finish(*before)

  def is_busy(self) -> bool:
    """Whether the devices are at work on the step dispatched last."""
    return self._pending is not None and not all(
      x.is_ready() for x in jax.tree.leaves(self._pending[1]["loss"])
    )

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """Leaves the time in the context out of `tokens_per_second`."""
    self.drain()
    return self._throughput.paused()

  def _finish(self, step: int, metrics: loss_function.Metrics) -> None:
    is_due = step % self._every_steps == 0 or step == self._last_step
    if not is_due:
      metrics = {k: metrics[k] for k in _WATCHED if k in metrics}
    totals = metrics_lib.Totals()
    totals.add(metrics)
    self._throughput.add(totals.weight("loss"))
    values: dict[str, Any] = totals.means()
    self._observer.finished(step, values)
    if is_due:
      figures = self._observer.metrics(self._throughput.step_seconds())
      values["tokens_per_second"] = self._throughput.report()
      self._writer.write(step, TRAIN, values | figures)
