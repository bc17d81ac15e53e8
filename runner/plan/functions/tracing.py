"""Traces a function and exports it, to be compiled in another process.

Tracing runs here, with the modules and objects of the caller; what goes to the
compiling process is a program in StableHLO with symbolic mesh axes, so nothing
of the caller needs to be pickled or imported there.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import re
from typing import Any, Final

import jax
from jax import export
from jax.sharding import NamedSharding, PartitionSpec
import jax.tree_util
import numpy as np

from paxon.runner import user_error
from paxon.runner.plan import (
  compiled_program,
  compiler_options,
  plan_assembly,
  result,
)
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan.functions import arguments as arguments_lib
from paxon.runner.plan.functions import jit_settings, meshes

# Names in a note.
_MOST_NAMES: Final = 6
# In the error of a callback that is lowered for another platform.
_CALLS_THE_HOST: Final = (
  "is different from the lowering platform",
  "serialization of host_callbacks",
)
# In the error of `shard_map` with another mesh than that of its context.
_OTHER_CONTEXT: Final = "should match the mesh passed to shard_map"
# In the error of a function whose mesh has another size than the target.
_OTHER_MESH: Final = re.compile(
  r"does not match the device assignment size: (\d+)"
)
# Names the targets of custom calls that no version of XLA promises to keep.
_UNSTABLE: Final = re.compile(r"custom call target[^`']*[`']([^`']+)[`']")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A function to compile; pickled.

  Attributes:
    name: Of the function.
    target: As `targets.parse` takes it.
    mesh: Of the target's devices.
    program: The exported function of a flat list of arrays.
    specs: Sharding of each array.
    memory_kinds: Memory of each array; None for that of the device.
    labels: Path of each array in the arguments, such as `state['params']`.
    donated: Indices of donated arrays.
    inputs: Bytes of one device by argument.
    constants: Bytes of arrays that the function closes over.
    replicated: Arguments without a sharding.
    is_x64: Whether the caller's JAX has 64-bit numbers.
    flops: Of the traced function.
    batch_shape: Sequences and their length, for tokens per second.
    options: Compiler options.
  """

  name: str
  target: str
  mesh: meshes.MeshShape
  program: bytes
  specs: tuple[PartitionSpec, ...]
  memory_kinds: tuple[str | None, ...]
  labels: tuple[str, ...]
  donated: tuple[int, ...]
  inputs: Mapping[str, int]
  constants: int
  replicated: tuple[str, ...]
  is_x64: bool
  flops: flops_lib.Flops
  batch_shape: tuple[int, int] | None
  options: Mapping[str, Any]

  def get_memory(self) -> result.Memory:
    """Returns the memory as it follows from shapes."""
    kind = targets.parse(self.target).hardware
    constants = {"constants": self.constants} if self.constants else {}
    return result.Memory(
      inputs={**self.inputs, **constants},
      usable=kind.usable_bytes,
      capacity=kind.memory_bytes,
    )

  def make_plan(
    self,
    program: compiled_program.Program,
    memory: result.Memory,
    obstacles: Sequence[str] = (),
  ) -> result.Plan:
    """Returns the plan.

    Args:
      program: The compiled function; empty if it is not compiled.
      memory: Of a device.
      obstacles: Why it is not compiled, in sentences.
    """
    target = targets.parse(self.target)
    if self.replicated and target.num_devices > 1:
      obstacles = [
        *obstacles,
        f"Replicated, because no sharding is given: {_join(self.replicated)}.",
      ]
    if self.constants and memory.peak is not None:
      assert memory.arguments is not None
      memory = dataclasses.replace(
        memory,
        arguments=memory.arguments + self.constants,
        peak=memory.peak + self.constants,
      )
    options = compiler_options.resolve_for_hardware(
      self.options, target.hardware, num_devices=target.num_devices
    )
    found = plan_assembly.make_plan(
      program,
      self.flops,
      memory,
      target=target,
      name=self.name,
      mesh=dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
      batch_shape=self.batch_shape,
      obstacles=obstacles,
    )
    return dataclasses.replace(
      found, compiler_options=compiler_options.to_text(options)
    )


