"""A small training run in a separate process, and readers of its folder.

The process is the real command line on CPU devices, with a model that takes
milliseconds per step; batches are delayed, so that moments differ.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any, Protocol, runtime_checkable

from etils import epath
import numpy as np

from paxon.inputs.store_servers import servers
from paxon.runner import run_dir
from paxon.runner.checkpoints import (
  checkpointer,
  local_tier,
  stored_checkpoint,
)

NUM_STEPS = 16
# Samples would take as long as all steps.
TINY_LM = (
  "--exp=paxon.runner.training.testing.TinyLm",
  "--fdl.checkpoint_every_steps=2",
  "--fdl.eval_every_steps=5",
  "--fdl.delay=0.05",
  "--fdl.num_layers=1",
  "--fdl.max_new_tokens=0",
)
# Of `TINY_LM` with two tiers; of knobs given twice the last one holds.
TINY_TIERS = (
  *TINY_LM,
  "--fdl.checkpoint_every_steps=6",
  "--fdl.local_checkpoint_every_steps=2",
)
_RESUMING = re.compile(r"resuming from the checkpoint of step (\d+)")
_STEP = re.compile(r"\d+")
_PROGRESS = re.compile(r"\bstep \d+/")
# Metrics of the machine, which differ between runs.
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory|straggler").search
LIMIT_SECONDS = 1800.0
_POLL_SECONDS = 0.02


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
    """The step of the checkpoint that it resumed from, or None."""
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


@runtime_checkable
class Launch(Protocol):
  """Starts the command line."""

  def __call__(
    self,
    arguments: Sequence[str],
    log: pathlib.Path,
    *,
    devices: int,
    environ: Mapping[str, str],
  ) -> Process:
    """Starts a process.

    Args:
      arguments: Of the command line.
      log: A file for stdout and stderr.
      devices: Number of CPU devices.
      environ: Added to the environment.
    """
    ...


def command_line(
  arguments: Sequence[str],
  log: pathlib.Path,
  *,
  devices: int,
  environ: Mapping[str, str],
) -> Process:
  """Starts the real command line; see `Launch`."""
  cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
  with log.open("wb") as file:
    return subprocess.Popen(
      [sys.executable, "-m", "paxon.runner.main", *arguments],
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      env={**os.environ, **cpu, **environ},
    )


def has_stepped(output: str) -> bool:
  """Whether the output of a process shows a trained step."""
  return _PROGRESS.search(output) is not None


class TinyRun:
  """The folder of a run.

  Attributes:
    devices: Number of devices of the processes that are started from now on.
    first_step_at: When the last started process had trained a step
      (`time.monotonic`); None before.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    launch: Launch = command_line,
    num_steps: int = NUM_STEPS,
    training: Sequence[str] = TINY_LM,
    store: servers.Store | None = None,
    has_tiers: bool = False,
  ) -> None:
    """Initializes; nothing is written.

    Args:
      folder: The run directory. The log is outside of it, because its disk
        may be full.
      launch: Starts its processes.
      num_steps: Training steps.
      training: Flags of the experiment and its knobs, less the steps.
      store: An object store, which then has the run directory; None for a disk.
      has_tiers: Whether each host has a directory for local checkpoints.
    """
    self.folder = folder
    self.store = store
    self.has_tiers = has_tiers
    self.place = epath.Path(folder)
    if store is not None:
      self.place = store.path(folder.parent.name, folder.name)
    self.launch = launch
    self.num_steps = num_steps
    self.training = training
    self.devices = 1
    self.first_step_at: float | None = None
    self._log = folder.parent.parent / f"{folder.parent.name}.log"

  @property
  def checkpoints(self) -> epath.Path:
    """The folder of the checkpoints."""
    return self.place / run_dir.CHECKPOINTS

  def disk(self, host: int = 0) -> pathlib.Path:
    """Returns the directory for the local checkpoints of a host."""
    return self.folder.parent / f"disk-{host}"

  def flags(self, host: int = 0) -> list[str]:
    """Returns the command line of the training on a host."""
    disk = self.disk(host)
    return [
      *self.training,
      f"--fdl.num_train_steps={self.num_steps}",
      f"--job_log_dir={os.fspath(self.place)}",
      *([f"--local_checkpoint_dir={disk}"] if self.has_tiers else []),
    ]

  def find_checkpoint(self, step: int) -> epath.Path:
    """Returns the folder of a complete checkpoint, the local one if any."""
    local = self.disk().glob(f"*/{step}.*/0")
    return next(map(epath.Path, local), self.checkpoints / str(step))

  def start(self, environ: Mapping[str, str] | None = None) -> Process:
    """Starts a process that trains, from the newest checkpoint if any."""
    self.first_step_at = None
    return self.launch(
      self.flags(),
      self._log,
      devices=self.devices,
      environ={**(self.store.environ if self.store else {}), **(environ or {})},
    )

  def wait(
    self,
    process: Process,
    *,
    seconds: float,
    until: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Waits until it ends, some time has passed, or a condition holds.

    Returns:
      Whether it has ended.
    """
    limit = time.monotonic() + seconds
    while True:
      has_ended = process.poll() is not None
      if self.first_step_at is None and has_stepped(self._output()):
        self.first_step_at = time.monotonic()
      if has_ended or time.monotonic() >= limit or until():
        return has_ended
      time.sleep(_POLL_SECONDS)

  def finish(self, process: Process) -> Ended:
    """Waits for a process.

    Raises:
      subprocess.TimeoutExpired: It hangs; it is killed.
    """
    if not self.wait(process, seconds=LIMIT_SECONDS):
      process.kill()
      process.wait()
      raise subprocess.TimeoutExpired("a training", LIMIT_SECONDS)
    return Ended(status=process.wait(), output=self._output())

  def _output(self) -> str:
    try:
      return self._log.read_text(errors="replace")
    except FileNotFoundError:
      return ""

  def name(self) -> str:
    """Returns a part of the names of its objects, and of no other run's."""
    return f"{self.folder.parent.name}/{self.folder.name}/"

  def last_begun_step(self) -> int:
    """Returns the newest step whose checkpoint was started, 0 for none."""
    names = [path.name for path in self.disk().glob("*/*.*")]
    with contextlib.suppress(FileNotFoundError):
      names += [path.name for path in self.checkpoints.iterdir()]
    return max((int(m[0]) for m in map(_STEP.match, names) if m), default=0)

  def whole_steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints that are undamaged."""
    whole = []
    with checkpointer.Checkpointer(
      self.checkpoints, read_only=True
    ) as checkpoints:
      for step in checkpoints.steps():
        try:
          checkpoints.verify(step)
        except checkpointer.DamagedCheckpointError:
          continue
        whole.append(step)
    # Without the name of the run there is none, and it would be written.
    if self.has_tiers and (self.place / run_dir.LOCAL_CHECKPOINTS).exists():
      local = local_tier.LocalTier(self.disk(), self.place)
      whole += [local.step] if local.step is not None else []
      local.close()
    return sorted(whole)

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns all arrays of the newest checkpoint, by name."""
    stored = stored_checkpoint.find_checkpoint(self.checkpoints)
    return stored_checkpoint.read_numpy(stored, stored.arrays)

  def digest(self) -> str:
    """Returns the sha256 of all arrays of the newest checkpoint, by name."""
    result = hashlib.sha256()
    for name, array in sorted(self.arrays().items()):
      result.update(f"{name} {array.shape} {array.dtype}".encode())
      result.update(array.tobytes())
    return result.hexdigest()

  def metrics(self) -> Mapping[tuple[int, str], Mapping[str, Any]]:
    """Returns the metrics by step and split, without measured times."""
    lines = (self.place / run_dir.METRICS).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {
      (record["step"], record["split"]): {
        name: value for name, value in record.items() if not _MEASURED(name)
      }
      for record in records
      if record["split"] in ("train", "validation")
    }
