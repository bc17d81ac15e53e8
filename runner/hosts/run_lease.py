"""The lease of a run directory: one training at a time writes to it.

The file `owner.json` names the owner and has a counter that the owner
increments every few seconds. A training that finds it

  on the same machine       asks the system whether the owner still runs,
  on another machine        watches the counter: a moving one is alive, one that
                            stands still for three beats is taken over.

Clocks are not compared, and nothing depends on locks, which object stores and
some network file systems lack. Where two write at once the last one wins, and
the loser detects it before continuing, at the latest before its next
checkpoint.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import datetime
import json
import os
import socket
import threading
import time
import uuid

from etils import epath

from paxon.runner import exit_status, files, run_dir, user_error

BEAT_SECONDS = 10.0
# After this time, writes of two processes at the same moment are visible.
_SETTLE_SECONDS = 0.5
_LOOK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
  """The content of the file.

  Attributes:
    id: Unique for each training.
    host: Name of the machine.
    machine: Machine and process namespace, in which `pid` has a meaning.
    pid: The process.
    started: When the process started, in the units of the system; it tells a
      process from a later one with the same number.
    since: When the training started, ISO 8601 in UTC.
    count: Heartbeats so far.
  """

  id: str
  host: str
  machine: str
  pid: int
  started: str
  since: str
  count: int = 0

  def describe(self) -> str:
    """Returns the owner in words."""
    return f"process {self.pid} on {self.host}, since {self.since}"


class LeaseError(user_error.UserError):
  """Another training has the lease, perhaps one that is about to end."""

  status = exit_status.ExitStatus.PEERS


class Lease:
  """The lease of one training; a context manager that renews and returns it."""

  def __init__(
    self,
    folder: epath.Path,
    *,
    sleep: Callable[[float], None] = time.sleep,
    beat_seconds: float = BEAT_SECONDS,
  ) -> None:
    """Prepares.

    Args:
      folder: The run directory, which exists.
      sleep: Replaced in tests.
      beat_seconds: Time between heartbeats.
    """
    self._path = folder / run_dir.OWNER
    self._sleep = sleep
    self._beat_seconds = beat_seconds
    self._own = _this_process()
    self._end = threading.Event()
    self._thread = threading.Thread(
      target=self._renew, name="run lease", daemon=True
    )

  def __enter__(self) -> "Lease":
    """Takes the lease.

    Raises:
      LeaseError: Another training has it.
    """
    while not self._take_free():
      other = self._read()
      if other is not None and self._is_alive(other):
        raise LeaseError(self._describe_holder(other))
      # A link to nowhere exists, too.
      if os.path.lexists(self._path) or self._path.exists():
        self._write()
        self._sleep(_SETTLE_SECONDS)
        break
    self.check()
    self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._end.set()
    self._thread.join()
    # A store that cannot be reached keeps a lease that nobody renews.
    with contextlib.suppress(OSError, user_error.UserError):
      self.check()
      self._path.unlink(missing_ok=True)

  @property
  def id(self) -> str:
    """The id in the file while this training has the lease."""
    return self._own.id

  def take(self, stack: contextlib.ExitStack) -> None:
    """Takes the lease for the time of a context; see `__enter__`."""
    stack.enter_context(self)

  def check(self) -> None:
    """Raises LeaseError if another training has taken the lease."""
    other = self._read()
    if other is None or other.id != self._own.id:
      raise LeaseError(self._describe_holder(other))

  def _describe_holder(self, other: Owner | None) -> str:
    folder = os.fspath(self._path.parent)
    if other is None:
      return (
        f"{folder} is no longer this training's: {run_dir.OWNER} was removed."
      )
    return (
      f"{folder} is in use by another training ({other.describe()}); stop it,"
      " or use another --job_log_dir."
    )

  def _take_free(self) -> bool:
    """Writes the file if there is none; returns whether it did."""
    if self._path.exists():
      return False
    path = os.fspath(self._path)
    if files.is_local(path):
      draft = f"{path}.{self._own.id}.part"
      files.write_text(draft, self._text())
      try:
        # Fails if the file exists, unlike a rename.
        os.link(draft, path)
        return True
      except FileExistsError:
        return False
      except OSError:
        # A file system without links.
        pass
      finally:
        os.remove(draft)
    self._write()
    self._sleep(_SETTLE_SECONDS)
    return True

  def _is_alive(self, other: Owner) -> bool:
    """Whether the owner still trains; may wait to find out."""
    if other.machine == self._own.machine:
      return _find_start_time(other.pid) == other.started
    print(
      f"{os.fspath(self._path.parent)} was last used by {other.describe()};"
      f" waiting up to {3 * self._beat_seconds:.0f} s to see whether it still"
      " trains",
      flush=True,
    )
    waited = 0.0
    while waited < 3 * self._beat_seconds:
      self._sleep(_LOOK_SECONDS)
      waited += _LOOK_SECONDS
      now = self._read()
      if now != other:
        return now is not None
    return False

  def _renew(self) -> None:
    while not self._end.wait(self._beat_seconds):
      # The next checkpoint reports what lasts.
      with contextlib.suppress(OSError):
        now = self._read()
        if now is None or now.id != self._own.id:
          return
        self._own = dataclasses.replace(self._own, count=now.count + 1)
        self._write()

  def _text(self) -> str:
    return f"{json.dumps(dataclasses.asdict(self._own))}\n"

  def _write(self) -> None:
    files.write_text(self._path, self._text())

  def _read(self) -> Owner | None:
    return read_owner(self._path.parent)


def read_owner(folder: epath.Path) -> Owner | None:
  """Returns the owner of a directory; None without one, or a damaged file."""
  try:
    return files.read_json(
      folder / run_dir.OWNER,
      lambda value: files.to_record(Owner, value),
      kind="the owner of a run",
    )
  except (FileNotFoundError, files.DamagedFileError):
    return None


def _this_process() -> Owner:
  now = datetime.datetime.now(datetime.UTC)
  return Owner(
    id=uuid.uuid4().hex,
    host=socket.gethostname(),
    machine=_machine(),
    pid=os.getpid(),
    started=_find_start_time(os.getpid()) or "",
    since=f"{now:%Y-%m-%dT%H:%M:%SZ}",
  )


def _machine() -> str:
  """Returns an ID unique per machine, boot and container."""
  parts = [socket.gethostname()]
  with contextlib.suppress(OSError):
    with open("/proc/sys/kernel/random/boot_id") as file:
      parts.append(file.read().strip())
    parts.append(os.readlink("/proc/self/ns/pid"))
  return " ".join(parts)


def _find_start_time(pid: int) -> str | None:
  """Returns when a process started, None if it does not run."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      # The name, in parentheses, may contain anything.
      fields = file.read().rpartition(")")[2].split()
  except FileNotFoundError:
    if os.path.exists("/proc/self/stat"):
      return None
  else:
    # The third field and the 22nd of proc(5).
    return None if fields[0] in "ZX" else fields[19]
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return None
  except PermissionError:
    pass
  return ""
