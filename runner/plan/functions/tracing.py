"""Traces a function and exports it, to be compiled in another process.

Tracing runs here, with the modules and objects of the caller; what goes to the
compiling process is a program in StableHLO with symbolic mesh axes, so nothing
of the caller needs to be pickled or imported there.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import inspect
import math
import re
import sys
from typing import Any, Final, TypeAlias

import jax
from jax import export
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec
import jax.tree_util

from paxon.runner import user_error
from paxon.runner.plan import (
  compiled_program,
  compiler_options,
  plan_assembly,
  result,
)
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import target as targets
from paxon.runner.plan.functions import meshes

# A prefix of the tree of arguments.
Shardings: TypeAlias = Any
# In the error of a callback that is lowered for another platform.
_OTHER_BACKEND: Final = "is different from the lowering platform"
# In the error of `shard_map` with another mesh than that of its context.
_OTHER_CONTEXT: Final = "should match the mesh passed to shard_map"
# In the error of a function whose mesh has another size than the target.
_OTHER_MESH: Final = re.compile(
  r"does not match the device assignment size: (\d+)"
)
# Arguments with at most this many parts have a size for each.
_MAX_PARTS: Final = 8
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
  flops: flops_lib.Flops
  batch_shape: tuple[int, int] | None
  options: Mapping[str, Any]

  def get_memory(self) -> result.Memory:
    """Returns the memory as it follows from shapes."""
    kind = targets.parse(self.target).hardware
    return result.Memory(
      inputs=self.inputs,
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


@dataclasses.dataclass(frozen=True)
class _Input:
  """An array among the arguments.

  Attributes:
    argument: Index of the argument.
    label: Path in the arguments.
    group: Argument, or the part of it, whose bytes are summed.
    shape: Shape and dtype.
    sharding: As given; None if the caller gives none.
  """

  argument: int
  label: str
  group: str
  shape: jax.ShapeDtypeStruct
  sharding: Any


def trace(
  function: Callable[..., Any],
  arguments: Sequence[Any],
  *,
  target: targets.Target,
  mesh: meshes.Given,
  in_shardings: Shardings,
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
  name = getattr(function, "__name__", type(function).__name__)
  names = _name_arguments(function, len(arguments))
  inputs, flat = _flatten(function, arguments, names, in_shardings)
  flat.__name__ = name
  jitted = jax.jit(flat)
  mesh = _find_mesh(mesh, [each.sharding for each in inputs])
  # Before it is known how a jitted function shards its arguments.
  context = None if mesh is None else meshes.get_context(mesh, target)
  first = _trace(jitted, context, [each.shape for each in inputs])
  own, donated = _read_jit(first, len(inputs))
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
  donated |= _find_donated(donate, names, inputs)
  return Request(
    name=name,
    target=target.text,
    mesh=meshes.parse(mesh, target),
    program=_export(jitted, context, placed, target, name),
    specs=tuple(each.sharding.spec for each in placed),
    memory_kinds=tuple(each.sharding.memory_kind for each in placed),
    labels=tuple(each.label for each in inputs),
    donated=tuple(sorted(donated)),
    inputs=_sum_inputs(inputs, placed),
    flops=flops_lib.count(traced.jaxpr),
    batch_shape=batch_shape,
    options=options,
  )


def _flatten(
  function: Callable[..., Any],
  arguments: Sequence[Any],
  names: Sequence[str],
  in_shardings: Shardings,
) -> tuple[list[_Input], Callable[..., tuple[Any, ...]]]:
  """Returns the arrays among the arguments, and the function of them."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(tuple(arguments))
  inputs, places = _find_inputs(leaves, names, arguments, in_shardings)
  values = [value for _, value in leaves]

  def flat(*arrays: jax.Array) -> tuple[Any, ...]:
    merged = list(values)
    for place, array in zip(places, arrays, strict=True):
      merged[place] = array
    rebuilt = jax.tree.unflatten(tree, merged)
    out = function(*rebuilt)
    # Modules of nnx are changed in place; without them as a result, the
    # compiler would remove the update.
    changed = (out, _find_modules(rebuilt))
    return tuple(leaf for leaf in jax.tree.leaves(changed) if _is_array(leaf))

  return inputs, flat


