"""Evaluation of the newest checkpoint of a run, or of each new one."""

import contextlib

from etils import epath

from paxon.quantization import recipes
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import report, writers
from paxon.runner.training import (
  evaluation,
  follow,
  restore,
  run_metrics,
  serving,
  stop_signals,
  weight_conversion,
)
from paxon.runner.training import session as session_lib


def run(
  job: job_lib.Job, run_dir: epath.Path, *, continuous: bool = False
) -> int:
  """Evaluates every split, and writes and prints the metrics.

  They are written to separate files, so the run may be training meanwhile.

  With `continuous`, evaluates every new checkpoint until the run is finished.

  Raises:
    UserError: There is no checkpoint that fits the job, or nothing to
      evaluate on; or `continuous` is combined with quantized weights.
  """
  if not job.eval_inputs:
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
    if serving.mode_of(job) is recipes.Mode.CONVERT:
      return weight_conversion.run(job, run_dir)
    session = session_lib.open_session(job)
    if continuous:
      _follow(session, run_dir)
    else:
      _evaluate_newest(session, run_dir)
  # The report of the run was written without these metrics.
  if agreement.is_first() and (run_dir / run_dirs.REPORT).exists():
    report.write(run_dir)
  return 0


def _follow(session: session_lib.Session, run_dir: epath.Path) -> None:
  agree = None
  if not agreement.is_alone():
    agree = agreement.DelayedMaximum(session.layout)
  with stop_signals.StopSignals(when="after this batch", agree=agree) as stop:
    follow.Follower(session=session, run_dir=run_dir, stop=stop).run()


def _evaluate_newest(session: session_lib.Session, run_dir: epath.Path) -> None:
  folder = serving.checkpoints(session.job, run_dir)
  if serving.mode_of(session.job) is recipes.Mode.SERVE:
    # Beside the quantized weights, so that the metrics of the trained
    # parameters stay.
    run_dir = folder.parent
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    state = restore.restore_for_evaluation(session, checkpoints, folder)
  results = evaluation.Evaluator(session).evaluate(state)
  assert results is not None
  step = int(state.step)
  if agreement.is_first():
    with contextlib.closing(writers.make_eval_writer(run_dir)) as writer:
      for split, values in results.items():
        writer.write(step, split, values)
  for line in run_metrics.format_results(step, results):
    print(line)
