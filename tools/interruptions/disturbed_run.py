"""A run that is interrupted several times, and the checks of how it resumes.

After each disturbance the next process must resume from the newest complete and
undamaged checkpoint: nothing committed is lost. At the end the arrays must be
bitwise equal, and the metrics exactly equal, to those of an undisturbed run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import random
import resource
import signal
import subprocess
import time

from paxon.tools.interruptions import tiny_run

# Share of moments at any time, also while a process starts.
_ANY_MOMENT = 0.2
_POLL_SECONDS = 0.01
# About the time between two checkpoints, with saving.
_SPREAD_SECONDS = 0.4
_DISK_SIZE = "32m"


# A disturbance; it returns when the process has ended.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
  """The results of an undisturbed run.

  Attributes:
    run: Its folder.
    digest: Hash of its arrays.
    seconds: From the start of the process to its end.
  """

  run: tiny_run.TinyRun
  digest: str
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Struck:
  """One disturbance and its consequences.

  Attributes:
    kind: A key of `KINDS`.
    moment: Seconds from the start of the process.
    status: Exit status of the process.
    newest: The newest undamaged checkpoint afterwards; None for none.
    problems: Checks that failed, one sentence each.
  """

  kind: str
  moment: float
  status: int
  newest: int | None
  problems: tuple[str, ...]


def undisturbed(
  folder: pathlib.Path,
  *,
  launch: tiny_run.Launch = tiny_run.command_line,
  num_steps: int = tiny_run.NUM_STEPS,
) -> Expected:
  """Runs to the end.

  Args:
    folder: An empty folder.
    launch: Starts processes, also those of the disturbed runs.
    num_steps: Training steps of the runs.

  Raises:
    RuntimeError: The run failed.
  """
  run = tiny_run.TinyRun(folder / "run", launch=launch, num_steps=num_steps)
  start = time.monotonic()
  ended = run.finish(run.start())
  seconds = time.monotonic() - start
  if ended.status:
    raise RuntimeError(f"The undisturbed run failed:\n{ended.output}")
  return Expected(run=run, digest=run.digest(), seconds=seconds)


def disturbed(
  folder: pathlib.Path,
  kinds: Sequence[str],
  *,
  expected: Expected,
  choice: random.Random,
) -> list[Struck]:
  """Disturbs a run once by each kind, in order, and runs it to its end.

  Args:
    folder: An empty folder.
    kinds: Keys of `KINDS`.
    expected: Results of the same run, undisturbed.
    choice: Source of random moments, files and bits.

  Returns:
    The disturbances; problems at the end of the run belong to the last one.
  """
  needs_disk = "disk full" in kinds
  with _scratch_disk(folder, wanted=needs_disk):
    run = tiny_run.TinyRun(
      folder / "run",
      launch=expected.run.launch,
      num_steps=expected.run.num_steps,
    )
    newest, results = None, []
    for kind in kinds:
      struck = _strike(run, kind, newest, expected, choice)
      newest = struck.newest
      results.append(struck)
    problems = _end(run, newest, expected)
    last = results[-1]
    results[-1] = dataclasses.replace(
      last, problems=(*last.problems, *problems)
    )
  return results


def _strike(
  run: tiny_run.TinyRun,
  kind: str,
  before: int | None,
  expected: Expected,
  choice: random.Random,
) -> Struck:
  begin = time.monotonic()
  process = run.start()
  _wait(run, process, before, expected, choice)
  moment = time.monotonic() - begin
  try:
    ended = KINDS[kind](run, process, choice)
  except subprocess.TimeoutExpired:
    return Struck(
      kind=kind,
      moment=moment,
      status=process.wait(),
      newest=_newest(run),
      problems=(f"{kind}: the process did not end",),
    )
  newest = _newest(run)
  problems = _start_problems(ended, before, run.num_steps)
  # A checkpoint that was damaged on purpose may be lost.
  if "checkpoint" not in kind:
    problems += _lost(before, newest)
  return Struck(
    kind=kind,
    moment=moment,
    status=ended.status,
    newest=newest,
    problems=tuple(problems),
  )


def _wait(
  run: tiny_run.TinyRun,
  process: tiny_run.Process,
  before: int | None,
  expected: Expected,
  choice: random.Random,
) -> None:
  """Waits for a random moment.

  Most moments count in steps: in seconds, all would be before the first
  checkpoint if the machine is busier than during the undisturbed run.
  """
  if choice.random() < _ANY_MOMENT:
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(choice.uniform(0.0, expected.seconds))
    return
  step = choice.randrange((before or 0) + 1, run.num_steps + 2)
  while process.poll() is None and run.last_begun_step() < step:
    time.sleep(_POLL_SECONDS)
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(choice.uniform(0.0, _SPREAD_SECONDS))


def _end(
  run: tiny_run.TinyRun, newest: int | None, expected: Expected
) -> list[str]:
  ended = run.finish(run.start())
  if ended.status:
    lines = ended.output.strip().splitlines() or ["no output"]
    return [f"the last process failed ({ended.status}): {lines[-1]}"]
  problems = _start_problems(ended, newest, run.num_steps)
  if run.digest() != expected.digest:
    problems.append("the arrays differ from those of the undisturbed run")
  if run.metrics() != expected.run.metrics():
    problems.append("the metrics differ from those of the undisturbed run")
  return problems


def _newest(run: tiny_run.TinyRun) -> int | None:
  return max(run.whole_steps(), default=None)


def _start_problems(
  ended: tiny_run.Ended, newest: int | None, num_steps: int
) -> list[str]:
  """Checks that a process resumed from the newest undamaged checkpoint."""
  has_started = ended.resumed_from is not None or "step 1/" in ended.output
  done = newest == num_steps
  if not has_started or done or ended.resumed_from == newest:
    return []
  return [
    f"resumed from step {ended.resumed_from}, but the newest undamaged"
    f" checkpoint was of step {newest}"
  ]


def _lost(before: int | None, after: int | None) -> list[str]:
  if (after or 0) < (before or 0):
    return [f"the checkpoint of step {before} was lost; the newest is {after}"]
  return []


@contextlib.contextmanager
def _scratch_disk(folder: pathlib.Path, *, wanted: bool) -> Iterator[None]:
  """Mounts a disk in memory at an empty folder, if permitted."""
  command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_SIZE}", "scratch"]
  mounted = wanted and _succeeds([*command, str(folder)])
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
