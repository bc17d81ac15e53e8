"""Quantized weights of a run for evaluation and decoding.

Training makes float parameters. With `quantization="int8:convert"` an
evaluation converts them to int8 weights, in the run directory; with
`"int8:serve"` evaluation and decoding read those, and the float parameters that
they replace are neither stored nor in memory.
"""

from collections.abc import Mapping
import os
from typing import Any, Final

from etils import epath
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.quantization import recipes, served_einsum, stored_kernels
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.sharding import variables

# Folder of a run directory.
FOLDER: Final = "serving"
_MODES = {
  recipes.Mode.SERVE: ("eval", "decode", "infer", "serve", "plan"),
  recipes.Mode.CONVERT: ("eval",),
}

Absent = Mapping[str, variables.VariableSpec]


def get_mode(job: job_lib.Job) -> recipes.Mode:
  """Returns whether a job trains, converts weights, or serves them."""
  if job.weights is None:
    return recipes.Mode.TRAIN
  return recipes.parse(job.weights).mode


def check_mode(job: job_lib.Job, mode: str) -> None:
  """Raises UserError if a program cannot use the job's weights."""
  allowed = _MODES.get(get_mode(job))
  if allowed is None or mode in allowed or mode == "inspect_input":
    return
  assert job.weights is not None
  name = recipes.parse(job.weights).name
  raise user_error.UserError(
    f"quantization={job.weights!r} requires --mode={' or '.join(allowed)} (got"
    f" --mode={mode}); train with {name!r} or without quantization."
  )


def folder(job: job_lib.Job, run_dir: epath.Path) -> epath.Path:
  """Returns the directory of the quantized weights of a run."""
  assert job.weights is not None
  name = recipes.parse(job.weights).name
  return run_dir / FOLDER / name / run_dirs.CHECKPOINTS


def checkpoints(job: job_lib.Job, run_dir: epath.Path) -> epath.Path:
  """Returns the directory of the checkpoints that a program reads.

  Raises:
    UserError: The job serves quantized weights, and there are none.
  """
  if get_mode(job) is not recipes.Mode.SERVE:
    return run_dir / run_dirs.CHECKPOINTS
  path = folder(job, run_dir)
  if not path.exists():
    assert job.weights is not None
    name = recipes.parse(job.weights).name
    if not (run_dir / run_dirs.CHECKPOINTS).exists():
      raise user_error.UserError(
        f"{os.fspath(run_dir)} has neither checkpoints nor {name} weights;"
        " train first, or give the --job_log_dir of a run that has them."
      )
    raise user_error.UserError(
      f"{os.fspath(run_dir)} has float checkpoints but no {name} weights; make"
      f" them with --mode=eval --fdl.quantization={name}:convert."
    )
  return path


def split(job: job_lib.Job, specs: Any) -> tuple[Any, Absent]:
  """Splits a model's variables into those of the state and absent ones.

  A conversion starts from the float parameters alone. The parameters that
  quantized weights replace are absent in serving, and those of stored kernels
  (`quantization.stored_kernels`) everywhere.

  Returns:
    Specs of the state's variables, and of the absent parameters by name.
  """
  find = stored_kernels.find_parameter
  match get_mode(job):
    case recipes.Mode.CONVERT:
      kept = {k: v for k, v in specs.items() if k != served_einsum.COLLECTION}
      return kept, {}
    case recipes.Mode.SERVE:
      find = served_einsum.stored_parameter
  named = {spec.name: spec for spec in jax.tree.leaves(specs)}
  absent = {name: named[name] for name in map(find, named) if name is not None}
  if not absent:
    return specs, {}
  leaves: dict[Any, Any] = traverse_util.flatten_dict(specs)
  kept = {k: spec for k, spec in leaves.items() if spec.name not in absent}
  return traverse_util.unflatten_dict(kept), absent


def complete(values: Any, absent: Absent) -> Any:
  """Returns variables with NaN for the absent parameters.

  Nothing should read them, and then the compiler removes them; if something
  does, such as a second matmul with the same kernel, the result is NaN and not
  silently wrong.
  """
  if not absent:
    return values
  leaves: dict[Any, Any] = traverse_util.flatten_dict(values)
  for name, spec in absent.items():
    leaves[tuple(name.split("/"))] = jnp.full(spec.shape, jnp.nan, spec.dtype)
  return traverse_util.unflatten_dict(leaves)
