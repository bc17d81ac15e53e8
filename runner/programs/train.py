"""Trains a job to its last step, from the beginning or from a checkpoint."""

from collections.abc import Mapping
import contextlib
import errno
import os

from etils import epath
import fiddle as fdl

from paxon.learners import train_state
from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.checkpoints import checkpointer
from paxon.runner.programs import (
  evaluation,
  figures,
  restoring,
  samples,
  stop_signals,
  stored_config,
  train_loop,
)
from paxon.runner.programs import session as session_lib
from paxon.runner.summaries import report, run_summaries, summary_writer

_Results = Mapping[str, Mapping[str, float]]


def run(job: job_lib.Job, config: fdl.Buildable, run_dir: epath.Path) -> int:
  """Trains, evaluates, samples and reports; goes on where a run has stopped.

  Args:
    job: The resolved configuration, built.
    config: The same, not built, which is stored with the run.
    run_dir: The run's folder, which exists.

  Returns:
    The exit status: 0, also where a signal asked to stop.

  Raises:
    UserError: The folder's run or the machine does not fit the job.
  """
  try:
    return _run(job, config, run_dir)
  except checkpointer.SaveError as error:
    raise user_error.UserError(str(error)) from error
  except OSError as error:
    # The one failure of a machine that is met by its user often enough.
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
      raise
    raise user_error.UserError(
      f"{os.fspath(run_dir)} cannot be written to: {error.strerror}."
    ) from error


def _run(job: job_lib.Job, config: fdl.Buildable, run_dir: epath.Path) -> int:
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(stop_signals.StopSignals())
    checkpoints = stack.enter_context(
      checkpointer.Checkpointer(
        run_dir / run_dirs.CHECKPOINTS, max_checkpoints=job.max_checkpoints
      )
    )
    # A start that failed before its first checkpoint binds nobody.
    if checkpoints.latest_step() is not None:
      for change in stored_config.check(config, run_dir):
        print(f"changed: {change}")
    session = session_lib.open_session(job)
    state = restoring.restore_or_start(session, checkpoints)
    stored_config.store(config, run_dir)
    writer = stack.enter_context(
      contextlib.closing(
        run_summaries.make_train(
          run_dir,
          num_train_steps=job.num_train_steps,
          resume_step=int(state.step),
        )
      )
    )
    loop = train_loop.TrainLoop(
      session=session,
      checkpoints=checkpoints,
      writer=writer,
      evaluator=evaluation.Evaluator(session),
      stop=stop,
    )
    state = loop.run(state)
    checkpoints.wait()
    lines = _finish(loop, state, run_dir)
  # After the writers are closed: below the last state of the progress bar.
  if stop.requested is not None:
    lines = [
      f"stopped by {stop.requested} at step {int(state.step)} of"
      f" {job.num_train_steps}; the same command with"
      f" --job_log_dir={os.fspath(run_dir)} goes on from there"
    ]
  else:
    report.write(run_dir)
    lines.append(f"report: {os.fspath(run_dir / run_dirs.REPORT)}")
  print("\n".join(lines), flush=True)
  return 0


def _finish(
  loop: train_loop.TrainLoop, state: train_state.TrainState, run_dir: epath.Path
) -> list[str]:
  """Evaluates, samples and compares a trained model; returns what to print."""
  job, step = loop.session.job, int(state.step)
  lines = []
  if step < job.num_train_steps and loop.stop.requested is None:
    lines.append(f"the training input ended after {step} steps")
  results = loop.evaluate(step, state)
  if results is None or loop.stop.requested is not None:
    return lines
  lines += figures.lines(step, results)
  if job.generation is not None:
    drawn = samples.draw(loop.session, state)
    text = samples.to_text(drawn)
    files.write_text(run_dir / run_dirs.SAMPLES, text)
    lines = [text, *lines]
  if job.baselines is not None:
    lines += _compare(loop.writer, results, job.baselines())
  return lines


def _compare(
  writer: summary_writer.SummaryWriter,
  results: _Results,
  baselines: Mapping[str, float],
) -> list[str]:
  """Writes the baselines and returns the comparison."""
  for name, value in baselines.items():
    writer.write(
      0, summary_writer.BASELINE_PREFIX + name, {"bits_per_byte": value}
    )
  return list(figures.comparison(results, baselines))
