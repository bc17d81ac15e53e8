"""Several writers as one."""

from collections.abc import Mapping, Sequence
import contextlib

from paxon.runner.monitoring import summary_writer


class CompositeWriter(summary_writer.SummaryWriter):
  """Passes everything on to several writers, in order."""

  def __init__(self, writers: Sequence[summary_writer.SummaryWriter]):
    self._writers = tuple(writers)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records figures in every writer."""
    for writer in self._writers:
      writer.write(step, split, values)

  def flush(self) -> None:
    """Flushes every writer."""
    for writer in self._writers:
      writer.flush()

  def close(self) -> None:
    """Closes every writer, also if one of them fails."""
    with contextlib.ExitStack() as stack:
      for writer in reversed(self._writers):
        stack.callback(writer.close)