def _is_array(leaf: Any) -> bool:
  return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _name_arguments(function: Callable[..., Any], count: int) -> list[str]:
  """Returns the names of the positional arguments."""
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    parameters = ()
  kinds = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
  )
  names = [p.name for p in parameters if p.kind in kinds][:count]
  return [*names, *(f"arguments[{i}]" for i in range(len(names), count))]


def _find_modules(arguments: Sequence[Any]) -> list[Any]:
  """Returns the arguments that a function may change in place."""
  nnx = sys.modules.get("flax.nnx")
  if nnx is None:
    return []
  return [each for each in arguments if isinstance(each, nnx.Pytree)]


def _find_inputs(
  leaves: Sequence[tuple[jax.tree_util.KeyPath, Any]],
  names: Sequence[str],
  arguments: Sequence[Any],
  in_shardings: Shardings,
) -> tuple[list[_Input], list[int]]:
  """Returns the arrays among the leaves of the arguments, and their indices."""
  given = _spread(in_shardings, arguments, names)
  parts = [_count_parts(each) for each in arguments]
  inputs, places = [], []
  for place, (path, value) in enumerate(leaves):
    if not _is_array(value):
      continue
    argument = path[0].idx
    inner = path[1:]
    name = names[argument]
    is_split = 1 < parts[argument] <= _MAX_PARTS
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
    sharding = given[place]
    if sharding is None:
      own = getattr(value, "sharding", None)
      sharding = own if isinstance(own, NamedSharding) else None
    group = name + jax.tree_util.keystr(inner[:1]) if is_split else name
    label = name + jax.tree_util.keystr(inner)
    inputs.append(_Input(argument, label, group, shape, sharding))
    places.append(place)
  if not inputs:
    raise user_error.UserError(
      "The arguments have no array: give arrays or jax.ShapeDtypeStructs."
    )
  return inputs, places


def _count_parts(argument: Any) -> int:
  """Returns the number of children of the root of a tree."""

  def is_child(each: Any) -> bool:
    return each is not argument

  return len(jax.tree.leaves(argument, is_leaf=is_child))


def _is_sharding(each: Any) -> bool:
  return each is None or isinstance(each, PartitionSpec | jax.sharding.Sharding)


def _spread(
  shardings: Shardings, arguments: Sequence[Any], names: Sequence[str]
) -> list[PartitionSpec | NamedSharding | None]:
  """Returns the sharding of each leaf of the arguments, None if not given."""
  whole = tuple(arguments)
  if shardings is None:
    return [None] * len(jax.tree.leaves(whole))
  if isinstance(shardings, list):
    shardings = tuple(shardings)
  found: list[Any] = []

  def add(sharding: Any, part: Any) -> None:
    found.extend([sharding] * len(jax.tree.leaves(part)))

  try:
    jax.tree.map(add, shardings, whole, is_leaf=_is_sharding)
  except ValueError as error:
    raise user_error.UserError(
      "in_shardings must be a prefix of the tree of the arguments"
      f" ({', '.join(names)}), with a PartitionSpec, a NamedSharding or None"
      f" for each: {str(error).splitlines()[0]}"
    ) from error
  for each in found:
    if not (each is None or isinstance(each, PartitionSpec | NamedSharding)):
      raise user_error.UserError(
        f"in_shardings: {each!r} must be a PartitionSpec, a NamedSharding or"
        " None."
      )
  return found


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
        f"mesh: {function.__name__} has a mesh that differs from this one; give"
        " the function's mesh, as mesh=Mesh(...) of CPU devices or of those of"
        f" paxon.plan.devices: {str(error).splitlines()[0]}"
      ) from error


