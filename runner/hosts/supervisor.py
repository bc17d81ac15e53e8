"""A supervisor process that reports failures and restarts training.

Each of several processes that train together has a supervisor on its machine,
and with `--max_restarts` a single process has one too. When a process dies, JAX
terminates all others from C++, at once or when the heartbeat stops. Each
supervisor then reports which process was lost. With `--max_restarts` it
restarts its own; the processes join again and resume from the latest
checkpoint.

With `--min_processes`, a run does not wait for a lost process forever: when the
restarted ones have waited for `--host_timeout`, those that are left start with
fewer (`Membership`).

A supervisor imports neither jax nor the experiment: it needs little memory and
survives what kills the training process.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from types import FrameType
from typing import IO

from etils import epath

from paxon.runner import files
from paxon.runner import run_dir as run_dirs
from paxon.runner.hosts import process_failures, process_settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Requests a stop. Unlike SIGTERM, the child may get it twice.
_STOP_SIGNAL = signal.SIGUSR1
# Exit statuses of a training that a signal stopped after a checkpoint. One that
# a signal killed has the negative number.
_STOPPED = frozenset(
  128 + number for number in (*_SIGNALS, signal.SIGHUP, _STOP_SIGNAL)
)
_USAGE_ERROR = 2
_TAIL_LINES = 200
_MEMBER = "member-"
_PR_SET_PDEATHSIG = 1  # Of prctl(2).
# Pause between two starts, and wait for records and signals of others.
_PAUSE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _End:
  """The exit of a child."""

  begin: float
  time: float
  status: int
  stderr: str
  # Content of its `JOINED_FILE`; None if it did not join the others.
  joined: Mapping[str, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
  """Agreement of the supervisors, by files, on the processes that are left.

  Each supervisor writes at every start how often it has restarted. All of them
  count each loss, so those with the same number are left. A supervisor that
  comes later does not fit the others and ends.

  Attributes:
    run_dir: The run directory.
    coordinator_address: `HOST:PORT` of process 0.
    process_id: Index of this process.
    min_processes: The least number of processes to continue with.
  """

  run_dir: epath.Path
  coordinator_address: str
  process_id: int
  min_processes: int

  def announce(self, restarts: int) -> None:
    """Writes that this process takes part in a start."""
    text = json.dumps({"host": socket.gethostname(), "restarts": restarts})
    path = self._folder / f"{_MEMBER}{self.process_id}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    files.write_text(path, text)

  def flags(self, restarts: int) -> list[str] | None:
    """Returns the flags of a start with those that are left, None if too few.

    They are numbered again in the same order. The first one is the coordinator,
    at the port of the one before.
    """
    present = self._present(restarts)
    if self.process_id not in present or len(present) < self.min_processes:
      return None
    address = self.coordinator_address
    first = min(present)
    if first:
      address = f"{present[first]}:{address.rpartition(':')[2]}"
    index = sorted(present).index(self.process_id)
    return [
      f"--num_processes={len(present)}",
      f"--process_id={index}",
      f"--coordinator_address={address}",
    ]

  @property
  def _folder(self) -> epath.Path:
    return self.run_dir / process_failures.FOLDER

  def _present(self, restarts: int) -> dict[int, str]:
    """Returns the hosts of those that have restarted as often, by process."""
    found = {}
    for path in self._folder.glob(f"{_MEMBER}*.json"):
      # Others may be writing theirs.
      with contextlib.suppress(OSError, ValueError):
        member = files.read_json(path, files.to_object, kind="a process")
        if member.get("restarts") == restarts:
          found[int(path.stem.removeprefix(_MEMBER))] = str(member.get("host"))
    return found


@dataclasses.dataclass(kw_only=True)
class Supervisor:
  """Runs a command until it succeeds or has failed too often.

  Attributes:
    command: The command of the training process.
    run_dir: The run directory.
    max_restarts: Largest number of restarts.
    timeout_seconds: How long a restarted process may take to join the others.
    membership: Decides on a start with fewer processes; None waits for all.
    sleep: Sleeps for seconds; replaced in tests.
  """

  command: Sequence[str]
  run_dir: epath.Path
  max_restarts: int
  timeout_seconds: float
  membership: Membership | None = None
  sleep: Callable[[float], None] = time.sleep
  _child: subprocess.Popen[bytes] | None = None
  _stopped_by: int = 0
  _fewer: Sequence[str] = ()

  def run(self) -> int:
    """Returns the command's exit status, unless restarts ran out."""
    before = {n: signal.signal(n, self._forward) for n in _SIGNALS}
    try:
      return self._run()
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)

  def _run(self) -> int:
    restarts, lost_at = 0, None
    while True:
      with contextlib.suppress(OSError):
        if self.membership is not None:
          self.membership.announce(restarts)
      end = self._run_once()
      if self._continues_with_fewer(end, restarts):
        continue
      is_final = end.status in (0, _USAGE_ERROR) or end.status in _STOPPED
      if is_final or self._stopped_by:
        if end.status and end.status not in _STOPPED and end.joined:
          self._record(end)
        return _exit_status(end.status, self._stopped_by)
      if end.joined is None:
        # The others may not have noticed yet, and reject a second process.
        limit = self.timeout_seconds
        if lost_at is None or end.time - lost_at > limit:
          if self.max_restarts:
            _report(
              "the process exited before it joined the others; not restarted"
            )
          return _exit_status(end.status)
        self.sleep(_PAUSE_SECONDS)
        continue
      cause = self._find_cause(end)
      if restarts == self.max_restarts:
        tried = f"gave up after {restarts} restarts (--max_restarts): "
        _report(
          f"{tried if restarts else ''}{cause}; the same command resumes"
          f" {self._latest()}"
        )
        return 1
      restarts, lost_at = restarts + 1, end.time
      _report(
        f"{cause}; restart {restarts} of {self.max_restarts}, {self._latest()}"
      )

  def _continues_with_fewer(self, end: _End, restarts: int) -> bool:
    """Whether the others of a restart are missing, and enough are left."""
    is_missing = end.joined is None and end.status == _USAGE_ERROR and restarts
    if not is_missing or self.membership is None or self._stopped_by:
      return False
    fewer = self.membership.flags(restarts)
    if fewer is None or fewer == self._fewer:
      return False
    self._fewer = fewer
    _report(
      f"not all processes came back within {self.timeout_seconds:.0f} s"
      f" (--host_timeout); starting with {fewer[0].partition('=')[2]},"
      f" {self._latest()}"
    )
    return True

  def _run_once(self) -> _End:
    begin = time.time()
    tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "joined"
      self._child = subprocess.Popen(
        [*self.command, *self._fewer],
        stderr=subprocess.PIPE,
        env=os.environ | {process_settings.JOINED_FILE: os.fspath(path)},
        # Ctrl-C reaches only this process, which forwards it once.
        process_group=0,
        preexec_fn=die_with_parent,
      )
      child = self._child
      assert child.stderr is not None
      relay = threading.Thread(
        target=_relay, args=(child.stderr, tail), daemon=True
      )
      relay.start()
      if self._stopped_by:
        child.terminate()
      status = child.wait()
      self._child = None
      # Processes that the child started may hold its standard error open.
      relay.join(_PAUSE_SECONDS)
      joined = None
      with contextlib.suppress(OSError, ValueError):
        joined = json.loads(path.read_text())
    text = b"".join(tail).decode(errors="replace")
    return _End(
      begin=begin, time=time.time(), status=status, stderr=text, joined=joined
    )

  def _find_cause(self, end: _End) -> str:
    """Records how the child exited; returns which process was lost first."""
    own = self._record(end)
    if not own.is_secondary:
      return own.describe()
    # The supervisors of the others write at about the same time.
    self.sleep(_PAUSE_SECONDS)
    exits = process_failures.read(self.run_dir, since=end.begin)
    first = process_failures.find_cause(exits)
    here = f"process {own.process} ({own.host}) exited with it"
    if first is not None:
      return f"{first.describe()}; {here}"
    when = process_failures.format_time(end.time)
    lost = process_failures.find_lost_processes(end.stderr)
    if lost:
      names = " and ".join(f"process {index}" for index in lost)
      return f"{names} was lost before {when} and left no record; {here}"
    return f"another process was lost before {when}; {here}"

  def _record(self, end: _End) -> process_failures.ProcessExit:
    joined = end.joined or {}
    own = process_failures.ProcessExit(
      process=int(joined.get("process", 0)),
      host=socket.gethostname(),
      time=end.time,
      status=end.status,
      is_secondary=joined.get("processes", 1) > 1
      and end.status in (1, -signal.SIGABRT)
      and process_failures.is_peer_failure(end.stderr),
    )
    try:
      process_failures.write(self.run_dir, own)
    except OSError as error:
      _report(f"cannot record how the process exited ({error})")
    return own

  def _latest(self) -> str:
    """Returns where the next start resumes, in words."""
    folder = self.run_dir / run_dirs.CHECKPOINTS
    steps = []
    with contextlib.suppress(OSError):
      steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
    if not steps:
      return "from the beginning (no checkpoint yet)"
    return f"from the latest checkpoint (step {max(steps)})"

  def _forward(self, number: int, frame: FrameType | None) -> None:
    """Requests a stop; later signals are forwarded unchanged."""
    del frame
    if not self._stopped_by:
      self._stopped_by = number
      # Not `print`, which fails if the signal arrives during another one.
      name = signal.Signals(number).name
      os.write(2, f"supervisor: {name}: stopping the training\n".encode())
      # Clusters signal all processes of a job. The child must get its own
      # signal first: as the second one it would kill without a checkpoint.
      self.sleep(_PAUSE_SECONDS)
      number = _STOP_SIGNAL
    if self._child is not None:
      self._child.send_signal(number)


