"""Status of a training process: its step, what it waits for, and its metrics.

While entered, each process of a run prints a line a minute, and rewrites
`--liveness_file` every few seconds unless it hangs. `metrics_server` serves the
same status. A thread does all of this; the loop only writes metrics to it, as
to the other writers.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import os
import sys
import threading
import time
from typing import Any

import jax

from paxon.runner import files, units, user_error
from paxon.runner.monitoring import goodput, metrics_file, step_metrics

LINE_SECONDS = 60.0
_LIVENESS_SECONDS = 5.0
# In the environment, not empty: no lines, as tests compare outputs.
_NO_LINES = "PAXON_NO_HEARTBEAT"
_ACTIVITIES = {
  goodput.Cause.PRODUCTIVE: "training",
  goodput.Cause.STARTUP: "starting",
  goodput.Cause.COMPILE: "compiling",
  goodput.Cause.RESTORE: "restoring the state",
  goodput.Cause.DATA: "waiting for data",
  goodput.Cause.CHECKPOINT: "saving a checkpoint",
  goodput.Cause.EVALUATION: "evaluating",
  goodput.Cause.SAMPLING: "generating samples",
  goodput.Cause.OTHER: "between two steps",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
  """The status at one moment.

  Attributes:
    step: The last finished step.
    num_train_steps: The last step of the training.
    step_age: Seconds since it finished; None before the first of this process.
    activity: Work of the main thread, in words.
    activity_seconds: For how long.
    is_hanging: Whether no step has finished within the watchdog's limit.
    checkpoint_age: Seconds since the state of the newest checkpoint was taken,
      or since the start of the process.
    seconds: Time by the cause of `goodput`, over all attempts of the run.
    values: The newest metrics by split.
  """

  step: int
  num_train_steps: int
  step_age: float | None
  activity: str
  activity_seconds: float
  is_hanging: bool
  checkpoint_age: float
  seconds: Mapping[goodput.Cause, float]
  values: Mapping[str, Mapping[str, float]]

  def line(self) -> str:
    """Returns one line: the step, what it waits for, and the memory."""
    step = f"step {self.step}/{self.num_train_steps}"
    if self.step_age is not None:
      step += f", {self.step_age:.1f} s ago"
    hangs = ", hanging" if self.is_hanging else ""
    memory = step_metrics.host_memory() | dict(self.values.get("train", {}))
    shown = [
      f"{units.size(memory[name])} {of}"
      for name, of in (
        ("host_memory_bytes", "on the host"),
        ("device_memory_bytes", "on a device"),
      )
      if name in memory
    ]
    return "; ".join(
      [
        step,
        f"{self.activity} for {self.activity_seconds:.1f} s{hangs}",
        *shown,
      ]
    )


class RunStatus(metrics_file.SummaryWriter):
  """The status of this process; a context, and a writer of metrics.

  Attributes:
    is_hanging: Returns whether a step hangs; replaced when training begins.
  """

  def __init__(
    self,
    ledger: goodput.Ledger,
    *,
    num_train_steps: int,
    liveness_file: str | None = None,
    line_seconds: float = LINE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    """Prepares.

    Args:
      ledger: Accounts for the time of the main thread.
      num_train_steps: The last step of the training.
      liveness_file: Path of a file to rewrite while the process makes progress;
        None writes none.
      line_seconds: Time between two lines.
      clock: Returns seconds.
    """
    self._ledger = ledger
    self._num_train_steps = num_train_steps
    self._file = liveness_file
    self._line_seconds = line_seconds
    self._clock = clock
    self._values: dict[str, Mapping[str, float]] = {}
    self._checkpoint_time = clock()
    self._end = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="run status", daemon=True
    )
    self.is_hanging: Callable[[], bool] = lambda: False

  def __enter__(self) -> "RunStatus":
    """Begins to report.

    Raises:
      UserError: The liveness file cannot be written.
    """
    try:
      self._touch()
    except OSError as error:
      raise user_error.UserError(
        f"--liveness_file={self._file} cannot be written ({error.strerror})."
      ) from error
    self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._end.set()
    self._thread.join()

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Keeps the newest metrics of a split."""
    del step
    if not split.startswith(metrics_file.BASELINE_PREFIX):
      self._values[split] = dict(values)

  def flush(self) -> None:
    """Notes that a checkpoint is saved."""
    self._checkpoint_time = self._clock()

  def close(self) -> None:
    """Does nothing; the status ends with its context."""

  def snapshot(self) -> Snapshot:
    """Returns the status now; called by any thread."""
    now = self._ledger.now()
    return Snapshot(
      step=now.step,
      num_train_steps=self._num_train_steps,
      step_age=now.step_age,
      activity=_ACTIVITIES.get(now.cause, now.cause.value),
      activity_seconds=now.cause_seconds,
      is_hanging=self.is_hanging(),
      checkpoint_age=self._clock() - self._checkpoint_time,
      seconds=self._ledger.account().seconds,
      values=dict(self._values),
    )

  def _run(self) -> None:
    pause = min(_LIVENESS_SECONDS, self._line_seconds)
    next_line = self._clock() + self._line_seconds
    while not self._end.wait(pause):
      try:
        if not self.is_hanging():
          self._touch()
        if self._clock() >= next_line:
          next_line += self._line_seconds
          self._print()
      except OSError as error:
        # Keeps reporting: a probe of the file finds that it is old.
        print(f"run status: {error}", file=sys.stderr, flush=True)

  def _touch(self) -> None:
    if self._file is None:
      return
    now = self._ledger.now()
    content = {
      "time": time.time(),
      "step": now.step,
      "activity": _ACTIVITIES.get(now.cause, now.cause.value),
    }
    files.write_text(self._file, f"{json.dumps(content)}\n")

  def _print(self) -> None:
    stream = _find_stream()
    if stream is not None and not os.environ.get(_NO_LINES):
      name = f"{jax.process_index()} of {jax.process_count()}"
      host = os.uname().nodename
      line = self.snapshot().line()
      print(f"process {name} ({host}): {line}", file=stream, flush=True)


def _find_stream() -> Any:
  """Returns where lines are printed; None on a terminal, which has a bar."""
  # The standard output of the other processes is discarded.
  stream = sys.stdout if jax.process_index() == 0 else sys.stderr
  return None if stream is None or stream.isatty() else stream
