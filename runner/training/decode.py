"""Generates text with the newest checkpoint of a run."""

import contextlib
import os

from etils import epath

from paxon.runner import job as job_lib
from paxon.runner.checkpoints import checkpointer
from paxon.runner.hosts import agreement
from paxon.runner.training import (
  prompt_texts,
  restoring,
  samples,
  samples_file,
  serving,
)
from paxon.runner.training import session as session_lib


def run(job: job_lib.Job, run_dir: epath.Path, prompt: str | None) -> int:
  """Prints and writes the prompts and what the model adds to them.

  Args:
    job: The resolved configuration, built.
    run_dir: The folder of a run of this job.
    prompt: The text to continue, or a file of them, as `prompt_texts` reads it;
      `None` for the job's prompts.

  Returns:
    The exit status, 0.

  Raises:
    UserError: There is no checkpoint that fits the job, no such file of
      prompts, or the job does not generate text.
  """
  texts = None if prompt is None else prompt_texts.parse(prompt, os.environ)
  with contextlib.closing(job):
    session = session_lib.open_session(job)
    folder = serving.checkpoints(job, run_dir)
    with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
      state = restoring.restore_for_evaluation(session, checkpoints, folder)
    drawn = samples.draw(session, state, prompts=texts)
  print(samples.to_text(drawn), flush=True)
  step = int(state.step)
  if agreement.is_first():
    path = samples_file.write(run_dir, drawn, step=step, job=job)
    print(f"samples: {os.fspath(path)}", flush=True)
  return 0