def trace(
  function: Callable[..., Any],
  arguments: Sequence[Any],
  *,
  target: targets.Target,
  mesh: meshes.Given,
  in_shardings: arguments_lib.Shardings,
  donate: int | str | Sequence[int | str],
  batch_shape: tuple[int, int] | None,
  options: Mapping[str, Any],
) -> Request:
  """Returns a traced function, for the process that compiles it.

  Args:
    function: The function, jitted or not.
    arguments: Its arguments.
    target: Target to compile for.
    mesh: Mesh of its devices; None takes that of the arguments' shardings.
    in_shardings: Prefix of the tree of arguments with a `PartitionSpec`, a
      `NamedSharding` or None for each.
    donate: Indices or names of arguments that the function overwrites.
    batch_shape: Sequences and their length.
    options: Compiler options.

  Raises:
    UserError: An argument, sharding, mesh or index is wrong, or the program
      cannot be exported.
  """
  name = arguments_lib.name_function(function)
  names = arguments_lib.name_arguments(function, len(arguments))
  inputs, flat = arguments_lib.flatten(function, arguments, names, in_shardings)
  flat.__name__ = name
  jitted = jax.jit(flat)
  mesh = _find_mesh(mesh, [each.sharding for each in inputs])
  # Before it is known how a jitted function shards its arguments.
  context = None if mesh is None else meshes.get_context(mesh, target)
  first = _trace(jitted, context, _place_given(inputs, context))
  own, donated = jit_settings.read_jit(first, len(inputs))
  shardings = [
    own[i] if each.sharding is None else each.sharding
    for i, each in enumerate(inputs)
  ]
  mesh = _find_mesh(mesh, shardings)
  context = meshes.get_context(mesh, target)
  placed = [
    _place(each, sharding, context)
    for each, sharding in zip(inputs, shardings, strict=True)
  ]
  traced = _trace(jitted, context, placed)
  donated |= arguments_lib.find_donated(donate, names, inputs)
  return Request(
    name=name,
    target=target.text,
    mesh=meshes.parse(mesh, target),
    program=_export(jitted, context, placed, target, name),
    specs=tuple(each.sharding.spec for each in placed),
    memory_kinds=tuple(each.sharding.memory_kind for each in placed),
    labels=tuple(each.label for each in inputs),
    donated=tuple(sorted(donated)),
    inputs=arguments_lib.sum_inputs(inputs, placed),
    constants=jit_settings.count_constants(traced.jaxpr),
    replicated=_list_replicated(inputs, shardings),
    is_x64=jax.dtypes.canonicalize_dtype(np.int64) == np.int64,
    flops=flops_lib.count(traced.jaxpr),
    batch_shape=batch_shape,
    options=options,
  )


def _place_given(
  inputs: Sequence[arguments_lib.Input], context: Any
) -> list[jax.ShapeDtypeStruct]:
  """Returns the shapes of inputs, with the shardings that are known so far."""
  return [
    each.shape
    if context is None or each.sharding is None
    else _place(each, each.sharding, context)
    for each in inputs
  ]


def _list_replicated(
  inputs: Sequence[arguments_lib.Input], shardings: Sequence[Any]
) -> tuple[str, ...]:
  """Returns the arguments without a sharding."""
  pairs = zip(inputs, shardings, strict=True)
  groups = (each.group for each, sharding in pairs if sharding is None)
  return tuple(dict.fromkeys(groups))


def _find_mesh(given: meshes.Given, shardings: Sequence[Any]) -> meshes.Given:
  """Returns the mesh that is given, or else that of the shardings."""
  if given is not None:
    return given
  found = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
  return found[0] if found else None


