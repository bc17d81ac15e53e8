"""A parent that starts a training again when it, or another host's, dies.

With `--max_restarts` every process of a run has such a parent, on its machine.
A process that dies takes all others with it: JAX ends them, at once or when the
heartbeat stops. Then each parent says who was lost, and starts its own process
again; they join anew, and go on from the newest checkpoint.

The parent imports neither jax nor the experiment, so it needs no memory, and
what kills a training does not kill it.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
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

from paxon.runner import run_dir as run_dirs
from paxon.runner.hosts import failures, loss_records

# As `joining.JOINED_FILE`, which this module does not import, nor jax with it.
JOINED_FILE = "PAXON_JOINED_FILE"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WRONG_USE = 2
_TAIL_LINES = 200
# Asks a child to stop; it may come twice, or after another signal.
_REQUEST = signal.SIGUSR1
# Between two starts; and how long one waits for what others write or signal.
_PAUSE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _End:
  """How a child ended."""

  begin: float
  time: float
  status: int
  stderr: str
  # What it has written once it joined the others; None if it never did.
  joined: Mapping[str, int] | None


@dataclasses.dataclass(kw_only=True)
class Supervisor:
  """Runs a command until it ends well, or has died too often.

  Attributes:
    command: Which starts the training in a process of its own.
    run_dir: The folder of the run.
    max_restarts: How often it is started again.
    timeout_seconds: How long a process that was started again may take to join
      the others.
    sleep: Waits for seconds; another one in tests.
  """

  command: Sequence[str]
  run_dir: epath.Path
  max_restarts: int
  timeout_seconds: float
  sleep: Callable[[float], None] = time.sleep
  _child: subprocess.Popen[bytes] | None = None
  _stopped_by: int = 0

  def run(self) -> int:
    """Returns the exit status: that of the command when it ended by itself."""
    before = {n: signal.signal(n, self._pass_on) for n in _SIGNALS}
    try:
      return self._run()
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)

  def _run(self) -> int:
    restarts, lost_at = 0, None
    while True:
      end = self._run_once()
      if end.status in (0, _WRONG_USE) or self._stopped_by:
        if end.status and end.joined:
          self._record(end)
        return _exit_status(end.status, self._stopped_by)
      if end.joined is None:
        # Others may not have noticed yet, and refuse one that comes again.
        limit = self.timeout_seconds
        if lost_at is None or end.time - lost_at > limit:
          _say("the process ended before it joined the others; not restarted")
          return _exit_status(end.status)
        self.sleep(_PAUSE_SECONDS)
        continue
      what = self._tell(end)
      if restarts == self.max_restarts:
        _say(
          f"gave up after {restarts} restarts (--max_restarts): {what};"
          f" {self._newest()}; the same command goes on from there"
        )
        return 1
      restarts, lost_at = restarts + 1, end.time
      _say(
        f"{what}; restart {restarts} of {self.max_restarts}, {self._newest()}"
      )

  def _run_once(self) -> _End:
    begin = time.time()
    tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "joined"
      self._child = subprocess.Popen(
        self.command,
        stderr=subprocess.PIPE,
        env=os.environ | {JOINED_FILE: os.fspath(path)},
        # The terminal's Ctrl-C goes to the parent, which passes it on once.
        process_group=0,
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
      # What the child started may hold its standard error open.
      relay.join(_PAUSE_SECONDS)
      joined = None
      with contextlib.suppress(OSError, ValueError):
        joined = json.loads(path.read_text())
    text = b"".join(tail).decode(errors="replace")
    return _End(
      begin=begin, time=time.time(), status=status, stderr=text, joined=joined
    )

  def _tell(self, end: _End) -> str:
    """Writes how the child ended; returns who was lost first."""
    own = self._record(end)
    if not own.follows:
      return own.sentence()
    # The others' parents write at about the same time.
    self.sleep(_PAUSE_SECONDS)
    losses = loss_records.read(self.run_dir, since=end.begin)
    first = loss_records.cause(losses)
    here = f"process {own.process} ({own.host}) ended with it"
    if first is not None:
      return f"{first.sentence()}; {here}"
    when = loss_records.clock(end.time)
    silent = failures.lost_processes(end.stderr)
    if silent:
      names = " and ".join(f"process {index}" for index in silent)
      return f"{names} was lost before {when}, without a word; {here}"
    return f"another process was lost before {when}; {here}"

  def _record(self, end: _End) -> loss_records.Loss:
    joined = end.joined or {}
    loss = loss_records.Loss(
      process=int(joined.get("process", 0)),
      host=socket.gethostname(),
      time=end.time,
      status=end.status,
      follows=joined.get("processes", 1) > 1
      and end.status in (1, -signal.SIGABRT)
      and failures.is_loss_text(end.stderr),
    )
    try:
      loss_records.write(self.run_dir, loss)
    except OSError as error:
      _say(f"how the process ended cannot be written down ({error})")
    return loss

  def _newest(self) -> str:
    """Returns which checkpoint the next start goes on from, in words."""
    folder = self.run_dir / run_dirs.CHECKPOINTS
    steps = []
    with contextlib.suppress(OSError):
      steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
    if not steps:
      return "from the beginning, because there is no checkpoint yet"
    return f"from the newest checkpoint, of step {max(steps)}"

  def _pass_on(self, number: int, frame: FrameType | None) -> None:
    """Asks the child to stop; what comes after that reaches it as it is."""
    del frame
    if not self._stopped_by:
      self._stopped_by = number
      # Clusters signal all processes of a job. The child's own comes first, or
      # it would count as the second one, which kills without a checkpoint.
      self.sleep(_PAUSE_SECONDS)
      number = _REQUEST
    if self._child is not None:
      self._child.send_signal(number)


def child_command(original: Sequence[str], flag: str) -> list[str]:
  """Returns the command of this process, with a flag that makes it a child.

  Args:
    original: `sys.orig_argv`.
    flag: The last of equal flags counts.
  """
  return [sys.executable, *original[1:], flag]


def _relay(stream: IO[bytes], tail: collections.deque[bytes]) -> None:
  """Shows what a child writes, as it comes, and keeps the end of it."""
  with stream:
    for line in stream:
      tail.append(line)
      with contextlib.suppress(OSError):
        os.write(2, line)


def _exit_status(status: int, stopped_by: int = 0) -> int:
  """Returns what a shell makes of a status of `subprocess`.

  Args:
    status: Of the child.
    stopped_by: The signal for which it was asked to stop. A child that was too
      young to do so has died of the request instead.
  """
  status = status if status >= 0 else 128 - status
  if stopped_by and status == 128 + _REQUEST:
    return 128 + stopped_by
  return status


def _say(line: str) -> None:
  print(f"supervisor: {line}", file=sys.stderr, flush=True)
