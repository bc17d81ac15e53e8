"""Disturbances of a running process: signals, damaged files, a full disk.

Each returns when the process has ended.
"""

from collections.abc import Callable, Mapping
import os
import pathlib
import random
import resource
import signal
import time

from paxon.tools.interruptions import tiny_run

Strike = Callable[
  [tiny_run.TinyRun, tiny_run.Process, random.Random], tiny_run.Ended
]

BALLAST = "ballast"
# The largest file if no disk can be mounted: more than a line of metrics, less
# than the arrays of a checkpoint.
_LARGEST_FILE = 20_000
_MIB = 1 << 20


def _signalled(number: signal.Signals) -> Strike:
  def strike(
    run: tiny_run.TinyRun,
    process: tiny_run.Process,
    choice: random.Random,
  ) -> tiny_run.Ended:
    del choice
    process.send_signal(number)
    return run.finish(process)

  return strike


def _damaged(damage: Callable[[bytearray, random.Random], bytes]) -> Strike:
  """Kills the process, then damages a file of the newest checkpoint."""

  def strike(
    run: tiny_run.TinyRun,
    process: tiny_run.Process,
    choice: random.Random,
  ) -> tiny_run.Ended:
    process.kill()
    ended = run.finish(process)
    whole = run.whole_steps()
    # A single checkpoint would leave nothing to resume from.
    if len(whole) > 1:
      path = choice.choice(_files(run.checkpoints / str(whole[-1])))
      path.write_bytes(damage(bytearray(path.read_bytes()), choice))
    return ended

  return strike


def _files(checkpoint: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a checkpoint's items that are not empty."""
  return sorted(
    path
    for path in checkpoint.rglob("*")
    if path.is_file() and path.parent != checkpoint and path.stat().st_size
  )


def _half(content: bytearray, choice: random.Random) -> bytes:
  return bytes(content[: choice.randrange(len(content))])


def _flipped(content: bytearray, choice: random.Random) -> bytes:
  content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
  return bytes(content)


def _disk_full(
  run: tiny_run.TinyRun, process: tiny_run.Process, choice: random.Random
) -> tiny_run.Ended:
  """Fills the disk until the process ends."""
  disk = run.folder.parent
  if not os.path.ismount(disk):
    largest = (_LARGEST_FILE, resource.RLIM_INFINITY)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, largest)
    return run.finish(process)
  ballast = disk / BALLAST
  try:
    while process.poll() is None:
      # Less than a checkpoint, so that saving fails at any of its files.
      spared = choice.randrange(64) << 10
      _fill(ballast, spared)
      time.sleep(0.02)
  finally:
    ballast.unlink(missing_ok=True)
  return run.finish(process)


def _fill(ballast: pathlib.Path, spared: int) -> None:
  """Grows a file until only `spared` bytes are free."""
  disk = os.statvfs(ballast.parent)
  free = disk.f_bavail * disk.f_frsize - spared
  if free <= 0:
    return
  with ballast.open("ab") as file:
    try:
      while free > 0:
        free -= file.write(bytes(min(free, _MIB)))
    except OSError:
      return


KINDS: Mapping[str, Strike] = {
  "SIGKILL": _signalled(signal.SIGKILL),
  "SIGTERM": _signalled(signal.SIGTERM),
  "SIGINT": _signalled(signal.SIGINT),
  "newest checkpoint truncated": _damaged(_half),
  "newest checkpoint bit-flipped": _damaged(_flipped),
  "disk full": _disk_full,
}
