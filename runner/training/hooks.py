"""Hooks of the training loop, for all work besides its steps.

A hook acts between two steps at an interval, or around every step. Those of a
loop are called in order; all processes call the same ones at the same steps.

  class Minutes(hooks.Hook):
    every_steps = 100

    def start(self, progress):
      self._begin = time.monotonic()

    def run(self, progress):
      minutes = (time.monotonic() - self._begin) / 60
      progress.writer.write(progress.step, "train", {"minutes": minutes})

  train.run(job, config, run_dir, more_hooks=[Minutes()])
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax

from paxon.learners import train_state, train_step
from paxon.runner.monitoring import goodput, metrics_file

# A position of the training data, for messages and checkpoints.
Position = Mapping[str, Any]
Batch = Mapping[str, jax.Array]
Outputs = tuple[train_state.TrainState, train_step.Metrics]
Step = Callable[[train_state.TrainState, Batch], Outputs]


@dataclasses.dataclass(frozen=True)
class Progress:
  """Where a training is, between two steps.

  Attributes:
    step: The last step.
    state: The state after it; the next step donates it, so it must not be kept.
    position: The position of the training data after the batch of the step.
    is_last: Whether training ends here: by its number of steps, or by early
      stopping.
    writer: Where metrics are written.
  """

  step: int
  state: train_state.TrainState
  position: Position
  is_last: bool
  writer: metrics_file.SummaryWriter


class Hook:
  """Base class; by default nothing is done.

  Attributes:
    every_steps: Interval of `run`; None is never.
    runs_last: Whether `run` is also called after the last step.
    cause: Category of the time of `run`, other than training.
  """

  every_steps: int | None = None
  runs_last: bool = False
  cause: goodput.Cause = goodput.Cause.OTHER

  def is_due(self, progress: Progress) -> bool:
    """Whether `run` is called after a step."""
    if progress.is_last and not self.runs_last:
      return False
    return is_due(progress.step, self.every_steps)

  def start(self, progress: Progress) -> None:
    """Acts before the first step of this process."""

  def run(self, progress: Progress) -> None:
    """Acts between two steps, when all metrics so far are written."""

  def prepare(self, state: train_state.TrainState, batch: Batch) -> Batch:
    """Returns the batch of the next step."""
    return batch

  def wrap(self, step: int, train_step: Step) -> Step:
    """Returns the function that computes a step."""
    return train_step

  def on_dispatch(
    self, step: int, *, before: Position, after: Position
  ) -> None:
    """Gets the data position before and after the batch of a step."""

  def needs_compilation(self, outputs: train_step.Metrics) -> bool:
    """Whether the step is compiled again, asked after each dispatched step."""
    return False

  def find_options(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
    """Returns compiler options of the step."""
    return {}

  def on_finish(self, step: int, values: Mapping[str, float]) -> None:
    """Checks the metrics of a finished step; steps come in order."""

  def check_state(self, progress: Progress) -> None:
    """Checks a state that is about to be saved."""

  def close(self) -> None:
    """Frees what the hook holds; called once, when the loop ends."""


def is_due(step: int, every_steps: int | None) -> bool:
  """Whether an action with this interval is due; `None` is never."""
  return every_steps is not None and step % every_steps == 0
