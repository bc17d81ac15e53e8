"""The mark of a run that has reached its end, for those that follow it."""

import dataclasses
import json

from etils import epath

from paxon.runner import files, run_dir
from paxon.runner import job as job_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
  """Where a run has ended.

  Attributes:
    step: Of its last checkpoint; early stopping and the end of the data make it
      less than the steps it was asked for.
    num_train_steps: The steps it was asked for.
  """

  step: int
  num_train_steps: int


def mark(folder: epath.Path, *, step: int, job: job_lib.Job) -> None:
  """Marks a run as finished, after its last checkpoint is complete.

  Args:
    folder: Of the run.
    step: Of that checkpoint.
    job: What was trained.
  """
  made = Mark(step=step, num_train_steps=job.num_train_steps)
  text = json.dumps(dataclasses.asdict(made))
  files.write_text(folder / run_dir.FINISHED, f"{text}\n")


def unmark(folder: epath.Path) -> None:
  """Removes the mark: the run goes on."""
  (folder / run_dir.FINISHED).unlink(missing_ok=True)


def read(folder: epath.Path) -> Mark | None:
  """Returns the mark of a run; `None` while it is not finished."""
  path = folder / run_dir.FINISHED
  try:
    return Mark(**json.loads(path.read_text()))
  # An object store has no file that is there and not yet readable.
  except FileNotFoundError:
    return None
