"""A run that is interrupted several times, and the checks of how it resumes.

After each disturbance the next process must resume from the newest complete and
undamaged checkpoint: nothing committed is lost. At the end the arrays must be
bitwise equal, and the metrics exactly equal, to those of an undisturbed run; if
the number of devices changed, they agree up to rounding.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
import random
import subprocess
import time
from typing import Any

import numpy as np

from paxon.inputs.store_servers import servers
from paxon.tools.interruptions import disturbances, tiny_run

# Share of moments at any time, also while a process starts.
_ANY_MOMENT = 0.2
# About the time between two checkpoints, with saving.
_SPREAD_SECONDS = 0.4
# Sums are rounded differently with other devices; Adam divides by small ones.
_RTOL, _ATOL = 1e-3, 1e-4
_MAX_TRACEBACK = 60
_FAILED = "Traceback (most recent call last)"


class UndisturbedError(Exception):
  """The undisturbed run failed; the message holds its output."""


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
    kind: Its name, a key of `disturbances.KINDS` or `lost_host.KIND`.
    moment: Seconds from the start of the process.
    status: Exit status of the process.
    newest: The newest undamaged checkpoint afterwards, or None.
    problems: Checks that failed, one sentence each.
    said: The last line of the process.
    recovery: Seconds from the disturbance to the next training step, by a
      process that was started as soon as the disturbed one had ended; None if
      no step was left.
  """

  kind: str
  moment: float
  status: int
  newest: int | None
  problems: tuple[str, ...]
  said: str = ""
  recovery: float | None = None


def run_undisturbed(
  folder: pathlib.Path,
  *,
  launch: tiny_run.Launch = tiny_run.command_line,
  num_steps: int = tiny_run.NUM_STEPS,
  training: Sequence[str] = tiny_run.TINY_LM,
  store: servers.Store | None = None,
  has_tiers: bool = False,
) -> Expected:
  """Runs to the end.

  Args:
    folder: An empty folder.
    launch: Starts processes, also those of the disturbed runs.
    num_steps: Training steps of the runs.
    training: Flags of the experiment and its knobs, less the steps.
    store: The store of the runs, None for a disk.
    has_tiers: Whether the runs also save to local disks.

  Raises:
    UndisturbedError: The run failed.
  """
  run = tiny_run.TinyRun(
    folder / "run",
    launch=launch,
    num_steps=num_steps,
    training=training,
    store=store,
    has_tiers=has_tiers,
  )
  start = time.monotonic()
  ended = run.finish(run.start())
  seconds = time.monotonic() - start
  if ended.status:
    raise UndisturbedError(f"The undisturbed run failed:\n{ended.output}")
  return Expected(run=run, digest=run.digest(), seconds=seconds)


def run_disturbed(
  folder: pathlib.Path,
  kinds: Sequence[str],
  *,
  expected: Expected,
  choice: random.Random,
) -> list[Struck]:
  """Disturbs a run once by each kind, in order, and runs it to its end.

  Args:
    folder: An empty folder.
    kinds: Keys of `disturbances.KINDS`.
    expected: Results of the same run, undisturbed.
    choice: Source of random moments, files and bits.

  Returns:
    The disturbances; problems at the end of the run belong to the last one.
  """
  needs_disk = any(disturbances.KINDS[kind].needs_disk for kind in kinds)
  with disturbances.scratch_disk(
    folder, wanted=needs_disk, like=expected.run.folder
  ):
    run = tiny_run.TinyRun(
      folder / "run",
      launch=expected.run.launch,
      num_steps=expected.run.num_steps,
      training=expected.run.training,
      store=expected.run.store,
      has_tiers=expected.run.has_tiers,
    )
    series = _Series(run=run, expected=expected, choice=choice)
    for kind in kinds:
      series.strike(kind)
    series.end()
  return series.struck


