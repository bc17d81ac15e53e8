"""Decode-time parameters: pre-rounded, and unstacked on a single CPU.

Training keeps float32 parameters, and a bfloat16 model rounds them wherever it
reads them. Generation reads them for every token, so parameters that their
layers round wherever they read them (`VariableSpec.read_dtype`) are stored
rounded: the same results from half of the memory and of the bytes that a token
reads. Norms, routers and others that are read in float32 keep their dtype.
"""

import dataclasses
from typing import Any

from flax import traverse_util
import jax
import numpy as np

from paxon.layers.cpu import forms
from paxon.learners import train_state
from paxon.runner.generation import generation_program
from paxon.runner.session import session as session_lib
from paxon.sharding import variables


def prepare(
  session: session_lib.Session, state: train_state.TrainState
) -> tuple[session_lib.Session, train_state.TrainState]:
  """Returns a state for decoding, and the session with its dtypes.

  Generates the same as the given state, whose arrays may be deleted.

  The layers of stacks are separate if the platform asks for it
  (`layers.cpu.forms`). Separate arrays lie in the memory of the stacked ones.
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
  job = session.job
  # An average and another layout have the names of stacked layers.
  if state.average is not None or job.decode_mesh or job.decode_rules:
    return session, state
  size = sum(x.nbytes for x in jax.tree.leaves(state.variables))
  with jax.set_mesh(session.layout.mesh):
    is_separate = forms.separates_layers(size)
  return _separate(session, state) if is_separate else (session, state)


def round_dtypes(session: session_lib.Session) -> session_lib.Session:
  """Returns the session with the dtypes of variables that `prepare` stores.

  Dtypes do not change if the model does not generate. Nothing is computed.
  """
  if generation_program.generation_problem(session.job) is not None:
    return session

  def change(spec: variables.VariableSpec) -> variables.VariableSpec:
    dtype = spec.read_dtype
    if dtype is None or dtype.itemsize >= spec.dtype.itemsize:
      return spec
    return dataclasses.replace(spec, dtype=dtype)

  return dataclasses.replace(
    session,
    specs=jax.tree.map(change, session.specs),
    state_specs=jax.tree.map(change, session.state_specs),
  )


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
