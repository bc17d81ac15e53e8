"""Decode-time parameters: pre-rounded, and unstacked on a single CPU.

Training keeps float32 parameters, and a bfloat16 model rounds them wherever it
reads them. Generation reads them for every token, so parameters that prefill
and decoding steps round in all places are stored rounded: the same results from
half of the memory and of the bytes that a token reads.

Which ones is a property of the traced program, not of a list of layers: norms,
routers and others that are read in float32 keep their dtype.
"""

import collections
from collections.abc import Sequence
import dataclasses
from typing import Any, Final

from flax import traverse_util
import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from paxon.layers.decoding import model_steps
from paxon.learners import train_state
from paxon.runner.generation import generation_limits, generation_program
from paxon.runner.session import session as session_lib
from paxon.sharding import axes, variables

# Smaller models keep stacked layers on one CPU: separate ones take longer to
# compile than they save.
MIN_BYTES_TO_SEPARATE: Final = 4 << 20

# Tokens of the prompt in the traced program, or the model's positions if there
# are fewer; short ones have other kernels.
_PROMPT: Final = 128
# Primitives whose result has values of their first operand only.
_SAME: Final = frozenset(
  {
    "broadcast_in_dim",
    "copy",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "optimization_barrier",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
  }
)


def prepare(
  session: session_lib.Session, state: train_state.TrainState
) -> tuple[session_lib.Session, train_state.TrainState]:
  """Returns a state for decoding, and the session with its dtypes.

  Generates the same as the given state, whose arrays may be deleted.

  On one CPU the layers of stacks are separate, unless they are small: a step
  copies a layer out of stacked arrays before it multiplies, and the copy of a
  cache takes longer than attention. Separate arrays lie in the memory of the
  stacked ones.
  """
  session = round_dtypes(session)
  specs = session_lib.strip_for_evaluation(session.state_specs)

  def cast(spec: variables.VariableSpec, x: jax.Array) -> jax.Array:
    if x.dtype == spec.dtype:
      return x
    y = jax.device_put(x.astype(spec.dtype), x.sharding)
    # Both states at once would be half as much memory again.
    jax.block_until_ready(y)
    x.delete()
    return y

  state = jax.tree.map(cast, specs, session_lib.strip_for_evaluation(state))
  job, devices = session.job, session.layout.mesh.devices.flat
  is_one_cpu = [device.platform for device in devices] == ["cpu"]
  # An average and another layout have the names of stacked layers.
  is_plain = state.average is None and not job.decode_mesh
  size = sum(x.nbytes for x in jax.tree.leaves(state.variables))
  is_large = size >= MIN_BYTES_TO_SEPARATE
  if is_one_cpu and is_large and is_plain and not job.decode_rules:
    return _separate(session, state)
  return session, state


def round_dtypes(session: session_lib.Session) -> session_lib.Session:
  """Returns the session with the dtypes of variables that `prepare` stores.

  The dtypes of other models stay. Nothing is computed.
  """
  if generation_program.generation_problem(session.job) is not None:
    return session
  state = session_lib.strip_for_evaluation(session.state_specs)
  specs: list[Any] = jax.tree.leaves(state)
  dtypes = {
    spec.name: dtype
    for spec, dtype in zip(
      specs, rounded_dtypes(_trace(session), len(specs)), strict=True
    )
    if dtype is not None
  }

  def change(spec: variables.VariableSpec) -> variables.VariableSpec:
    return dataclasses.replace(spec, dtype=dtypes.get(spec.name, spec.dtype))

  return dataclasses.replace(
    session,
    specs=jax.tree.map(change, session.specs),
    state_specs=jax.tree.map(change, session.state_specs),
  )


def _trace(session: session_lib.Session) -> core.ClosedJaxpr:
  """Returns a prefill and a step of a train state, traced."""
  model = session.job.task.model
  layout = generation_program.decoding_layout(session)
  capacity = generation_limits.find_capacity(model)
  length = min([_PROMPT, *filter(None, [capacity.tokens, capacity.source])])

  def run(state: train_state.TrainState, ids: jax.Array) -> Any:
    values = session.evaluation_variables(state)
    ones = jnp.ones_like(ids)
    last = jnp.full(ids.shape[:1], length - 1)
    source = {}
    if generation_program.reads_source(session.job):
      source = generation_program.to_source(ids, last + 1)
    prefill = model_steps.make_prefill(model, values, **source)
    logits, cache = prefill(ids, ones, ones, cache_length=length + 1, at=last)
    step = model_steps.make_decode_step(model, values)
    return logits, step(cache, *(x[:, :1] for x in (ids, ones, ones)))[0]

  specs = session_lib.strip_for_evaluation(session.state_specs)
  state = variables.abstract(
    specs, generation_program.state_shardings(session, layout)
  )
  shape = (layout.shards(axes.BATCH), length)
  ids = jax.ShapeDtypeStruct(
    shape, np.int32, sharding=layout.batch_sharding(len(shape))
  )
  return layout.jit(run).trace(state, ids).jaxpr


