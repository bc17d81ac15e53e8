"""A small training run in a separate process, and readers of its folder.

The process is the real command line on one CPU device, with a model that takes
milliseconds per step; batches are delayed, so that a run takes some seconds.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any, Protocol, runtime_checkable

from etils import epath

from paxon.runner import run_dir
from paxon.runner.checkpoints import checkpointer, stored_checkpoint

EXPERIMENT = "paxon.runner.training.testing.TinyLm"
NUM_STEPS = 40
_KNOBS = {
  "checkpoint_every_steps": 2,
  "eval_every_steps": 15,
  "delay": 0.05,
}
_RESUMING = re.compile(r"resuming from the checkpoint of step (\d+)")
_STEP = re.compile(r"\d+")
# Metrics of the machine, which differ between runs.
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory").search
_LIMIT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
  """A finished process.

  Attributes:
    status: Its exit status; negative for the signal that killed it.
    output: Its stdout and stderr.
  """

  status: int
  output: str

  @property
  def resumed_from(self) -> int | None:
    """The step of the checkpoint that it resumed from; None for none."""
    found = _RESUMING.search(self.output)
    return int(found[1]) if found else None


@runtime_checkable
class Process(Protocol):
  """The part of `subprocess.Popen` that is used here."""

  @property
  def pid(self) -> int:
    """Its number."""

  def poll(self) -> int | None:
    """Returns the exit status, if it has ended."""

  def wait(self, timeout: float | None = None) -> int:
    """Returns the exit status when it has ended."""

  def send_signal(self, sig: int, /) -> None:
    """Sends a signal, if it has not ended."""

  def kill(self) -> None:
    """Sends SIGKILL."""


# Starts `main` with arguments and a log file for stdout and stderr.
Launch = Callable[[Sequence[str], pathlib.Path], Process]


def command_line(arguments: Sequence[str], log: pathlib.Path) -> Process:
  """Starts the real command line; see `Launch`."""
  environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
  with log.open("wb") as file:
    return subprocess.Popen(
      [sys.executable, "-m", "paxon.runner.main", *arguments],
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      env=os.environ | environment,
    )


class TinyRun:
  """The folder of a run."""

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    launch: Launch = command_line,
    num_steps: int = NUM_STEPS,
  ) -> None:
    """Initializes; nothing is written.

    Args:
      folder: The run directory. The log is outside of it, because its disk
        may be full.
      launch: Starts its processes.
      num_steps: Training steps.
    """
    self.folder = folder
    self.launch = launch
    self.num_steps = num_steps
    self._log = folder.parent.parent / f"{folder.parent.name}.log"

  @property
  def checkpoints(self) -> pathlib.Path:
    """The folder of the checkpoints."""
    return self.folder / run_dir.CHECKPOINTS

  def start(self) -> Process:
    """Starts a process that trains, from the newest checkpoint if any."""
    arguments = [
      *(f"--exp={EXPERIMENT}", f"--job_log_dir={self.folder}"),
      f"--fdl.num_train_steps={self.num_steps}",
      *(f"--fdl.{name}={value}" for name, value in _KNOBS.items()),
    ]
    return self.launch(arguments, self._log)

  def finish(self, process: Process) -> Ended:
    """Waits for a process.

    Raises:
      subprocess.TimeoutExpired: It hangs; it is killed.
    """
    try:
      status = process.wait(_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      raise
    return Ended(status=status, output=self._log.read_text(errors="replace"))

  def last_begun_step(self) -> int:
    """Returns the newest step whose checkpoint was started, 0 for none."""
    try:
      names = [path.name for path in self.checkpoints.iterdir()]
    except FileNotFoundError:
      return 0
    return max((int(m[0]) for m in map(_STEP.match, names) if m), default=0)

  def whole_steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints that are undamaged."""
    whole = []
    folder = epath.Path(self.checkpoints)
    with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
      for step in checkpoints.steps():
        try:
          checkpoints.verify(step)
        except checkpointer.DamagedCheckpointError:
          continue
        whole.append(step)
    return whole

  def digest(self) -> str:
    """Returns the sha256 of all arrays of the newest checkpoint, by name."""
    stored = stored_checkpoint.find_checkpoint(epath.Path(self.checkpoints))
    result = hashlib.sha256(f"step {stored.step}".encode())
    for name, array in sorted(
      stored_checkpoint.read_numpy(stored, stored.arrays).items()
    ):
      result.update(f"{name} {array.shape} {array.dtype}".encode())
      result.update(array.tobytes())
    return result.hexdigest()

  def metrics(self) -> Mapping[tuple[int, str], Mapping[str, Any]]:
    """Returns the metrics by step and split, without measured times."""
    lines = (self.folder / run_dir.METRICS).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {
      (record["step"], record["split"]): {
        name: value for name, value in record.items() if not _MEASURED(name)
      }
      for record in records
      if record["split"] in ("train", "validation")
    }
