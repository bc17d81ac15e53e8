"""A tiny experiment on SeqIO tasks, for tests that run it in a process.

As a program, it is the server that forks the processes of a test.
"""

from typing import Any

import fiddle as fdl

from paxon.inputs import optional_library
from paxon.inputs.seqio_tasks import testing as seqio_testing
from paxon.runner import main
from paxon.runner import task as task_lib
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.training import testing
from paxon.tasks.lm import seqio_datasets


class TinySeqIo(seqio_datasets.SeqIo, testing.TinyLm):
  """A mixture of two tasks; a task and the mixture are evaluated."""

  length = 16
  mixture = "made_both"
  eval_tasks = ("made_text", "made_both")
  eval_split = "validation"
  max_new_tokens = 0
  prompts = None
  folder: str = ""

  def register(self) -> fdl.Config[Any]:
    """Returns a callable that registers the tasks for `folder`."""
    return fdl.Config(
      seqio_testing.Tasks,
      folder=self.folder,
      vocabulary_file=f"{self.folder}/pieces.model",
      prefix="made",
    )

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the tiny model with the tokenizer of the mixture."""
    task = super().task()
    for name, value in self.get_data_fields().items():
      setattr(task, name, value)
    return task

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns the mixture, delayed, and the evaluation task."""
    splits = super().datasets()
    fdl.update_callable(splits["train"], testing.SlowInput)
    splits["train"].delay = self.delay
    return splits


def command_line(arguments: list[str]) -> int:
  """Runs `main` with the experiments of tests."""
  main.run(("paxon.tasks",), ["main", *arguments])


if __name__ == "__main__":
  # Half of a short run is this import, which the forks share.
  optional_library.seqio()
  forks_lib.serve({"command_line": command_line})
