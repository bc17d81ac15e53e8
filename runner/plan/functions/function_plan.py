"""Plans of functions: any that JAX can trace, for hardware you don't have.

import paxon

plan = paxon.plan(
train_step, state, batch, target="h200:1x8", mesh={"fsdp": 8}, donate=0
)
print(plan)
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os
import pickle
from typing import Any, Final

import jax

from paxon.runner import user_error
from paxon.runner.plan import (
  child_process,
  compiled_program,
  report,
  result,
  topology,
)
from paxon.runner.plan import target as targets
from paxon.runner.plan.functions import arguments as arguments_lib
from paxon.runner.plan.functions import meshes, tracing

_WORKER: Final = "paxon.runner.plan.functions.worker"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionPlan(result.Plan):
  """A plan that `print` shows as a report."""

  def __str__(self) -> str:
    return report.to_text(self)


def plan(
  function: Callable[..., Any],
  *arguments: Any,
  target: str,
  mesh: meshes.Given = None,
  in_shardings: arguments_lib.Shardings = None,
  donate: int | str | Sequence[int | str] = (),
  batch_shape: tuple[int, int] | None = None,
  compiler_options: Mapping[str, Any] | None = None,
  time_limit: float = 3600.0,
) -> FunctionPlan:
  """Plans a function for hardware you don't have.

  The function is traced here and compiled for the target in another process.
  Nothing is computed. Leaves that are not arrays, such as functions in a tree
  of equinox or Python numbers, are constants. Modules of flax.nnx may
  be changed in place.

  Args:
    function: Jitted or not. Shardings and donated arguments of `jax.jit` are
      used unless given here.
    *arguments: Trees of arrays or `jax.ShapeDtypeStruct`s. The sharding of an
      array is kept if it is a `NamedSharding`.
    target: Hardware and its size, such as `h200:1x8`, `v5e:4x4` or `cpu:8`.
    mesh: Size of each axis, such as `{"data": 2, "fsdp": 4}`, with `dcn.NAME`
      for axes between slices or hosts, and -1 for all remaining devices; or a
      mesh of JAX, with devices of `devices(target)` or as many CPU devices. The
      function is traced in the context of the mesh. None takes the mesh of the
      arguments.
    in_shardings: Prefix of the tree of arguments, with a `PartitionSpec`, a
      `NamedSharding` or None for each. Arguments without a sharding are
      replicated.
    donate: Indices or names of arguments whose memory the results may use.
    batch_shape: Sequences of a step and their length, for tokens per second.
    compiler_options: Options of XLA.
    time_limit: Seconds after which the compiler is stopped.

  Returns:
    The plan; `print` gives the report. Without the target's compiler it has
    only values computed from shapes, and a note.

  Raises:
    UserError: The target, mesh, shardings or arguments are wrong, or the
      program cannot be exported.
    RuntimeError: The compiling process died.
  """
  to = _parse(target)
  request = tracing.trace(
    function,
    arguments,
    target=to,
    mesh=mesh,
    in_shardings=in_shardings,
    donate=donate,
    batch_shape=batch_shape,
    options=dict(compiler_options or {}),
  )
  if missing := topology.missing(to):
    obstacle = f"Nothing was compiled. {_describe_missing(to, missing)}."
    empty = compiled_program.Program(to)
    return _to_function_plan(
      request.make_plan(empty, request.get_memory(), [obstacle])
    )
  text = child_process.run_worker(
    _WORKER,
    pickle.dumps(request),
    to,
    is_compiled=True,
    time_limit=time_limit,
  )
  error = json.loads(text).get("error")
  if error is not None:
    raise user_error.UserError(error)
  (found,) = result.from_json(text)
  return _to_function_plan(found)


def devices(target: str) -> list[jax.Device]:
  """Returns devices to build a mesh of; programs cannot run on them.

  Args:
    target: As `plan` takes it.

  Raises:
    UserError: The target is wrong, its compiler is not installed, or JAX has
      started without what the compiler needs.
  """
  to = _parse(target)
  if missing := topology.missing(to):
    raise user_error.UserError(_describe_missing(to, missing))
  for name, value in topology.environment(to).items():
    os.environ.setdefault(name, value)
  try:
    return topology.devices(to)
  except (NotImplementedError, ValueError, RuntimeError) as error:
    raise user_error.UserError(
      f"Cannot create devices for {to}: {error}. JAX has started without the"
      " variables that the compiler needs; call paxon.plan.devices before any"
      " other function of JAX."
    ) from error


def _to_function_plan(found: result.Plan) -> FunctionPlan:
  return FunctionPlan(**vars(found))


def _parse(target: str) -> targets.Target:
  try:
    return targets.parse(target)
  except ValueError as error:
    raise user_error.UserError(
      str(error).replace("--target=", "target=")
    ) from error


def _describe_missing(target: targets.Target, missing: Sequence[str]) -> str:
  if target.hardware.platform.needs_device:
    return f"Programs for {target} can be compiled on {missing[0]} only"
  return (
    f"The compiler for {target} needs {', '.join(missing)}: pip install"
    f" {' '.join(missing)}"
  )
