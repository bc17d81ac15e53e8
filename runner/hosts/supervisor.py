"""A supervisor process that reports failures and restarts training.

Each of several processes that train together has a supervisor on its machine,
and with `--max_restarts` a single process has one too. When a process dies, JAX
terminates all others from C++, at once or when the heartbeat stops. Each
supervisor then reports which process was lost. With `--max_restarts` it
restarts its own; the processes join again and resume from the latest
checkpoint.

With `--min_processes`, a run does not wait for a lost process forever: when the
restarted ones have waited for `--host_timeout`, those that are left start with
fewer (`membership`). A host that comes back later announces itself; the others
then stop after a step, with a checkpoint, and all start together.

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

from paxon.runner import exit_status
from paxon.runner import run_dir as run_dirs
from paxon.runner.hosts import membership as membership_lib
from paxon.runner.hosts import process_failures, process_settings, run_lease

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Requests a stop. Unlike SIGTERM, the child may get it twice.
_STOP_SIGNAL = signal.SIGUSR1
# Exit statuses of a training that a signal stopped after a checkpoint. One that
# a signal killed has the negative number.
_STOPPED = frozenset(128 + number for number in (*_SIGNALS, _STOP_SIGNAL))
_TAIL_LINES = 200
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
  membership: membership_lib.Membership | None = None
  sleep: Callable[[float], None] = time.sleep
  _child: subprocess.Popen[bytes] | None = None
  _stopped_by: int = 0
  _fewer: Sequence[str] = ()
  # Number of restarts and growths of the run, the same on all hosts.
  _generation: int = 0

  def run(self) -> int:
    """Returns the command's exit status, unless restarts ran out."""
    before = {
      number: signal.signal(number, self._forward)
      for number in _SIGNALS
      # `nohup` ignores SIGHUP, and so does the child then.
      if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
      if not self._join_run():
        return _exit_status(128 + self._stopped_by if self._stopped_by else 0)
      return self._run()
    finally:
      self._forget()
      for number, handler in before.items():
        signal.signal(number, handler)

  def _run(self) -> int:
    restarts, lost_at = 0, None
    while True:
      with contextlib.suppress(OSError):
        if self.membership is not None:
          self.membership.announce(self._generation)
      end = self._run_once()
      if self._continues_with_fewer(end) or self._continues_with_more(end):
        continue
      is_final = exit_status.is_final(end.status) or end.status in _STOPPED
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
      own = self._record(end)
      cause = self._find_cause(end, own)
      if restarts == self.max_restarts:
        tried = f"gave up after {restarts} restarts (--max_restarts): "
        _report(
          f"{tried if restarts else ''}{cause}; the same command resumes"
          f" {self._latest()}"
        )
        if own.is_secondary:
          return exit_status.ExitStatus.PEERS
        return _exit_status(end.status)
      restarts, lost_at = restarts + 1, end.time
      self._generation += 1
      _report(
        f"{cause}; restart {restarts} of {self.max_restarts}, {self._latest()}"
      )

  def _continues_with_fewer(self, end: _End) -> bool:
    """Whether the others of a restart are missing, and enough are left."""
    is_late = end.status == exit_status.ExitStatus.PEERS
    is_missing = end.joined is None and is_late and self._generation
    if not is_missing or self.membership is None or self._stopped_by:
      return False
    present = self.membership.find_present(self._generation)
    fewer = self.membership.make_flags(present)
    if fewer is None or fewer == self._fewer:
      return False
    self._fewer = fewer
    self.membership.note_fewer(self._generation, present)
    _report(
      f"not all processes came back within {self.timeout_seconds:.0f} s"
      f" (--host_timeout); starting with {fewer[0].partition('=')[2]},"
      f" {self._latest()}"
    )
    return True

  def _join_run(self) -> bool:
    """Waits for the admission to a run that continues with fewer processes.

    Returns:
      Whether to start; otherwise the run has finished, or a signal came.
    """
    if self.membership is None:
      return True
    fewer = self.membership.find_fewer()
    if fewer is None or self.membership.process_id in fewer.hosts:
      self.membership.clear()
      return True
    _report(
      f"the run continues with {len(fewer.hosts)} processes; waiting until it"
      " has saved a checkpoint and takes this one"
    )
    self.membership.ask()
    seen, changed_at = None, time.monotonic()
    while not self._stopped_by:
      admission = self.membership.find_admission(fewer.generation)
      if admission is not None:
        self._take(admission)
        return True
      now = self.membership.find_fewer()
      if now is None:
        return not (self.run_dir / run_dirs.FINISHED).exists()
      if now != seen:
        seen, changed_at = now, time.monotonic()
      elif time.monotonic() - changed_at > self.timeout_seconds:
        # Its supervisor is gone. The heartbeat of the training would not do:
        # a start may take longer until the first one.
        self.membership.clear()
        return True
      self.sleep(_PAUSE_SECONDS)
    return False

  def _forget(self) -> None:
    """Removes what this process has announced."""
    if self.membership is not None:
      self.membership.withdraw(is_first=self._is_first_of_fewer())

  def _is_first_of_fewer(self) -> bool:
    return "--process_id=0" in self._fewer

  def _take(self, admission: membership_lib.Members) -> None:
    """Uses the processes of a larger start from now on."""
    assert self.membership is not None
    flags = self.membership.make_flags(admission.hosts)
    assert flags is not None
    self._generation = admission.generation
    is_whole = len(admission.hosts) == self.membership.num_processes
    self._fewer = () if is_whole else flags

  def _admit_returned(self, owner: run_lease.Owner | None) -> bool:
    """Stops a smaller run for processes that came back; returns whether it did.

    It does so once its child is training.

    Args:
      owner: The training before it.
    """
    assert self.membership is not None
    now = run_lease.read_owner(self.run_dir)
    is_other = now is not None and (owner is None or now.id != owner.id)
    # By its first heartbeat it has installed its handlers.
    is_training = is_other and now is not None and now.count > 0
    if not is_training or not self.membership.admit(self._generation):
      return False
    if self._child is not None and not self._stopped_by:
      self._child.send_signal(_STOP_SIGNAL)
    return True

  def _continues_with_more(self, end: _End) -> bool:
    """Whether the child stopped so that processes that came back can join."""
    is_stopped = end.status in (-_STOP_SIGNAL, 128 + _STOP_SIGNAL)
    if self.membership is None or not is_stopped or self._stopped_by:
      return False
    admission = self.membership.find_admission(self._generation)
    if admission is None:
      return False
    self._take(admission)
    _report(
      f"processes came back; starting with {len(admission.hosts)},"
      f" {self._latest()}"
    )
    return True

  def _wait(self, child: subprocess.Popen[bytes]) -> int:
    """Returns the exit status; takes processes that come back meanwhile."""
    if self.membership is None or not self._is_first_of_fewer():
      return child.wait()
    owner = run_lease.read_owner(self.run_dir)
    has_asked, refreshed_at = False, time.monotonic()
    while True:
      try:
        return child.wait(_PAUSE_SECONDS)
      except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
          has_asked = has_asked or self._admit_returned(owner)
          if time.monotonic() - refreshed_at > self.timeout_seconds / 4:
            refreshed_at = time.monotonic()
            self.membership.refresh_fewer()

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
      status = self._wait(child)
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

  def _find_cause(self, end: _End, own: process_failures.ProcessExit) -> str:
    """Returns which process was lost first, in words."""
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
      and end.status in (1, exit_status.ExitStatus.PEERS, -signal.SIGABRT)
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
    found = f"from the latest checkpoint (step {max(steps, default=0)})"
    if not steps:
      found = "from the beginning (no checkpoint yet)"
    with contextlib.suppress(OSError):
      # The disks of other hosts may have them.
      if (self.run_dir / run_dirs.LOCAL_CHECKPOINTS).exists():
        found += ", or from a newer local checkpoint"
    return found

  def _forward(self, number: int, frame: FrameType | None) -> None:
    """Requests a stop; later signals are forwarded unchanged."""
    del frame
    if not self._stopped_by:
      self._stopped_by = number
      # Not `print`, which fails if the signal arrives during another one.
      name = signal.Signals(number).name
      with contextlib.suppress(OSError):  # A terminal that is gone.
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
  with contextlib.suppress(OSError):  # A terminal that is gone.
    print(f"supervisor: {line}", file=sys.stderr, flush=True)
