"""Evaluates the newest checkpoint of a run."""

import contextlib

from etils import epath

from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.programs import evaluation, figures, restoring
from paxon.runner.programs import session as session_lib
from paxon.runner.summaries import run_summaries


def run(job: job_lib.Job, run_dir: epath.Path) -> int:
  """Measures every evaluation split, and writes and prints the figures.

  Args:
    job: The resolved configuration, built.
    run_dir: The folder of a run of this job.

  Returns:
    The exit status, 0.

  Raises:
    UserError: There is no checkpoint that fits the job, or nothing to
      evaluate on.
  """
  if not job.eval_inputs:
    raise user_error.UserError(
      f"{job.experiment} has no split to evaluate on; add one to its datasets."
    )
  session = session_lib.open_session(job)
  folder = run_dir / run_dirs.CHECKPOINTS
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    state = restoring.restore_for_evaluation(session, checkpoints, folder)
  results = evaluation.Evaluator(session).evaluate(state)
  assert results is not None
  step = int(state.step)
  with contextlib.closing(run_summaries.make_eval(run_dir)) as writer:
    for split, values in results.items():
      writer.write(step, split, values)
  for line in figures.lines(step, results):
    print(line)
  return 0
