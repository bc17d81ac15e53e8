"""The loop over the ticks of a pipeline.

A buffer [P,rows,...] holds what each stage made in the last tick. In each tick
it is shifted by one along its first axis, which is sharded over stages; so each
stage gets its neighbour's rows. Nothing else passes between stages.

The microbatches wait, and what they become is collected, in one of two ways:

  * every stage has all microbatches, [P,M,rows,...], though only the first one
    reads them; at the end the last stage's rows are sent to all;
  * streaming: stages have M / P microbatches each, [P,M/P,rows,...]. In each
    tick one column of this ring moves by one stage towards the first; the first
    stage's rows leave it and the last stage's come in. Both moves are over the
    same links, and neither is waited for in the tick that it is made.

With several repeats, rows that leave the last stage go to the first one, where
they wait until all microbatches have begun.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxon.pipeline import placement, timetable

# A tree of arrays; that of all rows is a pair, see `run`.
Rows = Any
# `(tick, rows of all stages [P,rows,...], state) -> (rows, state, made)`.
Stages = Callable[[jax.Array, Any, Any, Any], tuple[Any, Any, Any]]


class _Carry(NamedTuple):
  """What one tick hands to the next.

  Attributes:
    buffer: What stages made, [P,rows,...].
    waiting: Between two repeats, [P,wait,rows,...]; used by the first stage.
    ring: The microbatches while streaming, [P,M/P,rows,...]; else None.
    state: Of the stages.
  """

  buffer: Rows
  waiting: Any
  ring: Any
  state: Any


def run(
  stages: Stages,
  microbatches: Rows,
  *,
  table: timetable.Timetable,
  state: Any,
  per_tick: Any,
  streaming: bool,
) -> tuple[Any, Any, Any]:
  """Sends microbatches through all stages.

  Args:
    stages: `(tick, rows [P,rows,...], state, one of per_tick) -> (rows, state,
      made)`: what all stages do in a tick.
    microbatches: What the layers change, and what goes with it; arrays
      [1,M,rows,...], or while streaming [P,M/P,rows,...].
    table: The ticks.
    state: Of the stages, before the first tick.
    per_tick: Arrays [ticks,...].
    streaming: How microbatches are kept, see above.

  Returns:
    What the layers made of the rows, as these were given; the state; and what
    was made in each tick, [ticks,...].
  """
  if not streaming:
    # A copy for each stage, so that gradients of copies are added up once,
    # after the loop, and not in each tick.
    microbatches = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (table.num_stages, *x.shape[1:])),
      microbatches,
    )
  microbatches = _placed(microbatches)
  each = jax.tree.leaves(microbatches)[0].shape[1]

  def zeros(*shape: int) -> Rows:
    return jax.tree.map(
      lambda x: jnp.zeros((*shape, *x.shape[2:]), x.dtype), microbatches
    )

  first = _Carry(
    buffer=placement.staged_rows(zeros(table.num_stages)),
    waiting=_placed(zeros(table.num_stages, table.wait))
    if table.wait
    else None,
    ring=microbatches if streaming else None,
    state=state,
  )

  def tick(carry: _Carry, xs: Any) -> tuple[_Carry, Any]:
    t, own = xs
    column = _column(carry.ring if streaming else microbatches, t % each)
    given, waiting = _given(carry, column, t, table)
    made, state, out = stages(t, given, carry.state, own)
    made = placement.staged_rows(made)
    ring = carry.ring
    if streaming:
      moved = _last_from(made, _rolled(column, -1))
      ring = _placed(_with_column(carry.ring, moved, t % each))
    after = _Carry(made, waiting, ring, state)
    return after, (out, None if streaming else made[0])

  ticks = jnp.arange(table.num_ticks, dtype=jnp.int32)
  last, (out, made) = jax.lax.scan(tick, first, (ticks, per_tick))
  if streaming:
    # The column of the first microbatch is that of the tick it came out in.
    shift = -(table.num_ticks % each)
    rows = jax.tree.map(lambda x: jnp.roll(x, shift, axis=1), last.ring[0])
    return _placed(rows), last.state, out
  rows = jax.tree.map(lambda x: x[None, -table.num_microbatches :, -1], made)
  return rows, last.state, out


def _given(
  carry: _Carry, column: Rows, tick: jax.Array, table: timetable.Timetable
) -> tuple[Rows, Any]:
  """Returns what stages are given in a tick, and what waits after it.

  Args:
    carry: Of the last tick.
    column: Microbatches [P,rows,...] of which the first stage's may begin.
    tick: The tick.
    table: The ticks.
  """
  shifted = _rolled(carry.buffer, 1)
  returned, waiting = shifted, carry.waiting
  if table.wait:
    slot = tick % table.wait
    returned = _column(waiting, slot)
    waiting = _placed(_with_column(waiting, shifted, slot))
  if table.num_repeats > 1:
    begins = tick < table.first_tick(repeat=1)
    column = jax.tree.map(
      lambda a, b: jnp.where(begins, a, b), column, returned
    )
  return placement.staged_rows(_first_from(column, shifted)), waiting


def _rolled(tree: Rows, by: int) -> Rows:
  """Returns what each stage gets from its neighbour."""
  return jax.tree.map(lambda x: jnp.roll(x, by, axis=0), tree)


def _placed(tree: Rows) -> Rows:
  return placement.staged_rows(tree, between=1)


def _column(tree: Rows, number: jax.Array) -> Rows:
  """Returns [P,rows,...] of arrays [P,n,rows,...]."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False),
    tree,
  )


def _with_column(tree: Rows, column: Rows, number: jax.Array) -> Rows:
  return jax.tree.map(
    lambda x, c: jax.lax.dynamic_update_index_in_dim(x, c, number, axis=1),
    tree,
    column,
  )


def _first_from(first: Rows, others: Rows) -> Rows:
  """Returns [P,...]: stage 0 as in `first`, the others as in `others`."""

  def choose(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(_stage_numbers(b) == 0, a, b)

  return jax.tree.map(choose, first, others)


def _last_from(last: Rows, others: Rows) -> Rows:
  def choose(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(_stage_numbers(b) == b.shape[0] - 1, a, b)

  return jax.tree.map(choose, last, others)


def _stage_numbers(x: jax.Array) -> jax.Array:
  shape = (x.shape[0], *(1,) * (x.ndim - 1))
  return jax.lax.broadcasted_iota(jnp.int32, shape, 0)
