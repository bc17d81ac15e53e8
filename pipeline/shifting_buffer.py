"""The loop over the ticks of a pipeline.

A buffer [P,size,...] holds the output of each stage in the last tick. In each
tick it is shifted by one along its first axis, which is sharded over stages, so
each stage receives its neighbor's output. Nothing else passes between stages.

Microbatches wait, and outputs are collected, in one of two ways:

  * every stage holds all microbatches, [P,M,size,...], though only the first
    one reads them; at the end the last stage's outputs are sent to all;
  * streaming: each stage holds M / P microbatches, [P,M/P,size,...]. In each
    tick one column of this ring moves by one stage towards the first; the first
    stage's microbatch leaves it and the last stage's output enters it. Both
    moves use the same links, and no tick waits for its own moves.

With several repeats, the last stage's outputs go to the first stage, where they
wait until all microbatches have begun.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxon.pipeline import stage_sharding
from paxon.pipeline import stages as stages_lib

# Activations and batched arguments: a tree of arrays.
Inputs = Any
# `(tick, inputs of all stages [P,size,...], state, one of per_tick)
# -> (outputs, state, made)`.
Stages = Callable[[jax.Array, Any, Any, Any], tuple[Any, Any, Any]]


class _Carry(NamedTuple):
  """State between two ticks.

  Attributes:
    buffer: Outputs of the stages, [P,size,...].
    waiting: Outputs between two repeats, [P,wait,size,...]; the first stage
      reads them.
    ring: The microbatches while streaming, [P,M/P,size,...]; else None.
    state: State of the stages.
  """

  buffer: Inputs
  waiting: Any
  ring: Any
  state: Any


def run(
  stages: Stages,
  microbatches: Inputs,
  *,
  ticks: stages_lib.Ticks,
  state: Any,
  per_tick: Any,
  streaming: bool,
) -> tuple[Any, Any, Any]:
  """Sends microbatches through all stages.

  Args:
    stages: Computes one tick of all stages.
    microbatches: Arrays [1,M,size,...], or while streaming [P,M/P,size,...].
    ticks: The ticks.
    state: State of the stages before the first tick.
    per_tick: Arrays [ticks,...].
    streaming: Whether each stage holds a share of the microbatches.

  Returns:
    The outputs, in the form of `microbatches`; the state; and what was made in
    each tick, [ticks,...].
  """
  if not streaming:
    # A copy for each stage, so that gradients of copies are added once, after
    # the loop, and not in each tick.
    microbatches = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (ticks.num_stages, *x.shape[1:])),
      microbatches,
    )
  microbatches = _shard(microbatches)
  each = jax.tree.leaves(microbatches)[0].shape[1]

  def zeros(*shape: int) -> Inputs:
    return jax.tree.map(
      lambda x: jnp.zeros((*shape, *x.shape[2:]), x.dtype), microbatches
    )

  first = _Carry(
    buffer=stage_sharding.shard_microbatch(zeros(ticks.num_stages)),
    waiting=_shard(zeros(ticks.num_stages, ticks.wait)) if ticks.wait else None,
    ring=microbatches if streaming else None,
    state=state,
  )

  def tick(carry: _Carry, xs: Any) -> tuple[_Carry, Any]:
    t, own = xs
    column = _column(carry.ring if streaming else microbatches, t % each)
    given, waiting = _inputs(carry, column, t, ticks)
    made, state, out = stages(t, given, carry.state, own)
    made = stage_sharding.shard_microbatch(made)
    ring = carry.ring
    if streaming:
      moved = _last_from(made, _roll(column, -1))
      ring = _shard(_with_column(carry.ring, moved, t % each))
    after = _Carry(made, waiting, ring, state)
    return after, (out, None if streaming else made[0])

  numbers = jnp.arange(ticks.num_ticks, dtype=jnp.int32)
  last, (out, made) = jax.lax.scan(tick, first, (numbers, per_tick))
  if streaming:
    # The first microbatch is in the column of the tick in which it came out.
    shift = -(ticks.num_ticks % each)
    y = jax.tree.map(lambda x: jnp.roll(x, shift, axis=1), last.ring[0])
    return _shard(y), last.state, out
  y = jax.tree.map(lambda x: x[None, -ticks.num_microbatches :, -1], made)
  return y, last.state, out


def _inputs(
  carry: _Carry, column: Inputs, tick: jax.Array, ticks: stages_lib.Ticks
) -> tuple[Inputs, Any]:
  """Returns the inputs of stages in a tick, and what waits after it."""
  shifted = _roll(carry.buffer, 1)
  returned, waiting = shifted, carry.waiting
  if ticks.wait:
    slot = tick % ticks.wait
    returned = _column(waiting, slot)
    waiting = _shard(_with_column(waiting, shifted, slot))
  if ticks.num_repeats > 1:
    begins = tick < ticks.first_tick(repeat=1)
    column = jax.tree.map(
      lambda a, b: jnp.where(begins, a, b), column, returned
    )
  return stage_sharding.shard_microbatch(_first_from(column, shifted)), waiting


def _roll(tree: Inputs, by: int) -> Inputs:
  """Moves arrays [P,...] by some stages."""
  return jax.tree.map(lambda x: jnp.roll(x, by, axis=0), tree)


def _shard(tree: Inputs) -> Inputs:
  return stage_sharding.shard_microbatch(tree, between=1)


def _column(tree: Inputs, number: jax.Array) -> Inputs:
  """Returns [P,size,...] of arrays [P,n,size,...]."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False),
    tree,
  )


def _with_column(tree: Inputs, column: Inputs, number: jax.Array) -> Inputs:
  return jax.tree.map(
    lambda x, c: jax.lax.dynamic_update_index_in_dim(x, c, number, axis=1),
    tree,
    column,
  )


def _first_from(first: Inputs, others: Inputs) -> Inputs:
  """Returns [P,...]: stage 0 as in `first`, the others as in `others`."""

  def choose(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(_stage_numbers(b) == 0, a, b)

  return jax.tree.map(choose, first, others)


def _last_from(last: Inputs, others: Inputs) -> Inputs:
  def choose(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(_stage_numbers(b) == b.shape[0] - 1, a, b)

  return jax.tree.map(choose, last, others)


def _stage_numbers(x: jax.Array) -> jax.Array:
  shape = (x.shape[0], *(1,) * (x.ndim - 1))
  return jax.lax.broadcasted_iota(jnp.int32, shape, 0)
