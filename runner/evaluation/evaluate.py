"""Evaluation of the newest checkpoint of a run, or of each new one.

With `--continuous`, the newest unevaluated checkpoint comes first; older ones
are evaluated while there is no newer one. The program ends when the run is
finished and every checkpoint has been evaluated. Restarted, it skips the
checkpoints whose metrics are written. Rolling evaluations continue where the
last one of this program ended: their positions are in a file beside the
metrics, because the run's checkpoints have those of the run's own evaluations.
"""

from collections.abc import Callable, Collection, Mapping
import contextlib
import dataclasses
import functools
import json
import os
import time
from typing import Any

from etils import epath

from paxon.inputs import base_input
from paxon.learners import train_state
from paxon.quantization import recipes
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import checkpointer, named_tree
from paxon.runner.evaluation import evaluation, weight_conversion
from paxon.runner.generation import generation_limits
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import metrics_file, report, writers
from paxon.runner.session import (
  prefetch,
  restore,
  run_files,
  run_metrics,
  serving,
  stop_signals,
)
from paxon.runner.session import session as session_lib

_POSITION_KEYS = {"step", "before", "after"}
# Signals are polled this often while there is nothing to evaluate.
_MAX_SLEEP_SECONDS = 0.2


def run(
  job: job_lib.Job,
  run_dir: epath.Path,
  *,
  continuous: bool = False,
  step: int | None = None,
  trained: weight_conversion.Trained | None = None,
) -> int:
  """Evaluates every split, and writes and prints the metrics.

  They are written to separate files, so the run may be training meanwhile.

  With `continuous`, evaluates every new checkpoint until the run is finished;
  otherwise that of `step`, by default the newest. A conversion merges the
  adapters of `trained`, and needs no split.

  Raises:
    UserError: There is no checkpoint that fits the job, or nothing to
      evaluate on; or `continuous` is combined with quantized weights.
  """
  converts = serving.get_mode(job) is recipes.Mode.CONVERT
  if not job.eval_inputs and not converts:
    raise user_error.UserError(
      f"{job.experiment} has no split to evaluate; add one to its datasets."
    )
  if continuous and job.weights is not None:
    raise user_error.UserError(
      f"--continuous evaluates each new checkpoint, but"
      f" quantization={job.weights!r} converts or reads only one; leave one of"
      " them out."
    )
  with contextlib.closing(job):
    run_files.check_tokenizer(job, run_dir)
    generation_limits.check_splits(job)
    if converts:
      return weight_conversion.run(job, run_dir, step=step, trained=trained)
    session = session_lib.open_session(job, splits=job.eval_inputs)
    stopped_by = None
    prefetch.check_data(job.eval_inputs)
    if continuous:
      stopped_by = _follow(session, run_dir)
    else:
      _evaluate_once(session, run_dir, step)
  # The report of the run was written without these metrics.
  if agreement.is_first() and (run_dir / run_dirs.REPORT).exists():
    report.write(run_dir)
  return stop_signals.find_exit_status(stopped_by)


def _follow(session: session_lib.Session, run_dir: epath.Path) -> str | None:
  """Returns the name of the signal that stopped it, None if it finished."""
  agree = None
  if not agreement.is_alone():
    agree = agreement.DelayedMaximum(session.layout)
  with stop_signals.StopSignals(when="after this batch", agree=agree) as stop:
    is_finished = Follower(session=session, run_dir=run_dir, stop=stop).run()
  return None if is_finished else stop.requested


