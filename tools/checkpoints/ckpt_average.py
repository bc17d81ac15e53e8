"""`tools/ckpt average`: the average of several checkpoints of a run.

The new run directory has one checkpoint, whose step is that of the newest of
the averaged ones. Floating-point variables of the model, and the running
average of parameters if the run has one, are means in float64, in their stored
dtypes. Integers, the optimizer's state and the position in the data are those
of the newest. Arrays are read one after the other.
"""

from collections.abc import Sequence
import functools
import os

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner import user_error
from paxon.runner.checkpoints import (
  checkpointer,
  lazy_array,
  stored_checkpoint,
)
from paxon.sharding import variables
from paxon.tools import command_line

_CHECKPOINTS = "checkpoints"
# They describe the trained run, not its average.
_NOT_COPIED = (
  "finished.json",
  "goodput.jsonl",
  "metrics.jsonl",
  "report.html",
  "samples.jsonl",
)


def main(argv: list[str]) -> int:
  """Runs the command and returns its exit status."""
  parser = command_line.Parser(
    "average", "Writes the average of checkpoints into a new run directory."
  )
  parser.add_argument("run", metavar="RUN", help="run directory")
  parser.add_argument("to", metavar="NEW_RUN", help="directory to write")
  chosen = parser.add_mutually_exclusive_group(required=True)
  chosen.add_argument("--last", metavar="N", help="the newest N checkpoints")
  chosen.add_argument(
    "--steps", metavar="STEPS", help="steps separated by commas, as 100,200"
  )
  arguments = parser.parse_args(argv)
  path, step = command_line.parse_place(arguments.run)
  if step is not None:
    raise user_error.UserError(
      f"average uses several checkpoints; remove @{step}, or use --steps."
    )
  to, step = command_line.parse_place(arguments.to)
  if step is not None or (to.exists() and any(to.iterdir())):
    raise user_error.UserError(
      f"NEW_RUN must be a directory that does not exist or is empty, got"
      f" {arguments.to}."
    )
  folder, found = stored_checkpoint.find_steps(path)
  steps = _choose(found, arguments.last, arguments.steps, folder)
  average(folder, steps, to)
  print(
    f"average of the steps {', '.join(map(str, steps))}: {os.fspath(to)},"
    f" step {steps[-1]}"
  )
  return 0


def average(folder: epath.Path, steps: Sequence[int], to: epath.Path) -> None:
  """Writes the average of checkpoints.

  Args:
    folder: Checkpoints of a run.
    steps: Steps in ascending order.
    to: Run directory to write.

  Raises:
    user_error.UserError: Arrays of the checkpoints differ in shape or dtype,
      or a checkpoint is damaged.
  """
  found = [stored_checkpoint.read_metadata(folder, step) for step in steps]
  newest = found[-1]
  for other in found[:-1]:
    for name, array in newest.arrays.items():
      if other.arrays.get(name) != array:
        raise user_error.UserError(
          f"The checkpoints {os.fspath(other.path)} and"
          f" {os.fspath(newest.path)} have different arrays {name}; average"
          " checkpoints of one model."
        )
  specs = [
    variables.VariableSpec(name, a.shape, jnp.dtype(a.dtype), a.axes)
    for name, a in newest.arrays.items()
  ]
  with checkpointer.Checkpointer(folder, read_only=True) as source:
    for step in steps[:-1]:
      source.verify(step)
    # Verifies all files; orbax reads no empty tree.
    small = min(specs, key=lambda spec: newest.arrays[spec.name].size)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    data = source.restore(steps[-1], specs=[small], shardings=[place]).data
  tree = [
    lazy_array.LazyArray(
      shape=spec.shape,
      dtype=spec.dtype,
      read=functools.partial(_read_mean, found, spec.name),
    )
    for spec in specs
  ]
  to.mkdir(parents=True, exist_ok=True)
  for file in newest.run_path.iterdir():
    if file.is_file() and file.name not in _NOT_COPIED:
      file.copy(to / file.name)
  with checkpointer.Checkpointer(to / _CHECKPOINTS, lazy=True) as target:
    target.save(steps[-1], tree, specs=specs, data=data)
    target.wait()


def _choose(
  found: Sequence[int],
  last: str | None,
  steps: str | None,
  folder: epath.Path,
) -> list[int]:
  """Returns the steps to average, ascending.

  Raises:
    user_error.UserError: A flag has a wrong value, or a step does not exist.
  """
  kept = f"{os.fspath(folder)} has the steps {', '.join(map(str, found))}"
  if last is not None:
    if not last.isdecimal() or not 2 <= int(last) <= len(found):
      raise user_error.UserError(
        "--last must be a number from 2 to the number of checkpoints,"
        f" {len(found)}, got {last!r}; {kept}."
      )
    return sorted(found)[-int(last) :]
  parts = [part.strip() for part in (steps or "").split(",")]
  if not all(part.isdecimal() for part in parts):
    raise user_error.UserError(
      f"--steps must be numbers separated by commas, got {steps!r}."
    )
  chosen = sorted(map(int, parts))
  missing = [step for step in chosen if step not in found]
  if missing:
    raise user_error.UserError(
      f"--steps: there is no checkpoint of step {missing[0]}; {kept}."
    )
  if len(set(chosen)) != len(chosen) or len(chosen) < 2:
    raise user_error.UserError(
      f"--steps must be at least two different steps, got {steps!r}."
    )
  return chosen


def _read_mean(
  checkpoints: Sequence[stored_checkpoint.StoredCheckpoint], name: str
) -> np.ndarray:
  """Reads one array of each checkpoint and returns their mean."""
  stored = checkpoints[-1].arrays[name]
  is_averaged = jnp.issubdtype(jnp.dtype(stored.dtype), jnp.floating) and (
    stored_checkpoint.is_variable(name) or name.startswith("average/")
  )
  if not is_averaged:
    return stored_checkpoint.read_numpy(checkpoints[-1], [name])[name]
  total = np.zeros(stored.shape, np.float64)
  for checkpoint in checkpoints:
    total += stored_checkpoint.read_numpy(checkpoint, [name])[name]
  return np.asarray(total / len(checkpoints)).astype(jnp.dtype(stored.dtype))
