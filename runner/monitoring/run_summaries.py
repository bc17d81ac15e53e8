"""The writers of a run's folder."""

from collections.abc import Sequence

from etils import epath

from paxon.runner import run_dir as run_dir_lib
from paxon.runner.monitoring import (
  composite_writer,
  event_file,
  metrics_file,
  progress,
  summary_writer,
)


def make_train(
  run_dir: epath.Path,
  *,
  num_train_steps: int,
  resume_step: int,
  stream: progress.TextStream | None = None,
  more: Sequence[summary_writer.SummaryWriter] = (),
) -> composite_writer.CompositeWriter:
  """Returns the writers of a training run: files, and progress for the user.

  Args:
    run_dir: Its folder.
    num_train_steps: The step at which training ends.
    resume_step: The step from which it goes on, 0 for a start. What an earlier
      run wrote of later steps is dropped.
    stream: Where progress is shown; standard output by default.
    more: Other writers, closed with these.
  """
  return composite_writer.CompositeWriter(
    [
      metrics_file.MetricsFile(
        run_dir / run_dir_lib.METRICS, resume_step=resume_step
      ),
      event_file.EventFiles(
        run_dir / run_dir_lib.EVENTS, resume_step=resume_step
      ),
      progress.make(
        num_train_steps=num_train_steps, first_step=resume_step, stream=stream
      ),
      *more,
    ]
  )


def make_eval(run_dir: epath.Path) -> composite_writer.CompositeWriter:
  """Returns the writers of a job that evaluates checkpoints of a run.

  They have files of their own, because the run may be training meanwhile. Those
  who read the figures of a run join them (`metrics_file.read_run`).

  Args:
    run_dir: The folder of that run. Earlier figures are kept.
  """
  folder = run_dir / run_dir_lib.EVAL
  return composite_writer.CompositeWriter(
    [
      metrics_file.MetricsFile(folder / run_dir_lib.METRICS, resume_step=None),
      event_file.EventFiles(folder / run_dir_lib.EVENTS),
    ]
  )
