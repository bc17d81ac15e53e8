"""The training loop.

The host only dispatches: the step is compiled before the loop, its state is
donated, a thread reads and places batches, metrics are read one step late,
checkpoints are written in the background, and Python's garbage collection
waits for the pauses.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
from typing import Any

import jax

from paxon.learners import train_state
from paxon.runner.checkpoints import checkpointer
from paxon.runner.monitoring import goodput, summary_writer
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.training import (
  compiled_steps,
  data_positions,
  evaluation,
  evaluation_log,
  expected_kernels,
  garbage,
  prefetch,
  profile_guided,
  stop_signals,
  train_summaries,
)
from paxon.runner.training import session as session_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainLoop:
  """Trains from any state to the job's last step.

  Attributes:
    session: The job on its devices.
    traced: Its training step, traced.
    checkpoints: Where states are saved.
    writer: Where figures are written.
    evaluator: Measures the state now and then.
    log: The evaluations made, also by the processes before.
    stop: Says when the user wants to stop.
    observer: Is told what happens; by default it does nothing.
    guide: Profiles some steps to compile the step anew; None for no profile.
  """

  session: session_lib.Session
  traced: jax.stages.Traced
  checkpoints: checkpointer.Checkpointer
  writer: summary_writer.SummaryWriter
  evaluator: evaluation.Evaluator
  log: evaluation_log.EvaluationLog
  stop: stop_signals.StopSignals
  observer: observer_lib.Observer = dataclasses.field(
    default_factory=observer_lib.Observer
  )
  guide: profile_guided.ProfileGuide | None = None

  def run(self, state: train_state.TrainState) -> train_state.TrainState:
    """Trains, and saves the last state; returns it.

    Args:
      state: Is donated. The job's training input is at the batch after it.
    """
    job, step = self.session.job, int(state.step)
    # The process before may have ended between a checkpoint and the evaluation.
    if step and self.log.at(step):
      self.evaluator.skip(step)
    elif step and is_due(step, job.eval_every_steps):
      self.evaluate(step, state)
    if step >= job.num_train_steps:
      self._save(step, state, job.train_input.get_state())
    elif self.stop.requested is None and self.early_end() is None:
      state = self._train(state)
    return state

  def _train(self, state: train_state.TrainState) -> train_state.TrainState:
    job = self.session.job
    step = first_step = int(state.step)
    position: Mapping[str, Any] = job.train_input.get_state()
    with (
      prefetch.Prefetcher(
        job.train_input,
        place=self.session.place,
        limit=job.num_train_steps - first_step,
      ) as batches,
      garbage.Postponed() as postponed,
      contextlib.ExitStack() as stack,
    ):
      with self.stop.at_once():
        train_step = self._compile()
      if self.stop.settle():
        # Nothing was computed that is not saved.
        return state
      summaries = train_summaries.TrainSummaries(
        self.writer,
        every_steps=job.summary_every_steps,
        last_step=job.num_train_steps,
        observer=self.observer,
      )
      waits = self.observer.waits(
        batches, is_ready=batches.is_ready, is_busy=summaries.is_busy
      )
      stack.enter_context(self.observer.training(first_step))
      if self.guide is not None:
        stack.enter_context(contextlib.closing(self.guide))
      for step, batch in enumerate(waits, start=first_step + 1):
        with self.observer.before_step(step, paused=summaries.paused):
          state, metrics = train_step(state, batch.arrays)
        self.observer.dispatched(step, before=position, after=batch.position)
        position = batch.position
        summaries.add(step, metrics)
        if self.guide is not None and self.guide.after_step(metrics):
          with summaries.paused():
            train_step = self._compile()
        postponed.after_step()
        if is_due(step, job.checkpoint_every_steps):
          summaries.drain()
          self._save(step, state, position)
          postponed.collect()
        if is_due(step, job.eval_every_steps) and step < job.num_train_steps:
          with summaries.paused():
            self.evaluate(step, state)
            postponed.collect()
          if self.early_end() is not None:
            break
        if self.stop.poll():
          break
      summaries.drain()
    self._save(step, state, position)
    return state

  def _compile(self) -> jax.stages.Compiled:
    """Compiles the step, while the first batches are read."""
    with self.observer.span(goodput.Cause.COMPILE):
      train_step = compiled_steps.compile_train_step(
        self.session,
        self.traced,
        more_options=None if self.guide is None else self.guide.options,
      )
      expected_kernels.check_compiled(self.session, train_step, self.traced)
      self.observer.compiled(
        self.traced,
        train_step,
        length=self.session.job.train_input.length,
        devices=self.session.layout.mesh.devices.flatten().tolist(),
      )
    return train_step

  def evaluate(
    self, step: int, state: train_state.TrainState
  ) -> evaluation_log.Results | None:
    """Measures and writes all splits; `None` if asked to stop meanwhile."""
    with self.observer.span(goodput.Cause.EVALUATION):
      results = self.evaluator.evaluate(state, is_stopped=self.stop.poll)
    for split, values in (results or {}).items():
      self.writer.write(step, split, values)
    if results is not None:
      self.log.add(step, results)
    return results

  def early_end(self) -> str | None:
    """Returns why training ends before its last step; `None` if it does not."""
    job = self.session.job
    if job.early_stopping is None or job.eval_every_steps is None:
      return None
    return self.log.reason_to_stop(
      job.early_stopping, every_steps=job.eval_every_steps
    )

  def _save(
    self, step: int, state: train_state.TrainState, position: Mapping[str, Any]
  ) -> None:
    with self.observer.span(goodput.Cause.CHECKPOINT):
      # A run that goes on from it does not write these lines again.
      self.writer.flush()
      data = data_positions.to_stored(position, self.evaluator.positions(step))
      self.checkpoints.save(
        step, state, specs=self.session.state_specs, data=data
      )


def is_due(step: int, every_steps: int | None) -> bool:
  """Whether something happens after this step; `None` is never."""
  return every_steps is not None and step % every_steps == 0
