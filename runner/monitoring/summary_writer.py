"""The interface of everything that records the figures of a run."""

import abc
from collections.abc import Mapping

# Figures to compare a run with are written at step 0, under the split
# `baseline/<name>`, so that a report needs no other source than the metrics.
BASELINE_PREFIX = "baseline/"


class SummaryWriter(abc.ABC):
  """Records figures by step and split, one call after another."""

  @abc.abstractmethod
  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records figures.

    Args:
      step: The training step after which they hold.
      split: `train`, the name of an evaluated split, or `baseline/<name>`.
      values: Figures by name.
    """

  def flush(self) -> None:  # noqa: B027
    """Makes what was written outlive the process, however it ends.

    Called before a checkpoint is committed: what a resumed run does not write
    again must not be lost. Writers also flush by themselves now and then.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Flushes, and releases what is held; nothing is written after it."""
