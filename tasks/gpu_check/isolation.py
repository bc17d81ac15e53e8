"""Checks in child processes with time limits, and their results as JSON.

A check that fails, hangs or crashes never stops the next one: the parent ends
the process, and a new one continues with the checks that are left. Results are
written after every check, so what is known survives the machine.

Checks with the same `process` share one process, which saves the time to start
a device, and functions with a cache may share what they compiled. The peak
memory that devices report is that of a process.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import enum
import json
import math
import multiprocessing
from multiprocessing import connection
import os
import pathlib
import signal
import time
import traceback
from typing import Any, Final

from paxon.runner import user_error

# A device is started within the first check of a process.
_STARTUP: Final = 60.0
# With less time left than this a check is not started.
_LEAST: Final = 5.0
_GRACE: Final = 5.0
# Multiplies the limits of a dry run.
_DRY_FACTOR: Final = 5
_ERROR_LENGTH: Final = 2000

# Values that JSON has.
Facts = Mapping[str, Any]


class CheckError(Exception):
  """A check that failed; `facts` has what it found."""

  def __init__(self, message: str, facts: Facts) -> None:
    super().__init__(message)
    self.facts = facts


class Status(enum.Enum):
  """How a check ended."""

  PASSED = "passed"
  FAILED = "failed"
  CRASHED = "crashed"
  TIMED_OUT = "timed out"
  SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings of all checks.

  Attributes:
    folder: Where checks write files.
    is_dry: Whether sizes are those of a toy, for CPUs.
  """

  folder: pathlib.Path
  is_dry: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """A check.

  Attributes:
    name: Unique name; the part before a dot is its topic.
    process: Name of the process that runs it; checks of one process follow each
      other.
    limit: Seconds, without the start of the process.
    run: Returns its findings; a function that can be pickled.
  """

  name: str
  process: str
  limit: float
  run: Callable[[Settings], Facts]


class Results:
  """The results of checks, in a JSON file that is written after each."""

  def __init__(self, path: pathlib.Path, header: Facts) -> None:
    """Writes the header.

    Args:
      path: The file.
      header: Facts that are known before the first check.
    """
    self._path = path
    self._begin = time.monotonic()
    self.header = {**header, "started": _now()}
    self.checks: dict[str, dict[str, Any]] = {}
    self.summary: dict[str, Any] = {}
    self._write()

  def add(
    self, name: str, status: Status, *, seconds: float, facts: Facts
  ) -> None:
    """Adds the result of a check, writes the file and prints a line."""
    self.checks[name] = {
      "status": status.value,
      "seconds": round(seconds, 2),
      **_to_json(facts),
    }
    self._write()
    print(_format_line(name, self.checks[name]), flush=True)

  def set_summary(self, summary: Facts) -> None:
    """Sets what several checks give together, and writes the file."""
    self.summary = dict(summary)
    self._write()

  def measure_elapsed(self) -> float:
    """Returns the seconds since the start."""
    return time.monotonic() - self._begin

  def count(self, *statuses: Status) -> int:
    """Returns how many checks ended so."""
    wanted = {status.value for status in statuses}
    return sum(one["status"] in wanted for one in self.checks.values())

  def _write(self) -> None:
    text = json.dumps(
      {
        **self.header,
        "seconds": round(self.measure_elapsed(), 1),
        **({"summary": self.summary} if self.summary else {}),
        "checks": self.checks,
      },
      indent=1,
      allow_nan=False,
    )
    new = self._path.with_suffix(".new")
    new.write_text(text + "\n")
    os.replace(new, self._path)


def run(
  checks: Sequence[Check],
  settings: Settings,
  results: Results,
  *,
  total: float,
) -> None:
  """Runs checks in order, each process in turn, until the time is over.

  Args:
    checks: Checks to run.
    settings: Of all checks.
    results: Receives what they find.
    total: Seconds for all of them.
  """
  left = list(checks)
  while left:
    process = left[0].process
    mine = [check for check in left if check.process == process]
    if total - results.measure_elapsed() < _LEAST:
      for check in left:
        facts = {"reason": f"no time was left of {total:.0f} s"}
        results.add(check.name, Status.SKIPPED, seconds=0.0, facts=facts)
      return
    done = _run_process(mine, settings, results, total=total)
    left = [check for check in left if check.name not in done]


def _run_process(
  checks: Sequence[Check],
  settings: Settings,
  results: Results,
  *,
  total: float,
) -> set[str]:
  """Runs checks until one ends its process; returns the names of those run."""
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  child = context.Process(target=_serve, args=(sender, checks, settings))
  child.start()
  sender.close()
  done: set[str] = set()
  try:
    for number, check in enumerate(checks):
      limit = check.limit + (0 if number else _STARTUP)
      # A dry run is a test, whose machine may be busy.
      limit *= _DRY_FACTOR if settings.is_dry else 1
      limit = min(limit, total - results.measure_elapsed())
      if limit < _LEAST:
        break
      begin = time.monotonic()
      status, facts = _receive(receiver, child, limit)
      seconds = time.monotonic() - begin
      results.add(check.name, status, seconds=seconds, facts=facts)
      done.add(check.name)
      if status in (Status.TIMED_OUT, Status.CRASHED):
        break
  finally:
    # One that has sent everything ends by itself.
    _end(child, grace=_GRACE if len(done) == len(checks) else 0.0)
    receiver.close()
  return done


def _receive(
  receiver: connection.Connection, child: Any, limit: float
) -> tuple[Status, Facts]:
  """Waits for the next result."""
  try:
    if not receiver.poll(limit):
      return Status.TIMED_OUT, {"error": f"took more than {limit:.0f} s"}
    name, facts = receiver.recv()
    return Status(name), facts
  except (EOFError, OSError):
    child.join(5)
    return Status.CRASHED, {"error": f"exit status {child.exitcode}"}


def _end(child: Any, *, grace: float) -> None:
  """Ends a process and those that it started, after some seconds of grace."""
  child.join(grace)
  # Its group, which has the compilers that it started.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    if os.getpgid(child.pid) == child.pid:
      os.killpg(child.pid, signal.SIGKILL)
  if child.is_alive():
    child.kill()
  child.join()
  child.close()


def _serve(
  sender: connection.Connection, checks: Sequence[Check], settings: Settings
) -> None:
  """Runs checks in a child process and sends their results."""
  os.setsid()
  for check in checks:
    try:
      status, facts = Status.PASSED, check.run(settings)
    except CheckError as error:
      status, facts = Status.FAILED, {"error": str(error), **error.facts}
    except Exception as error:
      text = traceback.format_exc()
      status = Status.FAILED
      facts = {
        "error": user_error.one_line(error)[:_ERROR_LENGTH],
        "traceback": text[-_ERROR_LENGTH:],
      }
    sender.send((status.value, _to_json(facts)))
  sender.close()


def _to_json(value: Any) -> Any:
  """Returns a value with numbers that JSON has; NaN becomes text."""
  if isinstance(value, Mapping):
    return {str(name): _to_json(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_to_json(x) for x in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def _format_line(name: str, result: Facts) -> str:
  shown = [
    f"{key} {_short(value)}"
    for key, value in result.items()
    if key not in ("status", "seconds", "traceback")
    and isinstance(value, int | float | str | bool)
  ]
  text = f"{name:24} {result['status']:9} {result['seconds']:6.1f} s"
  return f"{text}  {', '.join(shown)}".rstrip()[:400]


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def _now() -> str:
  return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
