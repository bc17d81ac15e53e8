"""Compiles an exported function and writes its plan.

Arguments: the file with the pickled request, and the file for the plan.
"""

import functools
import json
import pathlib
import pickle
import re
import sys
from typing import Any, Final

import jax
from jax import export
from jax.sharding import NamedSharding

from paxon.runner import user_error
from paxon.runner.plan import (
  child_process,
  compiled_program,
  result,
  topology,
)
from paxon.runner.plan import target as targets
from paxon.runner.plan.functions import tracing

# Prefix of names that calling the exported function adds.
_CALL: Final = re.compile(r"jit\(_call\)/call_exported/")
_ARGUMENT: Final = re.compile(r'op_name="arrays\[(\d+)\]"')


def plan(request: tracing.Request) -> result.Plan:
  """Returns the plan of a function.

  Args:
    request: The traced function.

  Raises:
    UserError: The compiler does not know an option.
  """
  target = targets.parse(request.target)
  exported = export.deserialize(bytearray(request.program))
  try:
    mesh = request.mesh.make(topology.devices(target))
  except (ValueError, NotImplementedError, AssertionError, KeyError) as error:
    sizes = zip(request.mesh.names, request.mesh.sizes, strict=True)
    text = ", ".join(f"{axis}={size}" for axis, size in sizes)
    between = ", ".join(f"dcn.{axis}" for axis in request.mesh.between)
    raise user_error.UserError(
      f"mesh: {text} ({between or 'no axis'} between slices or hosts) cannot be"
      f" laid out on {target}: {' '.join(str(error).split())}"
    ) from error
  shapes = [
    jax.ShapeDtypeStruct(
      aval.shape,
      aval.dtype,
      sharding=NamedSharding(mesh, spec, memory_kind=memory),
    )
    for aval, spec, memory in zip(
      exported.in_avals, request.specs, request.memory_kinds, strict=True
    )
  ]

  def _call(*arrays: jax.Array) -> Any:
    return exported.call(*arrays)

  with jax.set_mesh(mesh):
    traced = jax.jit(_call, donate_argnums=request.donated).trace(*shapes)
  program = compiled_program.Program(target)
  compilation = compiled_program.Compilation(
    target=target,
    mesh=mesh,
    dcn=request.mesh.between,
    options=request.options,
    rename=functools.partial(_rename, _name_inputs(request)),
  )
  memory = program.compile(
    compilation, traced, request.get_memory(), request.flops
  )
  return request.make_plan(program, memory)


def _name_inputs(request: tracing.Request) -> tuple[str, ...]:
  """Returns a name for each array; readers look for those of a batch.

  A training step overwrites its state, so all other arguments are the batch.
  """
  donated = request.donated
  return tuple(
    label if i in donated or not donated else f"batch/{label}"
    for i, label in enumerate(request.labels)
  )


def _rename(labels: tuple[str, ...], text: str) -> str:
  """Returns a compiled text with the caller's names."""
  text = _CALL.sub("", text)
  return _ARGUMENT.sub(lambda match: f'op_name="{labels[int(match[1])]}"', text)


def main(arguments: list[str]) -> int:
  """Reads a request, and writes the plan or `{"error": text}`."""
  child_process.end_with_parent()
  request_file, result_file = map(pathlib.Path, arguments)
  request = pickle.loads(request_file.read_bytes())
  jax.config.update("jax_enable_x64", request.is_x64)
  try:
    text = result.to_json((plan(request),))
  except user_error.UserError as error:
    text = json.dumps({"error": str(error)})
  except jax.errors.JaxRuntimeError as error:
    first = str(error).splitlines()[0]
    message = (
      f"The compiler of {request.target} cannot compile {request.name}: {first}"
    )
    text = json.dumps({"error": message})
  result_file.write_text(text)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
