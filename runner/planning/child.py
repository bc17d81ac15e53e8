"""Starts the process that plans, and brings back what it found."""

from collections.abc import Sequence
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import result, topology
from paxon.runner.plan import target as targets

_WORKER = "paxon.runner.planning.worker"
_LAST_LINES = 15
_LINE_LENGTH = 500


def plan(
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  target: targets.Target,
  *,
  is_compiled: bool,
  time_limit: float,
) -> result.Plan:
  """Plans an experiment in a process of its own.

  Args:
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    target: What to plan for.
    is_compiled: Whether to compile, or to trace only.
    time_limit: Seconds after which the process is stopped.

  Raises:
    UserError: The experiment cannot run on this target, or took too long.
    RuntimeError: The process died; the message has its last lines.
  """
  request = {
    "experiment": experiment,
    "overrides": [{"path": o.path, "text": o.text} for o in overrides],
    "target": target.text,
    "compile": is_compiled,
  }
  with tempfile.TemporaryDirectory(prefix="paxon-plan-") as folder:
    request_file = pathlib.Path(folder, "request.json")
    result_file = pathlib.Path(folder, "result.json")
    request_file.write_text(json.dumps(request))
    # The worker reads from a pipe that ends when this process does, in
    # whatever way, and then ends too.
    read_end, write_end = os.pipe()
    try:
      done = subprocess.run(
        [sys.executable, "-m", _WORKER, str(request_file), str(result_file)],
        env=environment(target, is_compiled=is_compiled),
        stdin=read_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=time_limit,
        check=False,
      )
    except subprocess.TimeoutExpired as error:
      raise user_error.UserError(
        f"--target={target}: the compiler took more than {time_limit:.0f} s."
      ) from error
    finally:
      os.close(read_end)
      os.close(write_end)
    if done.returncode or not result_file.exists():
      last = done.stdout.splitlines()[-_LAST_LINES:]
      lines = "\n".join(line[:_LINE_LENGTH] for line in last)
      raise RuntimeError(
        f"Planning for {target} {_how_it_ended(done.returncode)}:\n{lines}"
      )
    text = result_file.read_text()
  refused = json.loads(text).get("error")
  if refused is not None:
    raise user_error.UserError(refused)
  (found,) = result.from_json(text)
  return found


def _how_it_ended(status: int) -> str:
  if status != -signal.SIGKILL:
    return f"ended with status {status}"
  return (
    f"was killed (status {status}); a compiler takes up to 3 GB, so the machine"
    " may have run out of memory"
  )


def environment(target: targets.Target, *, is_compiled: bool) -> dict[str, str]:
  """Returns the variables of the process: the machine's, and the target's."""
  variables = topology.environment(target)
  if not is_compiled:
    # CPU devices stand in for those of the target.
    variables["JAX_NUM_CPU_DEVICES"] = str(target.num_devices)
  flags = os.environ.get("XLA_FLAGS"), variables.get("XLA_FLAGS")
  if any(flags):
    # The program that runs gets the user's, so the plan does too.
    variables["XLA_FLAGS"] = " ".join(filter(None, flags))
  # The same modules as here, wherever they come from.
  variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
  variables["PYTHONSAFEPATH"] = "1"
  return {**os.environ, **variables}
