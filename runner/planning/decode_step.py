"""Plans of a decoding step: a token for each of many sequences.

A step reads all variables and the whole cache once, so memory bandwidth bounds
it until the batch is large. Sizes follow from shapes and shardings; where the
target's compiler is installed, the step is compiled too.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import math
from typing import Any

import jax
from jax.experimental import layout as layout_lib
from jax.extend import core
from jax.interpreters import partial_eval
import jax.numpy as jnp
import numpy as np

from paxon.layers.decoding import model_steps
from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.generation import (
  decoding_state,
  generation_limits,
  generation_program,
)
from paxon.runner.plan import compiled_program, hardware, result, roofline
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import target as targets
from paxon.runner.planning import compilation
from paxon.runner.session import memory_fit
from paxon.runner.session import session as session_lib
from paxon.sharding import axes, variables
from paxon.sharding import layout as layouts
from paxon.sharding import target as platforms

# Primitives that call the one jaxpr in their parameters.
_CALLS = ("jit", "pjit", "closed_call")
# Primitives whose result has the values of their operand.
_SAME = ("convert_element_type", "copy", "sharding_constraint")
_LENGTH = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
  """A decoding step, traced.

  Attributes:
    layout: Where it runs.
    traced: The step: (state, cache, ids) to (ids, cache).
    arguments: The shapes and shardings of its arguments.
  """

  layout: layouts.Layout
  traced: jax.stages.Traced
  arguments: tuple[Any, ...]


def _trace_step(
  session: session_lib.Session, *, batch: int, length: int
) -> _Step:
  """Returns a greedy decoding step, traced; nothing is computed.

  Args:
    session: The job on its devices.
    batch: Number of sequences.
    length: Number of slots of the cache.

  Raises:
    UserError: The model does not generate text, is an encoder-decoder, has
      fewer positions, or a size does not divide by the mesh.
  """
  job = session.job
  reason = generation_program.generation_problem(job, decoder_only=True)
  if reason is not None:
    raise user_error.UserError(
      f"{job.experiment} has no decoding step of one cache: {reason}."
    )
  generation_limits.check_lengths(job.task.model, length, 1)
  layout = generation_program.decoding_layout(session)
  state = generation_program.abstract_state(session, layout)
  shards = layout.shards(axes.BATCH)
  if batch % shards:
    raise user_error.UserError(
      f"{batch} sequences do not divide by the {shards} shards of a batch; use"
      " another number, or another mesh."
    )
  shape = jax.ShapeDtypeStruct(
    (batch, 1), np.int32, sharding=layout.batch_sharding(2)
  )
  cache = _abstract_cache(session, layout, state, shape, length)

  def step(
    state: train_state.TrainState, cache: Any, ids: jax.Array
  ) -> tuple[jax.Array, Any]:
    decode = model_steps.make_decode_step(
      job.task.model, session.evaluation_variables(state)
    )
    ones = jnp.ones_like(ids)
    logits, cache = decode(cache, ids, (length - 1) * ones, ones)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

  # In a loop of steps the compiler chooses the cache's layout once.
  free = jax.tree.map(
    lambda x: layout_lib.Format(layout_lib.Layout.AUTO, x.sharding), cache
  )
  program = layout.jit(
    step,
    donate_argnums=1,
    in_shardings=(None, free, None),
    out_shardings=(None, free),
    compiler_options=session.compiler_options,
  )
  arguments = state, cache, shape
  return _Step(
    layout=layout, traced=program.trace(*arguments), arguments=arguments
  )


def _abstract_cache(
  session: session_lib.Session,
  layout: layouts.Layout,
  state: Any,
  ids: jax.ShapeDtypeStruct,
  length: int,
) -> Any:
  """Returns the shapes and shardings of a cache with `length` slots.

  Raises:
    UserError: A size does not divide by the mesh.
  """

  def fill(state: train_state.TrainState, ids: jax.Array) -> Any:
    prefill = model_steps.make_prefill(
      session.job.task.model, session.evaluation_variables(state)
    )
    ones = jnp.ones_like(ids)
    return prefill(ids, ids, ones, cache_length=length)[1]

  try:
    boxed = layout.jit(fill).trace(state, ids).out_info
    specs = variables.get_specs(boxed)
    shardings = layout.shardings(specs)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  cache = variables.abstract(specs, shardings)
  return jax.tree.unflatten(jax.tree.structure(boxed), jax.tree.leaves(cache))


def measure_all(
  session: session_lib.Session,
  target: targets.Target,
  sizes: Sequence[tuple[int, int]],
  *,
  is_compiled: bool,
) -> tuple[result.DecodeStep, ...]:
  """Plans decoding steps; an error becomes a note.

  Args:
    session: The job on the target's devices.
    target: Target to plan for.
    sizes: Number of sequences and slots of their caches, for each step.
    is_compiled: Whether to compile, or to trace only.
  """
  found = []
  for batch, length in sizes:
    try:
      step = _measure(session, target, batch, length, is_compiled=is_compiled)
    except (user_error.UserError, ValueError, jax.errors.JaxRuntimeError) as e:
      first = str(e).strip().partition("\n")[0][:_LENGTH]
      step = result.DecodeStep(batch=batch, length=length, note=first)
    found.append(step)
  return tuple(found)


def _measure(
  session: session_lib.Session,
  target: targets.Target,
  batch: int,
  length: int,
  *,
  is_compiled: bool,
) -> result.DecodeStep:
  kind = target.hardware
  # CPU devices stand in for others; caches of CPUs store bfloat16 in float32.
  is_stand_in = not is_compiled and kind.platform is not hardware.Platform.CPU
  with platforms.any_platform() if is_stand_in else contextlib.nullcontext():
    session = decoding_state.round_dtypes(session)
    step = _trace_step(session, batch=batch, length=length)
  state, cache, *_ = step.arguments
  flops = flops_lib.count(step.traced.jaxpr)
  memory = result.Memory(
    parameters=memory_fit.shard_bytes(state.variables),
    other_variables=memory_fit.shard_bytes(cache),
    usable=kind.usable_bytes,
    capacity=kind.memory_bytes,
  )
  program = compiled_program.Program(target)
  if is_compiled:
    placed = dataclasses.replace(session, layout=step.layout)
    settings = compilation.get_compilation(placed, target)
    memory = program.compile(settings, step.traced, memory, flops)
  collectives = roofline.summarize(
    program.reading.communication.collectives,
    kind=kind,
    placement=program.placement,
  )
  is_known = program.is_compiled and program.reading.is_communication_known
  leaves = jax.tree.leaves((state, cache))
  read = sum(_read(step.traced.jaxpr, leaves, mesh_size=step.layout.mesh.size))
  shape = (batch, 1)
  estimate, reasons = program.estimate(flops, shape)
  return result.DecodeStep(
    batch=batch,
    length=length,
    parameters=memory.parameters,
    cache=memory.other_variables,
    read=read,
    peak=memory.peak,
    fit=memory.fit.value,
    bound=roofline.compute_bound(
      flops,
      kind=kind,
      num_devices=target.num_devices,
      collectives=collectives if is_known else None,
      traffic=float(read),
      batch_shape=shape,
    ),
    estimate=estimate,
    note=memory.compiler_error or " ".join(reasons),
  )


def _read(
  jaxpr: core.ClosedJaxpr, leaves: Sequence[Any], *, mesh_size: int
) -> list[int]:
  """Returns the bytes that a program reads of each of its first inputs.

  Of a table from which rows are only looked up these are the rows, which are
  split over no more devices than there are; of what nothing needs, none.

  Args:
    jaxpr: The program.
    leaves: Shapes and shardings of the inputs.
    mesh_size: Number of devices.
  """
  open_jaxpr = jaxpr.jaxpr
  live, used = partial_eval.dce_jaxpr(
    open_jaxpr, [True] * len(open_jaxpr.outvars)
  )
  inputs = iter(live.invars)
  found = []
  for leaf, is_used in zip(leaves, used, strict=False):
    size = 0
    if is_used:
      rows = _looked_up(live, next(inputs))
      size = memory_fit.shard_bytes(leaf)
      if rows is not None:
        size = min(size, rows * leaf.dtype.itemsize // mesh_size)
    found.append(size)
  return found


def _looked_up(jaxpr: Any, variable: Any) -> int | None:
  """Returns the number of values that are gathered; None if all are read."""
  if any(variable is out for out in jaxpr.outvars):
    return None
  total = 0
  for equation in jaxpr.eqns:
    places = [i for i, v in enumerate(equation.invars) if v is variable]
    if not places:
      continue
    count = None
    if equation.primitive.name == "gather" and places == [0]:
      count = math.prod(equation.outvars[0].aval.shape)
    elif equation.primitive.name in _SAME:
      count = _looked_up(jaxpr, equation.outvars[0])
    elif equation.primitive.name in _CALLS:
      inner = equation.params["jaxpr"].jaxpr
      counts = [_looked_up(inner, inner.invars[i]) for i in places]
      known = [c for c in counts if c is not None]
      count = sum(known) if len(known) == len(counts) else None
    if count is None:
      return None
    total += count
  return total
