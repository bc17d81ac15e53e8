"""Disturbances of a running process: signals, damage, stores, clocks, devices.

A disturbance may need something of the environment of its process from the
start; the strike itself comes at a random moment and returns when the process
has ended.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import resource
import signal
import subprocess
import time

from etils import epath

from paxon.runner.hosts import run_lease
from paxon.tools.interruptions import program, tiny_run

DISK_FULL, READ_ONLY = "disk full", "read-only store"
OTHER_DEVICES = "killed, then other devices"
DISK = "disk"
# The size of a disk: that of a finished run several times, and some files.
_RUNS_PER_DISK, _SPARE_BYTES = 4, 32 << 20
_BALLAST = "ballast"
# The largest file if no disk can be mounted: more than a line of metrics, less
# than the arrays of a checkpoint.
_LARGEST_FILE = 20_000
_MIB = 1 << 20
_JUMPS = (-86_400.0, -60.0, 3_600.0, 86_400.0)
_SLOW_SECONDS = 0.02
_MARK = "commit_success.txt"
_DOWN_SECONDS = 3.0

Strike = Callable[
  [tiny_run.TinyRun, tiny_run.Process, random.Random], tiny_run.Ended
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disturbance:
  """One kind of disturbance.

  Attributes:
    strike: Disturbs a process, and returns when it has ended.
    environ: Returns variables of the environment of the process.
    needs_disk: Whether a disk is mounted for the run, if permitted.
    damages: Whether the newest checkpoint may be lost.
    places: Where it can be struck: on a disk, or in a store that tests serve.
  """

  strike: Strike
  environ: Callable[[random.Random], Mapping[str, str]] = lambda choice: {}
  needs_disk: bool = False
  damages: bool = False
  places: Collection[str] = (DISK, "gs", "s3", "az")


def _make_signal(number: signal.Signals) -> Strike:
  def strike(
    run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
  ) -> tiny_run.Ended:
    del choice
    process.send_signal(number)
    return run.finish(process)

  return strike


def _make_damage(damage: Callable[[bytearray, random.Random], bytes]) -> Strike:
  """Kills the process, then damages a file of the newest checkpoint."""

  def strike(
    run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
  ) -> tiny_run.Ended:
    process.kill()
    ended = run.finish(process)
    whole = run.whole_steps()
    # A single checkpoint would leave nothing to resume from.
    if len(whole) > 1:
      path = choice.choice(_files(run.find_checkpoint(whole[-1])))
      path.write_bytes(damage(bytearray(path.read_bytes()), choice))
    return ended

  return strike


def _files(checkpoint: epath.Path) -> list[epath.Path]:
  """Returns the files of a checkpoint's items that are not empty.

  In a store, the mark of a complete item is read by its name only.
  """
  inside = list(checkpoint.iterdir())
  waiting = [each for each in inside if each.is_dir()]
  # A local checkpoint has no folders.
  found = [] if waiting else inside
  while waiting:
    for path in waiting.pop().iterdir():
      if path.is_dir():
        waiting.append(path)
      elif path.stat().length and path.name != _MARK:
        found.append(path)
  return sorted(found)


def _half(content: bytearray, choice: random.Random) -> bytes:
  return bytes(content[: choice.randrange(len(content))])


def _flip_bits(content: bytearray, choice: random.Random) -> bytes:
  content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
  return bytes(content)


def _stop_and_continue(
  run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
) -> tiny_run.Ended:
  """Stops the process for longer than the lease's heartbeat."""
  del choice
  process.send_signal(signal.SIGSTOP)
  time.sleep(run_lease.BEAT_SECONDS + 1.0)
  process.send_signal(signal.SIGCONT)
  return run.finish(process)


def _other_devices(
  run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
) -> tiny_run.Ended:
  """Kills the process; the next one has another number of devices."""
  process.kill()
  others = [count for count in (1, 2, 4) if count != run.devices]
  run.devices = choice.choice(others)
  return run.finish(process)


def _disk_full(
  run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
) -> tiny_run.Ended:
  """Fills the disk until the process ends."""
  disk = run.folder.parent
  if not os.path.ismount(disk):
    return _limit_files(run, process)
  ballast = disk / _BALLAST
  try:
    while process.poll() is None:
      # Less than a checkpoint, so that saving fails at any of its files.
      _fill(ballast, choice.randrange(64) << 10)
      time.sleep(0.02)
  finally:
    ballast.unlink(missing_ok=True)
  return run.finish(process)


def _limit_files(
  run: tiny_run.TinyRun, process: tiny_run.Process
) -> tiny_run.Ended:
  """Forbids large files, where no disk can be mounted."""
  with contextlib.suppress(ProcessLookupError):
    largest = (_LARGEST_FILE, resource.RLIM_INFINITY)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, largest)
  return run.finish(process)


