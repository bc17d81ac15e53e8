"""One run, disturbed some times and then left alone, and what must hold.

After each disturbance the next process goes on from the newest checkpoint that
was complete and undamaged: nothing committed is lost. At the end the arrays are
bitwise, and the figures exactly, those of a run that nobody disturbed.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
import random
import subprocess
import time

from paxon.tools.interruptions import disturbances, scratch_disk, tiny_run

# Share of the moments that may lie anywhere, also while a process starts.
_ANY_MOMENT = 0.2
_LOOK_SECONDS = 0.01
# About as long as the steps between two checkpoints, with their saving.
_SPREAD_SECONDS = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
  """What an undisturbed run gave.

  Attributes:
    run: Its folder.
    digest: Of its arrays.
    seconds: How long it took, from process start to end.
  """

  run: tiny_run.TinyRun
  digest: str
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Struck:
  """One disturbance and what followed.

  Attributes:
    kind: A key of `disturbances.KINDS`.
    moment: When it struck, in seconds from the start of the process.
    status: The process's exit status.
    newest: The newest whole checkpoint afterwards; `None` for none.
    problems: What did not hold, one sentence each.
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
    folder: An empty one.
    launch: What starts processes, also those that are compared with this one.
    num_steps: How many steps these runs have.

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
  """Disturbs a run once by each kind, in order, and lets it end.

  Args:
    folder: An empty one.
    kinds: Keys of `disturbances.KINDS`.
    expected: Of the same run, undisturbed.
    choice: Of moments, files and bits.

  Returns:
    What happened; the problems of the run's end stand with the last one.
  """
  needs_disk = "disk full" in kinds
  with scratch_disk.scratch_disk(folder, wanted=needs_disk):
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
    ended = disturbances.KINDS[kind](run, process, choice)
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
  # What was damaged on purpose may be lost.
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

  Most moments count in steps: seconds alone would all lie before the first
  checkpoint on a machine that is busier than when the undisturbed run was made.
  """
  if choice.random() < _ANY_MOMENT:
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(choice.uniform(0.0, expected.seconds))
    return
  step = choice.randrange((before or 0) + 1, run.num_steps + 2)
  while process.poll() is None and run.last_begun_step() < step:
    time.sleep(_LOOK_SECONDS)
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
  if run.figures() != expected.run.figures():
    problems.append("the figures differ from those of the undisturbed run")
  return problems


def _newest(run: tiny_run.TinyRun) -> int | None:
  return max(run.whole_steps(), default=None)


def _start_problems(
  ended: tiny_run.Ended, newest: int | None, num_steps: int
) -> list[str]:
  """Whether a process went on from the newest whole checkpoint, if it began."""
  came_so_far = ended.continued_from is not None or "step 1/" in ended.output
  done = newest == num_steps
  if not came_so_far or done or ended.continued_from == newest:
    return []
  return [
    f"went on from step {ended.continued_from}, and the newest whole checkpoint"
    f" was of step {newest}"
  ]


def _lost(before: int | None, after: int | None) -> list[str]:
  if (after or 0) < (before or 0):
    return [f"the checkpoint of step {before} was lost; the newest is {after}"]
  return []
