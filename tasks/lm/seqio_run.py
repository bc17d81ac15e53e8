"""A tiny experiment over SeqIO's tasks, for tests that start it.

As a program this is the process that forks those of a test.
"""

import dataclasses
import time
from typing import Any

import fiddle as fdl

from paxon.inputs import base_input, packed_input
from paxon.inputs.seqio_tasks import testing as seqio_testing
from paxon.runner import main
from paxon.runner import task as task_lib
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.settings import generation as generation_lib
from paxon.runner.training import testing
from paxon.tasks.lm import seqio_datasets


@dataclasses.dataclass(kw_only=True, eq=False)
class SlowInput(packed_input.PackedInput):
  """Waits before each batch, so that a test can kill a run in the middle."""

  delay: float = 0.0

  def get_next(self) -> base_input.Batch:
    """Returns the next batch, later."""
    time.sleep(self.delay)
    return super().get_next()


class TinySeqIo(seqio_datasets.SeqIo, testing.TinyLm):
  """A mixture of two tasks; both tasks are evaluated."""

  length = 16
  mixture = "made_both"
  eval_tasks = ("made_text",)
  eval_split = "validation"
  max_new_tokens = 0
  folder: str = ""

  def register(self) -> fdl.Config[Any]:
    """Returns what adds the tasks of the texts in `folder`."""
    return fdl.Config(
      seqio_testing.Tasks,
      folder=self.folder,
      vocabulary_file=f"{self.folder}/pieces.model",
      prefix="made",
    )

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the tiny model, with the mixture's vocabulary."""
    task = super().task()
    for name, value in self.of_data().items():
      setattr(task, name, value)
    return task

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns the mixture, slowly, and the task to evaluate."""
    splits = super().datasets()
    fdl.update_callable(splits["train"], SlowInput)
    splits["train"].delay = self.delay
    return splits

  def generation(
    self,
  ) -> fdl.Config[generation_lib.GenerationSettings] | None:
    """Returns what to sample, if anything: the tasks' metrics generate too."""
    return super().generation() if self.max_new_tokens else None


def command_line(arguments: list[str]) -> int:
  """Is `main` with the experiments of tests."""
  main.run(("paxon.tasks",), ["main", *arguments])


if __name__ == "__main__":
  forks_lib.serve({"command_line": command_line})
