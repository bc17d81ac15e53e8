"""The interface of writers of metrics, and a composite of several writers."""

import abc
from collections.abc import Mapping, Sequence
import contextlib

# The metrics of baselines are written at step 0 under the split
# `baseline/<name>`, so that a report needs no other source.
BASELINE_PREFIX = "baseline/"


class SummaryWriter(abc.ABC):
  """Writes metrics by step and split."""

  @abc.abstractmethod
  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records metrics after a training step.

    The split is `train`, an evaluated split, or `baseline/<name>`.
    """

  def flush(self) -> None:  # noqa: B027
    """Makes everything written so far durable.

    Called before a checkpoint is committed, because a resumed run does not
    write these metrics again. Writers also flush periodically.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Flushes and releases all resources."""


class CompositeWriter(SummaryWriter):
  """Forwards all calls to several writers, in order."""

  def __init__(self, writers: Sequence[SummaryWriter]):
    self._writers = tuple(writers)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records metrics in every writer."""
    for writer in self._writers:
      writer.write(step, split, values)

  def flush(self) -> None:
    """Flushes every writer."""
    for writer in self._writers:
      writer.flush()

  def close(self) -> None:
    """Closes every writer, even if one of them fails."""
    with contextlib.ExitStack() as stack:
      for writer in reversed(self._writers):
        stack.callback(writer.close)