@dataclasses.dataclass(kw_only=True)
class _Series:
  """The disturbances of one run so far."""

  run: tiny_run.TinyRun
  expected: Expected
  choice: random.Random
  struck: list[Struck] = dataclasses.field(default_factory=list)
  newest: int | None = None
  # Seconds from the last disturbance to the end of its process, and whether
  # the number of devices is still the same.
  _ending: float = 0.0
  _is_exact: bool = True

  def strike(self, kind: str) -> None:
    """Starts a process and disturbs it."""
    run, before = self.run, self.newest
    disturbance = disturbances.KINDS[kind]
    begin = time.monotonic()
    process = run.start(disturbance.environ(self.choice))
    self._wait(process)
    struck_at = time.monotonic()
    try:
      ended = disturbance.strike(run, process, self.choice)
      problems = _output_problems(ended)
      problems += _start_problems(ended, before, run.num_steps)
      status, said = ended.status, _last_line(ended)
    except subprocess.TimeoutExpired:
      problems, status = [f"{kind}: the process did not end"], process.wait()
      said = ""
    self._record_recovery(begin)
    self._ending = time.monotonic() - struck_at
    self.newest = max(run.whole_steps(), default=None)
    self._is_exact &= kind != disturbances.OTHER_DEVICES
    # A checkpoint that was damaged on purpose may be lost.
    if not disturbance.damages:
      problems += _find_lost(before, self.newest)
    self.struck.append(
      Struck(
        kind=kind,
        moment=struck_at - begin,
        status=status,
        newest=self.newest,
        problems=tuple(problems),
        said=said,
      )
    )

  def end(self) -> None:
    """Runs to the end and compares the results."""
    begin = time.monotonic()
    try:
      ended = self.run.finish(self.run.start())
    except subprocess.TimeoutExpired:
      self._report(["the last process did not end"])
      return
    self._record_recovery(begin)
    problems = find_problems(
      ended,
      self.run,
      self.expected,
      newest=self.newest,
      exact=self._is_exact,
    )
    self._report(problems)

  def _record_recovery(self, begin: float) -> None:
    """Notes how long the run was without a step, if it has made one.

    The checks between two processes do not count.
    """
    at = self.run.first_step_at
    if self.struck and at is not None:
      self.struck[-1] = dataclasses.replace(
        self.struck[-1], recovery=self._ending + at - begin
      )

  def _report(self, problems: Sequence[str]) -> None:
    last = self.struck[-1]
    self.struck[-1] = dataclasses.replace(
      last, problems=(*last.problems, *problems)
    )

  def _wait(self, process: tiny_run.Process) -> None:
    """Waits for a random moment.

    Most moments count in steps: in seconds, all would be before the first
    checkpoint if the machine is busier than during the undisturbed run.
    """
    run, choice = self.run, self.choice
    if choice.random() < _ANY_MOMENT:
      seconds = choice.uniform(0.0, self.expected.seconds)
      run.wait(process, seconds=seconds)
      return
    step = choice.randrange((self.newest or 0) + 1, run.num_steps + 2)
    run.wait(
      process,
      seconds=tiny_run.LIMIT_SECONDS,
      until=lambda: run.last_begun_step() >= step,
    )
    run.wait(process, seconds=choice.uniform(0.0, _SPREAD_SECONDS))


def find_problems(
  ended: tiny_run.Ended,
  run: tiny_run.TinyRun,
  expected: Expected,
  *,
  newest: int | None,
  exact: bool,
) -> list[str]:
  """Compares a finished run with the undisturbed one.

  Args:
    ended: Its last process.
    run: Its folder.
    expected: The undisturbed run.
    newest: The newest checkpoint before the last process, or None.
    exact: Whether all bits must be equal; otherwise rounding may differ.

  Returns:
    A sentence for each difference.
  """
  if ended.status:
    return [f"the last process failed ({ended.status}): {_last_line(ended)}"]
  problems = _output_problems(ended)
  problems += _start_problems(ended, newest, run.num_steps)
  if not exact:
    return problems + _differences(run, expected.run)
  if run.digest() != expected.digest:
    problems.append("the arrays differ from those of the undisturbed run")
  if run.metrics() != expected.run.metrics():
    problems.append("the metrics differ from those of the undisturbed run")
  return problems


def _differences(run: tiny_run.TinyRun, other: tiny_run.TinyRun) -> list[str]:
  """Compares two runs up to rounding."""
  problems = []
  a, b = run.arrays(), other.arrays()
  if a.keys() != b.keys() or not all(_close(a[n], b[n]) for n in a):
    problems.append("the arrays differ by more than rounding")
  found, wanted = run.metrics(), other.metrics()
  if found.keys() != wanted.keys() or not all(
    found[key].keys() == wanted[key].keys()
    and all(_close(found[key][n], wanted[key][n]) for n in found[key])
    for key in found
  ):
    problems.append("the metrics differ by more than rounding")
  return problems


def _close(a: Any, b: Any) -> bool:
  if isinstance(a, str):
    return a == b
  if not np.issubdtype(np.asarray(a).dtype, np.number):
    return bool(np.array_equal(a, b))
  return np.allclose(
    np.asarray(a, np.float64), np.asarray(b, np.float64), _RTOL, _ATOL
  )


def _output_problems(ended: tiny_run.Ended) -> list[str]:
  if _FAILED not in ended.output:
    return []
  text = ended.output.partition(_FAILED)[2]
  lines = text.strip().splitlines()[:_MAX_TRACEBACK]
  return [f"a traceback was printed: {' / '.join(map(str.strip, lines))}"]


def _last_line(ended: tiny_run.Ended) -> str:
  lines = ended.output.strip().splitlines()
  return lines[-1][:200] if lines else ""


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


def _find_lost(before: int | None, after: int | None) -> list[str]:
  if (after or 0) < (before or 0):
    return [f"the checkpoint of step {before} was lost; the newest is {after}"]
  return []