def _fail_some(
  run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
) -> tiny_run.Ended:
  """Lets every fifth request of the run fail until the process ends."""
  count = itertools.count(choice.randrange(5))
  return _finish_with(
    run, process, lambda: 503 if next(count) % 5 == 0 else None
  )


def _go_down(
  run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
) -> tiny_run.Ended:
  """Lets all requests of the run fail for some seconds."""
  end = time.monotonic() + choice.uniform(0.1, _DOWN_SECONDS)
  return _finish_with(
    run, process, lambda: 503 if time.monotonic() < end else None
  )


def _finish_with(
  run: tiny_run.TinyRun,
  process: tiny_run.Process,
  fault: Callable[[], int | None],
) -> tiny_run.Ended:
  assert run.store is not None
  assert run.store.gcs is not None
  faults = run.store.gcs.faults
  faults[run.name()] = fault
  try:
    return run.finish(process)
  finally:
    del faults[run.name()]


def _fill(ballast: pathlib.Path, spared: int) -> None:
  """Grows a file until only `spared` bytes are free."""
  disk = os.statvfs(ballast.parent)
  free = disk.f_bavail * disk.f_frsize - spared
  if free <= 0:
    return
  # Unbuffered: closing would write the rest, and fail again.
  with ballast.open("ab", buffering=0) as file:
    try:
      while free > 0:
        free -= file.write(bytes(min(free, _MIB)))
    except OSError:
      return


def _read_only(
  run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
) -> tiny_run.Ended:
  """Hides the directory behind a read-only view until the process ends."""
  del choice
  folder = os.fspath(run.folder)
  if not os.path.ismount(run.folder.parent) or not run.folder.exists():
    return _limit_files(run, process)
  if not _succeeds(["mount", "--bind", folder, folder]):
    return _limit_files(run, process)
  try:
    _succeeds(["mount", "-o", "remount,bind,ro", folder])
    return run.finish(process)
  finally:
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def scratch_disk(
  folder: pathlib.Path, *, wanted: bool, like: pathlib.Path
) -> Iterator[None]:
  """Mounts a disk in memory at an empty folder, if permitted.

  Args:
    folder: Where it is mounted.
    wanted: False does nothing.
    like: A finished run of the same size.
  """
  used = sum(p.stat().st_size for p in like.rglob("*") if p.is_file())
  size = f"size={_RUNS_PER_DISK * used + _SPARE_BYTES}"
  command = ["mount", "-t", "tmpfs", "-o", size, "scratch"]
  mounted = wanted and _succeeds([*command, os.fspath(folder)])
  try:
    yield
  finally:
    if mounted:
      subprocess.run(["umount", "--lazy", folder], check=True)


def _succeeds(command: list[str]) -> bool:
  try:
    return subprocess.run(command, capture_output=True).returncode == 0
  except FileNotFoundError:
    return False


def _jump(choice: random.Random) -> Mapping[str, str]:
  return {program.CLOCK_JUMP: str(choice.choice(_JUMPS))}


def _slow(choice: random.Random) -> Mapping[str, str]:
  del choice
  return {program.SLOW_STORE: str(_SLOW_SECONDS)}


KINDS: Mapping[str, Disturbance] = {
  "SIGKILL": Disturbance(strike=_make_signal(signal.SIGKILL)),
  "SIGTERM": Disturbance(strike=_make_signal(signal.SIGTERM)),
  "SIGINT": Disturbance(strike=_make_signal(signal.SIGINT)),
  "SIGSTOP, then SIGCONT": Disturbance(strike=_stop_and_continue),
  "newest checkpoint truncated": Disturbance(
    strike=_make_damage(_half), damages=True
  ),
  "newest checkpoint bit-flipped": Disturbance(
    strike=_make_damage(_flip_bits), damages=True
  ),
  DISK_FULL: Disturbance(strike=_disk_full, needs_disk=True, places=(DISK,)),
  READ_ONLY: Disturbance(strike=_read_only, needs_disk=True, places=(DISK,)),
  "slow store and SIGKILL": Disturbance(
    strike=_make_signal(signal.SIGKILL), environ=_slow, places=(DISK,)
  ),
  "clock shift and SIGKILL": Disturbance(
    strike=_make_signal(signal.SIGKILL), environ=_jump
  ),
  OTHER_DEVICES: Disturbance(strike=_other_devices),
  "every fifth request fails": Disturbance(strike=_fail_some, places=("gs",)),
  "store down for seconds": Disturbance(strike=_go_down, places=("gs",)),
}
