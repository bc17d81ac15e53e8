"""The training loop.

The host only dispatches: the step is compiled before the loop, its state is
donated, a thread reads and places batches, metrics are read one step late,
checkpoints are written in the background, and Python's garbage is collected
only while training pauses.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import gc
from typing import Any, TypeVar

import jax

from paxon.learners import train_state
from paxon.learners import train_step as train_step_lib
from paxon.runner.checkpoints import checkpointer, tiers
from paxon.runner.evaluation import evaluation
from paxon.runner.hosts import run_lease
from paxon.runner.monitoring import goodput, metrics_file
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.session import (
  compiled_steps,
  kernel_checks,
  prefetch,
  restore,
  run_metrics,
  stop_signals,
)
from paxon.runner.session import session as session_lib
from paxon.runner.training import hooks as hooks_lib

_H = TypeVar("_H", bound=hooks_lib.Hook)

# Runs without checkpoints and evaluations also make a few reference cycles.
_MAX_STEPS_WITHOUT_COLLECTION = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainLoop:
  """Trains from any state to the job's last step.

  Attributes:
    session: The job on its devices.
    traced: Its training step, traced.
    checkpoints: Where states are saved.
    more_savers: Other places, each with its interval in steps; used after steps
      without a checkpoint.
    writer: Where metrics are written.
    evaluator: Evaluates the state at intervals.
    log: The run's evaluations, including those of earlier processes.
    stop: Requests of the user to stop.
    observer: Callbacks for monitoring; by default none.
    lease: The lease of the run directory, in the process that writes it.
    hooks: Other work, in this order.
  """

  session: session_lib.Session
  traced: jax.stages.Traced
  checkpoints: checkpointer.Checkpointer
  writer: metrics_file.SummaryWriter
  evaluator: evaluation.Evaluator
  log: evaluation.EvaluationLog
  stop: stop_signals.StopSignals
  observer: observer_lib.Observer = dataclasses.field(
    default_factory=observer_lib.Observer
  )
  lease: run_lease.Lease | None = None
  hooks: Sequence[hooks_lib.Hook] = ()
  more_savers: Sequence[tuple[tiers.Saver, int]] = ()

  def run(self, state: train_state.TrainState) -> train_state.TrainState:
    """Trains from a state, which is donated; saves and returns the last one.

    The job's training input is at the batch after the state.
    """
    job, step = self.session.job, int(state.step)
    # The last process may have ended between a checkpoint and the evaluation of
    # its step. That evaluation is made now; a recorded one is skipped.
    if step and self.log.at(step):
      self.evaluator.skip(step)
    elif step and hooks_lib.is_due(step, job.eval_every_steps):
      self.evaluate(step, state)
    position = job.train_input.get_state()
    is_last = step >= job.num_train_steps
    for hook in self.hooks:
      with self.observer.span(hook.cause):
        hook.start(self._make_progress(step, state, position))
    if is_last:
      self._save(step, state, position)
    elif self.stop.requested is None and self.reason_to_stop() is None:
      state = self._train(state)
    return state

  def _train(self, state: train_state.TrainState) -> train_state.TrainState:
    job = self.session.job
    step = first_step = int(state.step)
    # The position of the data after the last trained batch: the thread below
    # reads ahead of it.
    position: Mapping[str, Any] = job.train_input.get_state()
    batch_size_at = job.make_batch_size_schedule()
    with (
      prefetch.Prefetcher(
        job.train_input,
        place=self.session.place,
        limit=job.num_train_steps - first_step,
        size_of=(
          (lambda index: batch_size_at(first_step + 1 + index))
          if job.batch_ramp
          else None
        ),
      ) as batches,
      DeferredGarbageCollection() as garbage,
      contextlib.ExitStack() as stack,
    ):
      # Compiled while the first batches are read. Until the first step a signal
      # ends the process immediately: there is nothing to save.
      batch_size = batch_size_at(first_step + 1)
      with self.stop.at_once():
        train_step = self._compile(batch_size)
      if self.stop.settle():
        return state
      metrics = self._make_metrics()
      timed_batches = self.observer.waits(
        batches, is_ready=batches.is_ready, is_busy=metrics.is_busy
      )
      stack.enter_context(self.observer.training(first_step))
      for hook in self.hooks:
        stack.enter_context(contextlib.closing(hook))

      for step, batch in enumerate(timed_batches, start=first_step + 1):
        if batch_size_at(step) != batch_size:
          batch_size = batch_size_at(step)
          with metrics.pause():
            train_step = self._compile(batch_size)
        with self.observer.before_step(step, paused=metrics.pause):
          state, outputs = self._call(train_step, step, state, batch.arrays)
        for each in (self.observer, *self.hooks):
          each.on_dispatch(step, before=position, after=batch.position)
        position = batch.position
        # Waits for the step before this one, so the device always has work.
        metrics.add(step, outputs)
        if self._needs_compilation(outputs):
          with metrics.pause():
            train_step = self._compile(batch_size)
        garbage.after_step()
        if self._pause(step, state, position, metrics, garbage):
          break
      metrics.drain()
    self._save(step, state, position)
    return state

  def _call(
    self,
    train_step: hooks_lib.Step,
    step: int,
    state: train_state.TrainState,
    batch: hooks_lib.Batch,
  ) -> hooks_lib.Outputs:
    """Dispatches a step; the state is donated."""
    for hook in self.hooks:
      batch = hook.prepare(state, batch)
      train_step = hook.wrap(step, train_step)
    return train_step(state, batch)

  def _needs_compilation(self, outputs: train_step_lib.Metrics) -> bool:
    # Every hook is asked, after every step.
    answers = [hook.needs_compilation(outputs) for hook in self.hooks]
    return any(answers)

  def _pause(
    self,
    step: int,
    state: train_state.TrainState,
    position: hooks_lib.Position,
    metrics: run_metrics.TrainMetrics,
    garbage: "DeferredGarbageCollection",
  ) -> bool:
    """Saves, evaluates and runs hooks that are due; returns whether to stop."""
    job = self.session.job
    # The checkpoint comes first: a run that ends during the evaluation of this
    # step resumes here and evaluates.
    for saver, every_steps in (
      (self.checkpoints, job.checkpoint_every_steps),
      *self.more_savers,
    ):
      if hooks_lib.is_due(step, every_steps):
        metrics.drain()
        self._save(step, state, position, saver)
        garbage.collect()
        break
    is_last = step >= job.num_train_steps
    ends_early = False
    if hooks_lib.is_due(step, job.eval_every_steps) and not is_last:
      with metrics.pause():
        self.evaluate(step, state)
        garbage.collect()
      ends_early = self.reason_to_stop() is not None
    progress = self._make_progress(step, state, position, is_last=ends_early)
    for hook in self.hooks:
      if hook.is_due(progress):
        with metrics.pause(), self.observer.span(hook.cause):
          hook.run(progress)
        garbage.collect()
    # Last, so that a requested stop never skips a due evaluation.
    return ends_early or self.stop.poll()

  def _make_progress(
    self,
    step: int,
    state: train_state.TrainState,
    position: hooks_lib.Position,
    *,
    is_last: bool = False,
  ) -> hooks_lib.Progress:
    return hooks_lib.Progress(
      step=step,
      state=state,
      position=position,
      is_last=is_last or step >= self.session.job.num_train_steps,
      writer=self.writer,
    )

  def _make_metrics(self) -> run_metrics.TrainMetrics:
    job = self.session.job

    def check(step: int, values: Mapping[str, float]) -> None:
      for hook in self.hooks:
        hook.on_finish(step, values)

    return run_metrics.TrainMetrics(
      self.writer,
      every_steps=job.summary_every_steps,
      last_step=job.num_train_steps,
      unit=job.train_input.unit,
      observer=self.observer,
      check=check,
    )

  def _compile(self, batch_size: int) -> jax.stages.Compiled:
    session, traced = self.session, self.traced
    with self.observer.compiling():
      if batch_size != session.batch_size:
        session = session.with_batch_size(batch_size)
        traced = compiled_steps.trace_train_step(session)
      train_step = compiled_steps.compile_train_step(
        session,
        traced,
        more_options=lambda lowered: {
          name: value
          for hook in self.hooks
          for name, value in hook.find_options(lowered).items()
        },
      )
      mesh = self.session.layout.mesh
      kernel_checks.check_compiled(session.job, train_step, traced, mesh=mesh)
      self.observer.on_compile(
        traced,
        train_step,
        length=self.session.job.train_input.length,
        devices=mesh.devices.flatten().tolist(),
      )
    return train_step

  def evaluate(
    self, step: int, state: train_state.TrainState
  ) -> run_metrics.Results | None:
    """Evaluates all splits and writes them; `None` if stopped meanwhile."""
    with self.observer.span(goodput.Cause.EVALUATION):
      results = self.evaluator.evaluate(state, is_stopped=self.stop.poll)
    if results is not None:
      self.evaluator.write(self.writer, step, results)
      self.log.add(step, results)
    return results

  def find_hook(self, kind: type[_H]) -> _H:
    """Returns the hook of a class, which must exist."""
    (found,) = [hook for hook in self.hooks if isinstance(hook, kind)]
    return found

  def reason_to_stop(self) -> str | None:
    """Returns why early stopping ends the training, `None` if it does not."""
    job = self.session.job
    if job.early_stopping is None or job.eval_every_steps is None:
      return None
    return self.log.reason_to_stop(
      job.early_stopping, every_steps=job.eval_every_steps
    )

  def _save(
    self,
    step: int,
    state: train_state.TrainState,
    position: Mapping[str, Any],
    saver: tiers.Saver | None = None,
  ) -> None:
    with self.observer.span(goodput.Cause.CHECKPOINT):
      for hook in self.hooks:
        hook.check_state(self._make_progress(step, state, position))
      if self.lease is not None:
        self.lease.check()
      # A run that resumes from this checkpoint writes no line before it again.
      self.writer.flush()
      data = restore.to_stored_positions(
        position, self.evaluator.positions(step)
      )
      (saver or self.checkpoints).save(
        step, state, specs=self.session.state_specs, data=data
      )


class DeferredGarbageCollection:
  """While entered, Python's garbage is collected only by `collect`.

  Reference counts free nearly everything; the collector only frees reference
  cycles. It runs whenever enough objects have been made, and a full collection
  visits every object of the process: tens to hundreds of milliseconds with the
  objects of jax, in the middle of a step, and at a different step on each host,
  while all others wait. So the objects that exist before the first step, which
  live as long as the run, are frozen, and newer cycles are collected while
  training pauses anyway, at the same steps on every host.
  """

  def __init__(self) -> None:
    self._was_enabled = False
    self._was_frozen = False
    self._steps = 0

  def __enter__(self) -> "DeferredGarbageCollection":
    self._was_enabled = gc.isenabled()
    self._was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    return self

  def __exit__(self, *exception: object) -> None:
    # Objects frozen by others cannot be distinguished from those frozen here.
    if not self._was_frozen:
      gc.unfreeze()
    if self._was_enabled:
      gc.enable()

  def collect(self) -> None:
    """Frees the cycles made since the start, which are few objects."""
    gc.collect()
    self._steps = 0

  def after_step(self) -> None:
    """Counts a step; collects after many steps without a collection."""
    self._steps += 1
    if self._steps >= _MAX_STEPS_WITHOUT_COLLECTION:
      self.collect()
