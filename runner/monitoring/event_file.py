"""TensorBoard's event files, written without TensorFlow.

Each split has a folder of its own, so that TensorBoard draws the curves of
`train` and `validation` in one chart. A file is a sequence of records, each a
protocol buffer framed by its length and checksums (TFRecord). It is held in
memory and written whole; a resumed run begins another file, whose first record
tells TensorBoard to forget the steps that are trained again.
"""

from collections.abc import Callable, Mapping
import os
import socket
import struct
import time
from typing import Any

from etils import epath
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2, summary_pb2

from paxon.runner import files, flush_pace
from paxon.runner.monitoring import summary_writer

_VERSION = "brain.Event:2"

# Type checkers cannot see the classes that protobuf makes at import.
_events: Any = event_pb2
_summaries: Any = summary_pb2


class EventFiles(summary_writer.SummaryWriter):
  """Writes `<folder>/<split>/events.out.tfevents.*`.

  Args:
    folder: Of all splits.
    resume_step: The step from which training goes on; 0 for a start.
    clock: Gives seconds since the epoch; another one in tests.
  """

  def __init__(
    self,
    folder: epath.PathLike,
    *,
    resume_step: int = 0,
    clock: Callable[[], float] = time.time,
  ):
    self._folder = epath.Path(folder)
    self._resume_step = resume_step
    self._clock = clock
    self._pace = flush_pace.FlushPace()
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())
    # TensorBoard reads files in the order of their names.
    self._name = (
      f"events.out.tfevents.{int(clock() * 1000):014d}.{host}.{os.getpid()}"
    )
    self._records: dict[str, list[bytes]] = {}

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records one scalar for each figure; baselines are left out."""
    if split.startswith(summary_writer.BASELINE_PREFIX):
      return
    if split not in self._records:
      self._records[split] = [self._frame(_events.Event(file_version=_VERSION))]
      if self._resume_step:
        log = _events.SessionLog(status=_events.SessionLog.START)
        # A session begins with the first step that is trained again.
        start = _events.Event(session_log=log, step=self._resume_step + 1)
        self._records[split].append(self._frame(start))
    summary = _summaries.Summary(
      value=[
        _summaries.Summary.Value(tag=name, simple_value=float(value))
        for name, value in values.items()
      ]
    )
    event = _events.Event(step=step, summary=summary)
    self._records[split].append(self._frame(event))
    if self._pace.is_due():
      self.flush()

  def _frame(self, event: Any) -> bytes:
    event.wall_time = self._clock()
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return (
      length
      + struct.pack("<I", record_writer.masked_crc32c(length))
      + data
      + struct.pack("<I", record_writer.masked_crc32c(data))
    )

  def flush(self) -> None:
    """Writes the files of all splits."""
    self._pace.run(self._write_files)

  def _write_files(self) -> None:
    for split, records in self._records.items():
      path = self._folder / split / self._name
      files.write_bytes(path, b"".join(records))

  def close(self) -> None:
    """Writes the files a last time."""
    self.flush()
