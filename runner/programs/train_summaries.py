"""Training metrics, read one step late.

Reading a step's metrics waits for that step. It happens after the next step has
been dispatched, so the device always has work: one step runs, one waits, and
never are there more.
"""

from collections.abc import Mapping
import contextlib
from typing import Any

from paxon.learners import weighted
from paxon.runner.programs import throughput
from paxon.runner.summaries import summary_writer

TRAIN = "train"


class TrainSummaries:
  """Writes the metrics of every n-th step as they are in that step."""

  def __init__(
    self,
    writer: summary_writer.SummaryWriter,
    *,
    every_steps: int,
    last_step: int,
  ) -> None:
    """Starts the time of the first step.

    Args:
      writer: Where values go.
      every_steps: Interval of summaries.
      last_step: Is written too.
    """
    self._writer = writer
    self._every_steps = every_steps
    self._last_step = last_step
    self._pending: tuple[int, Mapping[str, weighted.Weighted]] | None = None
    self._throughput = throughput.Throughput()

  def add(self, step: int, metrics: Mapping[str, weighted.Weighted]) -> None:
    """Takes the metrics of a step just dispatched; finishes the one before."""
    before, self._pending = self._pending, (step, metrics)
    if before is not None:
      self._finish(*before)

  def drain(self) -> None:
    """Waits for the last step and writes its metrics if they are due."""
    if self._pending is not None:
      before, self._pending = self._pending, None
      self._finish(*before)

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """Leaves the time in the context out of `tokens_per_second`."""
    self.drain()
    return self._throughput.paused()

  def _finish(
    self, step: int, metrics: Mapping[str, weighted.Weighted]
  ) -> None:
    totals = weighted.Totals()
    totals.add(metrics)
    self._throughput.add(totals.weight("loss"))
    if step % self._every_steps == 0 or step == self._last_step:
      values: dict[str, Any] = totals.means()
      values["tokens_per_second"] = self._throughput.report()
      self._writer.write(step, TRAIN, values)