def _trace(
  function: Any,
  mesh: Any,
  shapes: Sequence[jax.ShapeDtypeStruct],
) -> jax.stages.Traced:
  with _use(mesh):
    try:
      return function.trace(*shapes)
    except ValueError as error:
      if _OTHER_CONTEXT not in str(error):
        raise
      raise user_error.UserError(
        f"mesh: {function.__name__} has a mesh that differs from this one, at"
        " least in its axis_types; leave mesh out, or pass the function's mesh:"
        f" {str(error).splitlines()[0]}"
      ) from error


def _use(mesh: Any) -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which a function finds the mesh."""
  if mesh is None:
    return contextlib.nullcontext()
  if isinstance(mesh, jax.sharding.Mesh):
    return jax.set_mesh(mesh)
  return jax.sharding.use_abstract_mesh(mesh)


def _place(
  given: arguments_lib.Input, sharding: Any, mesh: Any
) -> jax.ShapeDtypeStruct:
  """Returns the shape of an input on a mesh."""
  kind = None
  spec = PartitionSpec()
  if isinstance(sharding, PartitionSpec):
    spec = sharding
  elif isinstance(sharding, NamedSharding):
    spec, kind = sharding.spec, sharding.memory_kind
  try:
    if len(spec) > len(given.shape.shape):
      raise ValueError("the sharding has more dimensions than the array.")
    placed = NamedSharding(mesh, spec, memory_kind=kind)
    placed.shard_shape(given.shape.shape)
    return given.shape.update(sharding=placed)
  except Exception as error:  # JAX raises further types.
    sizes = ", ".join(f"{a}={n}" for a, n in mesh.shape.items())
    raise user_error.UserError(
      f"{given.label} with the shape {given.shape.shape} cannot be sharded by"
      f" {spec} over the mesh {sizes}: {str(error).splitlines()[0]}"
    ) from error


def _export(
  function: Any,
  mesh: Any,
  shapes: Sequence[jax.ShapeDtypeStruct],
  target: targets.Target,
  name: str,
) -> bytes:
  """Returns the exported function; kernels of any library are allowed."""
  allowed: dict[str, export.DisabledSafetyCheck] = {}
  platform = target.hardware.platform.value
  with _use(mesh):
    while True:
      try:
        exported = export.export(
          function,
          platforms=[platform],
          disabled_checks=tuple(allowed.values()),
        )(*shapes)
        break
      except (ValueError, NotImplementedError) as error:
        # The same versions of JAX and XLA compile it, so their promises of
        # compatibility do not matter.
        calls = set(_UNSTABLE.findall(str(error))) - set(allowed)
        if not calls:
          raise _explain(error, name, target) from error
        allowed |= {
          each: export.DisabledSafetyCheck.custom_call(each) for each in calls
        }
  if exported.nr_devices not in (1, target.num_devices):
    raise _describe_other_mesh(name, exported.nr_devices, target)
  return bytes(exported.serialize())


def _explain(
  error: Exception, name: str, target: targets.Target
) -> user_error.UserError:
  """Returns why a function cannot be exported."""
  if any(text in str(error) for text in _CALLS_THE_HOST):
    return user_error.UserError(
      f"{name} calls the host (jax.debug.print, io_callback, pure_callback or a"
      f" kernel of the CPU), which cannot be compiled for {target}: plan it"
      " without them."
    )
  if other := _OTHER_MESH.search(str(error)):
    return _describe_other_mesh(name, int(other[1]), target)
  return user_error.UserError(
    f"{name} cannot be exported for {target}: {error}"
  )


def _join(names: Sequence[str]) -> str:
  more = len(names) - _MOST_NAMES
  text = ", ".join(names[:_MOST_NAMES])
  return f"{text} and {more} more" if more > 0 else text


def _describe_other_mesh(
  name: str, num_devices: int, target: targets.Target
) -> user_error.UserError:
  return user_error.UserError(
    f"{name} has a mesh of {num_devices} devices, but {target} has"
    f" {target.num_devices}: build it from paxon.plan.devices('{target}'), or"
    f" from as many CPU devices (JAX_NUM_CPU_DEVICES={target.num_devices})."
  )
