"""The stacked variables of all layers, seen by stage.

A stack stores what its G groups of layers have as [G,...], in the order of the
layers. A stage holds, for each repeat, K groups that follow one another:

  group (r * P + s) * K + k   is entry [s, r, k] of [P,R,K,...]

Where P * R * K is more than G, the last entries repeat the last group, and are
not used. With one repeat and P * K = G an array [G,...] that is sharded over
the stages is seen without moving anything.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paxon.pipeline import placement, timetable


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageView:
  """How groups of layers are given out to stages.

  Attributes:
    num_groups: G.
    num_stages: P.
    num_repeats: R.
  """

  num_groups: int
  num_stages: int
  num_repeats: int

  @property
  def groups_per_repeat(self) -> int:
    """K: groups that a stage has in each repeat."""
    return -(-self.num_groups // (self.num_stages * self.num_repeats))

  def split(self, tree: Any) -> Any:
    """Returns arrays [P,R,K,...] of arrays [G,...]."""
    return placement.staged(jax.tree.map(self._split, tree))

  def merge(self, tree: Any) -> Any:
    """Undoes `split`."""
    return jax.tree.map(self._merge, tree)

  def group_numbers(self) -> jax.Array:
    """Returns the number of each group, int32 [P,R,K]; those not used too."""
    shape = (self.num_repeats, self.num_stages, self.groups_per_repeat)
    size = self.num_repeats * self.num_stages * self.groups_per_repeat
    numbers = jnp.arange(size, dtype=jnp.int32).reshape(shape)
    return jnp.moveaxis(numbers, 0, 1)

  def _split(self, x: jax.Array) -> jax.Array:
    p, r, k = self.num_stages, self.num_repeats, self.groups_per_repeat
    missing = p * r * k - self.num_groups
    if missing:
      # Values that layers can compute with, unlike zeros.
      last = jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))
      x = jnp.concatenate([x, last])
    return jnp.moveaxis(x.reshape(r, p, k, *x.shape[1:]), 0, 1)

  def _merge(self, x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 1, 0)
    return x.reshape(-1, *x.shape[3:])[: self.num_groups]


def of_repeat(tree: Any, repeat: jax.Array) -> Any:
  """Returns what a stage has in one repeat: [K,...] of arrays [R,K,...]."""

  def one(x: jax.Array) -> jax.Array:
    if x.shape[0] == 1:
      return x[0]
    return jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False)

  return jax.tree.map(one, tree)


def by_microbatch(tree: Any, table: timetable.Timetable) -> Any:
  """Returns what stages made of each microbatch.

  Args:
    tree: What they made in each tick, arrays [ticks,P,K,...].
    table: The ticks.

  Returns:
    Arrays [P,R,M,K,...], without bubbles.
  """

  def of_stage(stage: jax.Array, x: jax.Array) -> jax.Array:
    cut = functools.partial(
      jax.lax.dynamic_slice_in_dim, x, slice_size=table.num_microbatches
    )
    firsts = [table.first_tick(repeat=r) for r in range(table.num_repeats)]
    return jnp.stack([cut(stage + first) for first in firsts])

  def of_all(x: jax.Array) -> jax.Array:
    x = placement.staged(jnp.moveaxis(x, 1, 0))
    stages = jnp.arange(table.num_stages, dtype=jnp.int32)
    return placement.staged(jax.vmap(of_stage)(stages, x))

  return jax.tree.map(of_all, tree)