def _separate(
  session: session_lib.Session, state: train_state.TrainState
) -> tuple[session_lib.Session, train_state.TrainState]:
  """Returns both with the layers of stacks apart."""
  replicated = session.layout.replicated

  def split(x: Any) -> list[Any]:
    if isinstance(x, variables.VariableSpec):
      # Absent: a parameter that quantized weights replace.
      return [dataclasses.replace(x, shape=x.shape[1:])] * x.shape[0]
    return [jax.device_put(layer, replicated) for layer in np.asarray(x)]

  values, specs = (
    traverse_util.unflatten_dict(
      {**traverse_util.flatten_dict(tree, sep="/"), **session.absent}, sep="/"
    )
    for tree in (state.variables, session.state_specs.variables)
  )
  found: dict[str, Any] = traverse_util.flatten_dict(
    variables.separate_layers(values, specs, split=split), sep="/"
  )
  absent = {
    name: x
    for name, x in found.items()
    if isinstance(x, variables.VariableSpec)
  }
  values = {name: x for name, x in found.items() if name not in absent}
  return dataclasses.replace(session, absent=absent), dataclasses.replace(
    state, variables=traverse_util.unflatten_dict(values, sep="/")
  )


def rounded_dtypes(
  program: core.ClosedJaxpr, count: int
) -> list[jnp.dtype | None]:
  """Returns the dtype to which a program rounds each of its first inputs.

  None where it reads more than rounded values, or does not read at all.
  """
  reads: dict[int, set[Any]] = collections.defaultdict(set)
  inputs = program.jaxpr.invars[:count]
  of = {variable: {i} for i, variable in enumerate(inputs)}
  for i in set().union(*_follow(program.jaxpr, of, reads)):
    reads[i].add(None)
  found: list[jnp.dtype | None] = []
  for i, variable in enumerate(inputs):
    dtype, *others = reads[i] or {None}
    is_narrower = (
      not others
      and dtype is not None
      and jnp.issubdtype(variable.aval.dtype, jnp.floating)
      and dtype.itemsize < variable.aval.dtype.itemsize
    )
    found.append(dtype if is_narrower else None)
  return found


def _follow(
  jaxpr: Any, of: dict[Any, set[int]], reads: dict[int, set[Any]]
) -> list[set[int]]:
  """Adds the reads of a jaxpr: the dtype of a cast, None for any other.

  Args:
    jaxpr: The operations.
    of: The inputs of the program whose values a variable has; it is changed.
    reads: Uses of each input.

  Returns:
    The inputs whose values the outputs have.
  """

  def find_known(variable: Any) -> set[int]:
    return (
      set() if isinstance(variable, core.Literal) else of.get(variable, set())
    )

  for equation in jaxpr.eqns:
    given = [find_known(v) for v in equation.invars]
    if not any(given):
      continue
    name = equation.primitive.name
    dtype = equation.params.get("new_dtype")
    if name == "convert_element_type" and jnp.issubdtype(dtype, jnp.floating):
      for i in given[0]:
        reads[i].add(jnp.dtype(dtype))
      continue
    if name in _SAME and not any(given[1:]):
      of[equation.outvars[0]] = given[0]
      continue
    results = _follow_inner(equation, given, reads)
    if results is None:
      for i in set().union(*given):
        reads[i].add(None)
      continue
    of.update(zip(equation.outvars, results, strict=True))
  return [find_known(v) for v in jaxpr.outvars]


def _follow_inner(
  equation: Any, given: Sequence[set[int]], reads: dict[int, set[Any]]
) -> list[set[int]] | None:
  """Returns the result of `_follow` for a call, a loop or a branch.

  None if the equation is none of these, or carries an input in a loop.
  """
  params, name = equation.params, equation.primitive.name

  def follow(inner: Any, given: Sequence[set[int]]) -> list[set[int]]:
    inner = getattr(inner, "jaxpr", inner)
    pairs = zip(inner.invars, given, strict=True)
    return _follow(inner, dict(pairs), reads)

  if name == "while":
    conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
    carried = list(given[conditions + bodies :])
    if any(carried):
      return None
    follow(params["cond_jaxpr"], [*given[:conditions], *carried])
    constants = given[conditions : conditions + bodies]
    results = follow(params["body_jaxpr"], [*constants, *carried])
    return None if any(results) else results
  if name == "cond":
    branches = [follow(b, given[1:]) for b in params["branches"]]
    return [set().union(*each) for each in zip(*branches, strict=True)]
  inner = [
    x
    for x in (params.get(k) for k in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    if x is not None
  ]
  if len(inner) != 1:
    return None
  if name == "scan":
    # Constants come first, then what is carried, then what is sliced. JAX 0.11
    # has no parameter with their numbers.
    body = getattr(inner[0], "jaxpr", inner[0])
    num_sliced, num_stacked = (
      sum(outer.aval.ndim > inner.aval.ndim for outer, inner in pairs)
      for pairs in (
        zip(equation.invars, body.invars, strict=True),
        zip(equation.outvars, body.outvars, strict=True),
      )
    )
    num_carried = len(body.outvars) - num_stacked
    first = len(given) - num_sliced - num_carried
    if any(given[first : first + num_carried]):
      return None
    results = follow(body, given)
    return None if any(results[:num_carried]) else results
  if len(getattr(inner[0], "jaxpr", inner[0]).invars) != len(given):
    return None
  return follow(inner[0], given)
