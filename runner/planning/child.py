"""Plans an experiment in a child process with one compiler."""

from collections.abc import Sequence
import json
import pathlib
import sys

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import child_process, result
from paxon.runner.plan import target as targets
from paxon.runner.planning import measure

_WORKER = "paxon.runner.planning.child"


def plan(
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  target: targets.Target,
  *,
  is_compiled: bool,
  time_limit: float,
  with_other_programs: bool = False,
  decode_steps: Sequence[tuple[int, int]] = (),
) -> result.Plan:
  """Plans an experiment in a separate process.

  Args:
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    target: Target to plan for.
    is_compiled: Whether to compile, or to trace only.
    time_limit: Seconds after which the process is stopped.
    with_other_programs: Whether to compile evaluation and decoding too.
    decode_steps: Sequences and slots of decoding steps to plan.

  Raises:
    UserError: The experiment cannot run on this target, or took too long.
    RuntimeError: The process died; the message has its last lines.
  """
  request = {
    "experiment": experiment,
    "overrides": [{"path": o.path, "text": o.text} for o in overrides],
    "target": target.text,
    "compile": is_compiled,
    "other_programs": with_other_programs,
    "decode_steps": decode_steps,
  }
  text = child_process.run_worker(
    _WORKER,
    json.dumps(request).encode(),
    target,
    is_compiled=is_compiled,
    time_limit=time_limit,
  )
  error = json.loads(text).get("error")
  if error is not None:
    raise user_error.UserError(error)
  (found,) = result.from_json(text)
  return found


def main(arguments: list[str]) -> int:
  """Reads a request (JSON), plans, and writes the plan or `{"error": text}`."""
  child_process.end_with_parent()
  request_file, result_file = map(pathlib.Path, arguments)
  request = json.loads(request_file.read_text())
  overrides = [overrides_lib.Override(**o) for o in request["overrides"]]
  resolved = None
  try:
    name = request["experiment"]
    resolved = resolving.resolve(name, overrides)
    job = served = resolving.build(resolved.config)
    if job.weights is not None:
      # Float parameters are trained; quantized ones are made of them.
      trained = overrides_lib.Override("quantization", "None")
      resolved = resolving.resolve(name, [*overrides, trained])
      job = resolving.build(resolved.config)
    plan = measure.measure(
      job,
      targets.parse(request["target"]),
      experiment=name,
      overrides=[f"--fdl.{o.path}={o.text}" for o in overrides],
      is_compiled=request["compile"],
      with_other_programs=request["other_programs"],
      decode_steps=[(b, n) for b, n in request["decode_steps"]],
      served=None if served is job else served,
    )
    text = result.to_json((plan,))
  except Exception as error:
    message = str(error) if isinstance(error, user_error.UserError) else None
    if message is None and resolved is not None:
      message = resolving.explain_error(error, resolved.config)
    if message is None:
      raise
    text = json.dumps({"error": message})
  result_file.write_text(text)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
