"""The training loop.

The host only dispatches: the step is compiled before the loop, its state is
donated, a thread reads and places batches, metrics are read one step late, and
checkpoints are written in the background.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from paxon.learners import train_state
from paxon.runner.checkpoints import checkpointer
from paxon.runner.programs import (
  compiled_steps,
  evaluation,
  prefetch,
  stop_signals,
  train_summaries,
)
from paxon.runner.programs import session as session_lib
from paxon.runner.summaries import summary_writer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainLoop:
  """Trains from any state to the job's last step.

  Attributes:
    session: The job on its devices.
    checkpoints: Where states are saved.
    writer: Where figures are written.
    evaluator: Measures the state now and then.
    stop: Says when to stop early.
  """

  session: session_lib.Session
  checkpoints: checkpointer.Checkpointer
  writer: summary_writer.SummaryWriter
  evaluator: evaluation.Evaluator
  stop: stop_signals.StopSignals

  def run(self, state: train_state.TrainState) -> train_state.TrainState:
    """Trains, and saves the last state; returns it.

    Args:
      state: Is donated. The job's training input is at the batch after it.
    """
    job = self.session.job
    step = first_step = int(state.step)
    position: Mapping[str, Any] = job.train_input.get_state()
    if first_step >= job.num_train_steps:
      self._save(step, state, position)
      return state
    with prefetch.Prefetcher(
      job.train_input,
      place=self.session.place,
      limit=job.num_train_steps - first_step,
    ) as batches:
      # While the first batches are read.
      train_step = compiled_steps.compile_train_step(self.session)
      summaries = train_summaries.TrainSummaries(
        self.writer,
        every_steps=job.summary_every_steps,
        last_step=job.num_train_steps,
      )
      for step, batch in enumerate(batches, start=first_step + 1):
        state, metrics = train_step(state, batch.arrays)
        position = batch.position
        summaries.add(step, metrics)
        if is_due(step, job.checkpoint_every_steps):
          summaries.drain()
          self._save(step, state, position)
        if is_due(step, job.eval_every_steps) and step < job.num_train_steps:
          with summaries.paused():
            self.evaluate(step, state)
        if self.stop.requested is not None:
          break
      summaries.drain()
    self._save(step, state, position)
    return state

  def evaluate(
    self, step: int, state: train_state.TrainState
  ) -> dict[str, dict[str, float]] | None:
    """Measures and writes all splits; `None` if asked to stop meanwhile."""
    results = self.evaluator.evaluate(
      state, is_stopped=lambda: self.stop.requested is not None
    )
    for split, values in (results or {}).items():
      self.writer.write(step, split, values)
    return results

  def _save(
    self, step: int, state: train_state.TrainState, position: Mapping[str, Any]
  ) -> None:
    # A run that goes on from this checkpoint does not write these lines again.
    self.writer.flush()
    self.checkpoints.save(
      step, state, specs=self.session.state_specs, data=position
    )


def is_due(step: int, every_steps: int | None) -> bool:
  """Whether something happens after this step; `None` is never."""
  return every_steps is not None and step % every_steps == 0