def die_with_parent() -> None:
  """Makes Linux kill this process when its parent ends; for `preexec_fn`.

  A killed parent must not leave a training that writes to the same run.
  """
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def child_command(original: Sequence[str], flag: str) -> list[str]:
  """Returns the command of this process (`sys.orig_argv`) with one more flag.

  It overrides an earlier value.
  """
  return [sys.executable, *original[1:], flag]


def _relay(stream: IO[bytes], tail: collections.deque[bytes]) -> None:
  """Copies a stream to standard error and keeps its last lines.

  The log of JAX's native code on a lost process, which ends with a stack, is
  kept but not copied: the supervisor prints one line instead.
  """
  is_terminated = False
  with stream:
    for line in stream:
      tail.append(line)
      is_terminated |= process_failures.TERMINATION in line
      if is_terminated or process_failures.is_peer_log(line):
        continue
      with contextlib.suppress(OSError):
        os.write(2, line)


def _exit_status(status: int, stopped_by: int = 0) -> int:
  """Returns the exit status that a shell would report.

  Args:
    status: Of the child, in the convention of `subprocess`.
    stopped_by: The signal that this process forwarded as `_STOP_SIGNAL`. A
      child without a handler yet was killed by the latter.
  """
  status = status if status >= 0 else 128 - status
  if stopped_by and status == 128 + _STOP_SIGNAL:
    return 128 + stopped_by
  return status


def _report(line: str) -> None:
  print(f"supervisor: {line}", file=sys.stderr, flush=True)