def _evaluate_once(
  session: session_lib.Session, run_dir: epath.Path, step: int | None
) -> None:
  folder = serving.checkpoints(session.job, run_dir)
  if serving.get_mode(session.job) is recipes.Mode.SERVE:
    # Beside the quantized weights, so that the metrics of the trained
    # parameters stay.
    run_dir = folder.parent
  session, state = restore.read_for_evaluation(session, folder, step=step)
  evaluator = evaluation.Evaluator(session)
  results = evaluator.evaluate(state)
  assert results is not None
  step = int(state.step)
  if agreement.is_first():
    with contextlib.closing(writers.make_eval_writer(run_dir)) as writer:
      evaluator.write(writer, step, results)
  for line in run_metrics.format_results(step, results):
    print(line)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follower:
  """Evaluates each new checkpoint of a run.

  Attributes:
    session: The job on its devices.
    run_dir: The run directory; only its `eval/` is written.
    stop: Requests of the user to stop.
    pause_seconds: Interval of polling for a new checkpoint.
    sleep: Replaced in tests.
  """

  session: session_lib.Session
  run_dir: epath.Path
  stop: stop_signals.StopSignals
  pause_seconds: float = 5.0
  sleep: Callable[[float], None] = time.sleep

  def run(self) -> bool:
    """Follows the run to its end; returns false if a signal came before."""
    evaluator = evaluation.Evaluator(self.session)
    done = set(agreement.from_first(lambda: sorted(self._find_evaluated())))
    skipped: dict[int, int | None] = {}
    is_waiting = False
    for line in restore_positions(
      self._positions, self.session.job.eval_inputs, done=done
    ):
      _print(f"warning: {line}")
    with contextlib.closing(self._writer()) as writer:
      while not self.stop.settle():
        # Read before the checkpoints are listed, so that the last is included.
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
          _print(f"the run is finished; checkpoints evaluated: {len(done)}")
          return True
        else:
          if not steps and not is_waiting:
            is_waiting = True
            _print(f"waiting for a checkpoint in {os.fspath(self._folder)}")
          self._pause()
    _print(f"stopped by {self.stop.requested}; the same command resumes")
    return False

  @property
  def _folder(self) -> epath.Path:
    return self.run_dir / run_dirs.CHECKPOINTS

  @property
  def _positions(self) -> epath.Path:
    return self.run_dir / run_dirs.EVAL / run_dirs.POSITIONS

  def _writer(self) -> metrics_file.CompositeWriter:
    if agreement.is_first():
      return writers.make_eval_writer(self.run_dir)
    return metrics_file.CompositeWriter(())

  def _newest(
    self, steps: list[int], done: set[int], skipped: dict[int, int | None]
  ) -> tuple[int, int | None] | None:
    """Returns the newest step to evaluate and its time, `None` if none is."""
    left = [
      step
      for step in steps
      if step not in done
      # The run may overwrite a damaged one.
      and (step not in skipped or skipped[step] != self._time(step))
    ]
    return (max(left), self._time(max(left))) if left else None

  def _find_evaluated(self) -> set[int]:
    """Returns the steps whose metrics an earlier process has written."""
    path = self.run_dir / run_dirs.EVAL / run_dirs.METRICS
    records = metrics_file.read(path) if path.exists() else []
    steps = {record.step for record in records}
    log = evaluation.EvaluationLog(
      records,
      splits=self.session.job.eval_inputs,
      until=max(steps, default=0),
    )
    return {step for step in steps if log.at(step) is not None}

  def _steps(self) -> list[int]:
    # Opened each time, because it lists the directory when it is opened.
    with checkpointer.Checkpointer(self._folder, read_only=True) as checkpoints:
      return checkpoints.steps()

  def _time(self, step: int) -> int | None:
    """Returns the time of a checkpoint in seconds, `None` if it is gone."""
    try:
      return (self._folder / str(step)).stat().mtime
    except FileNotFoundError:
      return None

  def _is_finished(self) -> bool:
    marker = run_files.read_finished(self.run_dir)
    steps = self.session.job.num_train_steps
    return marker is not None and marker.num_train_steps >= steps

  def _restore(self, step: int) -> train_state.TrainState | None:
    """Returns a checkpoint; prints why and returns `None` if it cannot."""
    try:
      with checkpointer.Checkpointer(self._folder, read_only=True) as opened:
        restored = opened.restore(
          step,
          specs=session_lib.strip_for_evaluation(self.session.state_specs),
          shardings=session_lib.strip_for_evaluation(
            self.session.state_shardings
          ),
        )
    except named_tree.CheckpointMismatchError as error:
      raise user_error.UserError(str(error)) from error
    except checkpointer.DamagedCheckpointError as error:
      if step in self._steps():
        _print(f"skipping step {step}: {user_error.one_line(error)}")
      else:
        _print(f"skipping step {step}: the run has deleted its checkpoint")
      return None
    return restored.tree

  def _evaluate(
    self,
    evaluator: evaluation.Evaluator,
    state: train_state.TrainState,
    writer: metrics_file.SummaryWriter,
  ) -> bool:
    """Evaluates, writes and prints; false if stopped meanwhile."""
    results = evaluator.evaluate(state, is_stopped=self.stop.poll)
    if results is None:
      return False
    step = int(state.step)
    if agreement.is_first():
      store_positions(
        self._positions,
        self.session.job.eval_inputs,
        step=step,
        before=evaluator.positions(step),
      )
    evaluator.write(writer, step, results)
    writer.flush()
    for line in run_metrics.format_results(step, results):
      _print(line)
    return True

  def _pause(self) -> None:
    left = self.pause_seconds
    while left > 0 and not self.stop.is_noted:
      self.sleep(min(left, _MAX_SLEEP_SECONDS))
      left -= _MAX_SLEEP_SECONDS


def _print(line: str) -> None:
  print(line, flush=True)


def restore_positions(
  path: epath.Path,
  eval_inputs: Mapping[str, base_input.BaseInput],
  *,
  done: Collection[int],
) -> list[str]:
  """Sets rolling inputs to where the last evaluation ended.

  If its metrics were not written (`done`), it is repeated on the same batches.

  Returns:
    A line for each position that does not fit its input.

  Raises:
    UserError: The file is damaged.
  """
  stored = agreement.from_first(lambda: _read_positions(path))
  if stored is None:
    return []
  positions = stored["after" if stored["step"] in done else "before"]
  return restore.restore_rolling_positions(eval_inputs, positions)


def store_positions(
  path: epath.Path,
  eval_inputs: Mapping[str, base_input.BaseInput],
  *,
  step: int,
  before: Mapping[str, base_input.State],
) -> None:
  """Writes the positions of rolling inputs, before metrics are written."""
  if before:
    after = restore.rolling_positions(eval_inputs)
    text = json.dumps({"step": step, "before": before, "after": after})
    files.write_text(path, text)


def _read_positions(path: epath.Path) -> dict[str, Any] | None:
  def make(value: Any) -> dict[str, Any]:
    kinds = {"step": int, "before": dict, "after": dict}
    for name, kind in kinds.items():
      files.check_type(name, value[name], kind)
    for when in ("before", "after"):
      for split, position in value[when].items():
        files.check_type(f"{when}[{split!r}]", position, dict)
    if value.keys() != _POSITION_KEYS:
      raise KeyError(min(_POSITION_KEYS ^ value.keys()))
    return value

  try:
    return files.read_json(
      path,
      make,
      kind="the positions of rolling evaluations",
      advice="Remove it, and they start at their first batches.",
    )
  except FileNotFoundError:
    return None
