"""Evaluates the checkpoints of a run that another process is training.

The newest checkpoint that has not been evaluated comes first, so that figures
are as new as can be; older ones follow while there is no newer one. It ends
when the run is finished and every checkpoint has been evaluated. Figures that
an earlier follower has written are not made again, and rolling evaluations go
on where its last one ended.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import os
import time

from etils import epath

from paxon.learners import train_state
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, compatibility
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import metrics_file, summary_writer, writers
from paxon.runner.training import (
  evaluation,
  evaluation_log,
  figures,
  finished,
  followed_positions,
  stop_signals,
)
from paxon.runner.training import session as session_lib

# How soon a signal is seen while there is nothing to do.
_MAX_SLEEP_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follower:
  """Evaluates each new checkpoint of a run.

  Attributes:
    session: The job on its devices.
    run_dir: The folder of the run, which is only read, but for its `eval/`.
    stop: Says when the user wants to stop.
    pause_seconds: Between two looks for a new checkpoint.
    sleep: Another one in tests.
  """

  session: session_lib.Session
  run_dir: epath.Path
  stop: stop_signals.StopSignals
  pause_seconds: float = 5.0
  sleep: Callable[[float], None] = time.sleep

  def run(self) -> None:
    """Follows the run until it is finished, or a signal asks to stop.

    Raises:
      UserError: A checkpoint does not fit the job.
    """
    evaluator = evaluation.Evaluator(self.session)
    done = set(agreement.from_first(lambda: sorted(self._evaluated())))
    skipped: dict[int, int | None] = {}
    is_waiting = False
    for line in followed_positions.restore(
      self._positions, self.session.job.eval_inputs, done=done
    ):
      _say(f"warning: {line}")
    with contextlib.closing(self._writer()) as writer:
      while not self.stop.settle():
        # Before the checkpoints are listed: then the last one is among them.
        is_finished = agreement.from_first(self._is_finished)
        steps = self._steps()
        newest = agreement.from_first(
          functools.partial(self._newest, steps, done, skipped)
        )
        if newest is not None:
          step, time_before = newest
          state = self._restore(step)
          if state is None:
            skipped[step] = time_before
          elif self._evaluate(evaluator, state, writer):
            done.add(step)
        elif is_finished:
          _say(f"the run is finished, with {len(done)} checkpoints evaluated")
          return
        else:
          if not steps and not is_waiting:
            is_waiting = True
            _say(f"waiting for a checkpoint in {os.fspath(self._folder)}")
          self._pause()
    _say(f"stopped by {self.stop.requested}; the same command goes on")

  @property
  def _folder(self) -> epath.Path:
    return self.run_dir / run_dirs.CHECKPOINTS

  @property
  def _positions(self) -> epath.Path:
    return self.run_dir / run_dirs.EVAL / run_dirs.POSITIONS

  def _writer(self) -> summary_writer.CompositeWriter:
    if agreement.is_first():
      return writers.make_eval_writer(self.run_dir)
    return summary_writer.CompositeWriter(())

  def _newest(
    self, steps: list[int], done: set[int], skipped: dict[int, int | None]
  ) -> tuple[int, int | None] | None:
    """Returns the newest step to evaluate, with its time; None if none is."""
    left = [
      step
      for step in steps
      if step not in done
      # The run may save a damaged one again.
      and (step not in skipped or skipped[step] != self._time(step))
    ]
    return (max(left), self._time(max(left))) if left else None

  def _evaluated(self) -> set[int]:
    """Returns the steps that this command has evaluated before."""
    path = self.run_dir / run_dirs.EVAL / run_dirs.METRICS
    records = metrics_file.read(path) if path.exists() else []
    steps = {record.step for record in records}
    log = evaluation_log.EvaluationLog(
      records,
      splits=self.session.job.eval_inputs,
      until=max(steps, default=0),
    )
    return {step for step in steps if log.at(step) is not None}

  def _steps(self) -> list[int]:
    # Opened anew each time: it lists the folder when it is opened.
    with checkpointer.Checkpointer(self._folder, read_only=True) as checkpoints:
      return checkpoints.steps()

  def _time(self, step: int) -> int | None:
    """Returns the second of a checkpoint; `None` if it is not there."""
    try:
      return (self._folder / str(step)).stat().mtime
    except FileNotFoundError:
      return None

  def _is_finished(self) -> bool:
    mark = finished.read(self.run_dir)
    wanted = self.session.job.num_train_steps
    return mark is not None and mark.num_train_steps >= wanted

  def _restore(self, step: int) -> train_state.TrainState | None:
    """Returns a checkpoint; `None`, with a line, if it cannot be read."""
    try:
      with checkpointer.Checkpointer(self._folder, read_only=True) as opened:
        restored = opened.restore(
          step,
          specs=session_lib.for_evaluation(self.session.state_specs),
          shardings=session_lib.for_evaluation(self.session.state_shardings),
        )
    except compatibility.CheckpointMismatchError as error:
      raise user_error.UserError(str(error)) from error
    except checkpointer.DamagedCheckpointError as error:
      if step in self._steps():
        _say(f"step {step} is skipped: {user_error.one_line(error)}")
      else:
        _say(f"step {step} is skipped: the run has deleted its checkpoint")
      return None
    return restored.tree

  def _evaluate(
    self,
    evaluator: evaluation.Evaluator,
    state: train_state.TrainState,
    writer: summary_writer.SummaryWriter,
  ) -> bool:
    """Measures, writes and prints; false if asked to stop meanwhile."""
    results = evaluator.evaluate(state, is_stopped=self.stop.poll)
    if results is None:
      return False
    step = int(state.step)
    if agreement.is_first():
      followed_positions.store(
        self._positions,
        self.session.job.eval_inputs,
        step=step,
        before=evaluator.positions(step),
      )
    for split, values in results.items():
      writer.write(step, split, values)
    writer.flush()
    for line in figures.lines(step, results):
      _say(line)
    return True

  def _pause(self) -> None:
    left = self.pause_seconds
    while left > 0 and not self.stop.is_noted:
      self.sleep(min(left, _MAX_SLEEP_SECONDS))
      left -= _MAX_SLEEP_SECONDS


def _say(line: str) -> None:
  print(line, flush=True)
