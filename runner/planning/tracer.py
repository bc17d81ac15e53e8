"""A process that traces an experiment with one change after the other."""

from collections.abc import Sequence
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
from typing import Final

from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import result
from paxon.runner.plan import target as targets
from paxon.runner.planning import child

_WORKER: Final = "paxon.runner.planning.trace_worker"


class TraceError(RuntimeError):
  """The process has ended, or did not answer."""


class Tracer:
  """Plans by analytical estimate, without a compiler, in one process.

  A context manager: the process ends with it.
  """

  def __init__(
    self,
    experiment: str,
    overrides: Sequence[overrides_lib.Override],
    target: targets.Target,
    *,
    time_limit: float,
  ) -> None:
    """Starts the process.

    Args:
      experiment: As `--exp` takes it.
      overrides: Assignments of the command line.
      target: What to plan for; CPU devices stand in for its.
      time_limit: Seconds to wait for one trace.
    """
    self._time_limit = time_limit
    self._folder = tempfile.TemporaryDirectory(prefix="paxon-trace-")
    request = pathlib.Path(self._folder.name, "request.json")
    request.write_text(
      json.dumps(
        {
          "experiment": experiment,
          "overrides": _to_json(overrides),
          "target": target.text,
        }
      )
    )
    self._log = pathlib.Path(self._folder.name, "log.txt")
    read_end, write_end = os.pipe()
    with self._log.open("w") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-m", _WORKER, str(request), str(write_end)],
        env=child.environment(target, is_compiled=False),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(write_end,),
        text=True,
      )
    os.close(write_end)
    self._answers = read_end
    self._rest = b""

  def __enter__(self) -> "Tracer":
    """Returns itself."""
    return self

  def __exit__(self, *error: object) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.communicate()
    os.close(self._answers)
    self._folder.cleanup()

  def plan(
    self, more: Sequence[overrides_lib.Override]
  ) -> result.Plan | result.Failure:
    """Returns the plan with more overrides, or why there is none.

    Args:
      more: Added to those of the command line.

    Raises:
      TraceError: The process has ended, or takes too long.
    """
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(json.dumps(_to_json(more)) + "\n")
      self._process.stdin.flush()
    except BrokenPipeError:
      raise self._ended() from None
    answer = json.loads(self._line())
    if "error" in answer:
      return result.Failure(target="", message=answer["error"])
    (found,) = result.from_json(answer["plan"])
    return found

  def _line(self) -> bytes:
    while b"\n" not in self._rest:
      ready, _, _ = select.select([self._answers], [], [], self._time_limit)
      if not ready:
        raise TraceError(f"A trace took more than {self._time_limit:.0f} s.")
      more = os.read(self._answers, 1 << 16)
      if not more:
        raise self._ended()
      self._rest += more
    line, _, self._rest = self._rest.partition(b"\n")
    return line

  def _ended(self) -> TraceError:
    status = self._process.wait()
    last = self._log.read_text(errors="replace").splitlines()[-10:]
    lines = "\n".join(line[:300] for line in last)
    return TraceError(f"Tracing ended with status {status}:\n{lines}")


def _to_json(
  overrides: Sequence[overrides_lib.Override],
) -> list[dict[str, str]]:
  return [{"path": o.path, "text": o.text} for o in overrides]