def _use(mesh: Any) -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which a function finds the mesh."""
  if mesh is None:
    return contextlib.nullcontext()
  if isinstance(mesh, jax.sharding.Mesh):
    return jax.set_mesh(mesh)
  return jax.sharding.use_abstract_mesh(mesh)


def _read_jit(
  traced: jax.stages.Traced, count: int
) -> tuple[list[NamedSharding | None], set[int]]:
  """Returns the shardings and the donated inputs of a jitted function.

  Args:
    traced: A function that only calls it.
    count: Number of inputs.
  """
  jaxpr = traced.jaxpr.jaxpr
  shardings: list[NamedSharding | None] = [None] * count
  donated: set[int] = set()
  places = {variable: i for i, variable in enumerate(jaxpr.invars)}
  if len(jaxpr.eqns) == 1 and "donated_invars" in jaxpr.eqns[0].params:
    (equation,) = jaxpr.eqns
    inner = equation.params["jaxpr"].jaxpr
    found = zip(
      equation.invars,
      inner.invars,
      equation.params["in_shardings"],
      equation.params["donated_invars"],
      strict=True,
    )
    jaxpr, outer, places = inner, places, {}
    for variable, inside, sharding, is_donated in found:
      place = _find_place(variable, outer)
      if place is None:
        continue
      places[inside] = place
      if isinstance(sharding, NamedSharding):
        shardings[place] = sharding
      if is_donated:
        donated.add(place)
  for place, sharding in _read_shard_maps(jaxpr, places).items():
    shardings[place] = shardings[place] or sharding
  return shardings, donated


def _find_place(variable: Any, places: Mapping[Any, int]) -> int | None:
  """Returns which input a variable is; None if it is none."""
  is_constant = isinstance(variable, core.Literal)
  return None if is_constant else places.get(variable)


def _read_shard_maps(
  jaxpr: Any, places: Mapping[Any, int]
) -> dict[int, NamedSharding]:
  """Returns the shardings of inputs that only `shard_map` or `pmap` takes."""
  users: dict[int, list[NamedSharding | None]] = {}
  for equation in jaxpr.eqns:
    specs = equation.params.get("in_specs")
    is_map = equation.primitive.name == "shard_map" and specs is not None
    for i, variable in enumerate(equation.invars):
      place = _find_place(variable, places)
      if place is None:
        continue
      sharding = None
      if is_map:
        sharding = NamedSharding(equation.params["mesh"], specs[i])
      users.setdefault(place, []).append(sharding)
  return {
    place: found[0]
    for place, found in users.items()
    if len(found) == 1 and found[0] is not None
  }


def _place(given: _Input, sharding: Any, mesh: Any) -> jax.ShapeDtypeStruct:
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
  except (ValueError, TypeError) as error:
    sizes = ", ".join(f"{a}={n}" for a, n in mesh.shape.items())
    raise user_error.UserError(
      f"{given.label} with the shape {given.shape.shape} cannot be sharded by"
      f" {spec} over the mesh {sizes}: {str(error).splitlines()[0]}"
    ) from error


def _find_donated(
  donate: int | str | Sequence[int | str],
  names: Sequence[str],
  inputs: Sequence[_Input],
) -> set[int]:
  """Returns the indices of the inputs in donated arguments."""
  wanted = (donate,) if isinstance(donate, int | str) else tuple(donate)
  found: set[int] = set()
  for each in wanted:
    index = names.index(each) if each in names else each
    if not isinstance(index, int) or not 0 <= index < len(names):
      raise user_error.UserError(
        f"donate: {each!r} is no argument; give an index below {len(names)} or"
        f" one of {', '.join(names)}."
      )
    found |= {i for i, given in enumerate(inputs) if given.argument == index}
  return found


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
  if _OTHER_BACKEND in str(error):
    return user_error.UserError(
      f"{name} calls the host (jax.debug.print, io_callback, pure_callback or a"
      f" kernel of the CPU), which a program for absent {target} cannot: plan"
      " it without them."
    )
  if other := _OTHER_MESH.search(str(error)):
    return _describe_other_mesh(name, int(other[1]), target)
  return user_error.UserError(
    f"{name} cannot be exported for {target}: {error}"
  )


def _describe_other_mesh(
  name: str, num_devices: int, target: targets.Target
) -> user_error.UserError:
  return user_error.UserError(
    f"{name} has a mesh of {num_devices} devices, but {target} has"
    f" {target.num_devices}: build it of paxon.plan.devices('{target}'), or of"
    f" as many CPU devices (JAX_NUM_CPU_DEVICES={target.num_devices})."
  )


def _sum_inputs(
  inputs: Sequence[_Input], placed: Sequence[jax.ShapeDtypeStruct]
) -> dict[str, int]:
  """Returns the bytes of one device by argument."""
  sums: dict[str, int] = {}
  for given, array in zip(inputs, placed, strict=True):
    assert array.sharding is not None
    size = math.prod(array.sharding.shard_shape(array.shape))
    sums[given.group] = sums.get(given.group, 0) + size * array.dtype.itemsize
  return sums
