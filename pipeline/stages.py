"""Assignment of layers, sequences and ticks to the stages of a pipeline.

Layers. A stack stores the variables of its G groups of layers as [G,...], in
the order of the layers. Each stage has, in each of R repeats, K consecutive
groups: group `(r P + s) K + k` is entry [s, r, k] of [P,R,K,...]. If P R K
exceeds G, the last entries are copies of the last group and are not used. With
one repeat and P K = G, an array [G,...] sharded over the stages is not moved.

Ticks. In each tick every stage computes once and sends its output to the next
one. Stage s is s ticks behind stage 0, so at tick t it works on item `t - s` of

  repeat 0: microbatch 0 ... M - 1,   repeat 1: microbatch 0 ... M - 1,   ...

A microbatch must have left the last stage before its next repeat, so a repeat
takes at least P ticks. A stage without work computes on arbitrary values: a
bubble.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxon.pipeline import stage_sharding


class Work(NamedTuple):
  """Work of a stage in a tick.

  Attributes:
    repeat: Index of the repeat, int; arbitrary in a bubble.
    microbatch: Index of the microbatch, int; arbitrary in a bubble.
    is_live: False in a bubble.
  """

  repeat: jax.Array
  microbatch: jax.Array
  is_live: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticks:
  """The ticks of a forward pass.

  Attributes:
    num_stages: P.
    num_microbatches: M.
    num_repeats: How often each microbatch passes through all stages, R.
  """

  num_stages: int
  num_microbatches: int
  num_repeats: int = 1

  @property
  def repeat_ticks(self) -> int:
    """Ticks from the start of one repeat to the start of the next."""
    return max(self.num_microbatches, self.num_stages)

  @property
  def num_ticks(self) -> int:
    """Ticks until the last microbatch has left the last stage."""
    last = (self.num_repeats - 1) * self.repeat_ticks
    return last + self.num_microbatches + self.num_stages - 1

  @property
  def wait(self) -> int:
    """Ticks that a microbatch waits before its next repeat."""
    if self.num_repeats == 1:
      return 0
    return self.repeat_ticks - self.num_stages

  def work(self, tick: jax.Array, stage: jax.Array) -> Work:
    """Returns a stage's work in a tick, both fields int32."""
    number = tick - stage
    last = self.num_repeats - 1
    repeat = jnp.clip(number // self.repeat_ticks, 0, last)
    microbatch = number - repeat * self.repeat_ticks
    is_live = (microbatch >= 0) & (microbatch < self.num_microbatches)
    microbatch = jnp.clip(microbatch, 0, self.num_microbatches - 1)
    return Work(repeat, microbatch, is_live)

  def first_tick(self, *, repeat: int) -> int:
    """Returns the tick at which stage 0 begins a repeat."""
    return repeat * self.repeat_ticks

  def gather_microbatches(self, tree: Any) -> Any:
    """Returns the outputs of stages by microbatch, without bubbles.

    Args:
      tree: Outputs of each tick, arrays [ticks,P,K,...].

    Returns:
      Arrays [P,R,M,K,...].
    """

    def gather_stage(stage: jax.Array, x: jax.Array) -> jax.Array:
      cut = functools.partial(
        jax.lax.dynamic_slice_in_dim, x, slice_size=self.num_microbatches
      )
      firsts = [self.first_tick(repeat=r) for r in range(self.num_repeats)]
      return jnp.stack([cut(stage + first) for first in firsts])

    def gather_all(x: jax.Array) -> jax.Array:
      x = stage_sharding.shard(jnp.moveaxis(x, 1, 0))
      stages = jnp.arange(self.num_stages, dtype=jnp.int32)
      return stage_sharding.shard(jax.vmap(gather_stage)(stages, x))

    return jax.tree.map(gather_all, tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageLayers:
  """The groups of layers of each stage.

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
    """K: groups of a stage in each repeat."""
    return -(-self.num_groups // (self.num_stages * self.num_repeats))

  def live_scope(self, ticks: "Ticks") -> str:
    """Returns the name scope of a tick: how many group calls are live.

    Counts of FLOPs read it: `live_N_of_M`.

    Args:
      ticks: The ticks of a forward pass.
    """
    live = self.num_groups * ticks.num_microbatches
    calls = ticks.num_ticks * self.num_stages * self.groups_per_repeat
    return f"live_{live}_of_{calls}"

  def split(self, tree: Any) -> Any:
    """Returns arrays [P,R,K,...] of arrays [G,...]."""
    return stage_sharding.shard(jax.tree.map(self._split, tree))

  def merge(self, tree: Any) -> Any:
    """Returns arrays [G,...] of arrays [P,R,K,...]."""
    return jax.tree.map(self._merge, tree)

  def group_numbers(self) -> jax.Array:
    """Returns the index of each group, int32 [P,R,K]; unused ones are >= G."""
    shape = (self.num_repeats, self.num_stages, self.groups_per_repeat)
    size = self.num_repeats * self.num_stages * self.groups_per_repeat
    numbers = jnp.arange(size, dtype=jnp.int32).reshape(shape)
    return jnp.moveaxis(numbers, 0, 1)

  def _split(self, x: jax.Array) -> jax.Array:
    p, r, k = self.num_stages, self.num_repeats, self.groups_per_repeat
    missing = p * r * k - self.num_groups
    if missing:
      # Not zeros, whose gradients may be NaN.
      last = jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))
      x = jnp.concatenate([x, last])
    return jnp.moveaxis(x.reshape(r, p, k, *x.shape[1:]), 0, 1)

  def _merge(self, x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 1, 0)
    return x.reshape(-1, *x.shape[3:])[: self.num_groups]


def select_repeat(tree: Any, repeat: jax.Array) -> Any:
  """Returns the entries of one repeat: [K,...] of arrays [R,K,...]."""

  def one(x: jax.Array) -> jax.Array:
    if x.shape[0] == 1:
      return x[0]
    return jax.lax.dynamic_index_in_dim(x, repeat, keepdims=False)

  return jax.tree.map(one, tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatches:
  """Assignment of the sequences of a batch to microbatches.

  Microbatch i of M has sequences i, i + M, ..., as in a learner: the sequences
  of each device are spread over all microbatches, and none changes its device.
  While streaming, the batch is first split into one segment for each stage, and
  each segment into M / P microbatches in that way, so that a batch that is also
  sharded over the stages is not moved.

  Attributes:
    num_microbatches: M.
    num_segments: Segments of consecutive sequences; divides M.
  """

  num_microbatches: int
  num_segments: int = 1

  @property
  def per_segment(self) -> int:
    """Microbatches of a segment."""
    return self.num_microbatches // self.num_segments

  def unfold(self, x: jax.Array) -> jax.Array:
    """Returns [segments,size,per_segment,...] of [batch,...]; moves nothing."""
    return x.reshape(self.num_segments, -1, self.per_segment, *x.shape[1:])

  def fold(self, x: jax.Array) -> jax.Array:
    """Undoes `unfold`."""
    return x.reshape(-1, *x.shape[3:])

  def split(self, tree: Any) -> Any:
    """Returns arrays [segments,per_segment,size,...] of arrays [batch,...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(self.unfold(x), 2, 1), tree)

  def merge(self, tree: Any) -> Any:
    """Undoes `split`."""
    return jax.tree.map(lambda x: self.fold(jnp.moveaxis(x, 1, 2)), tree)

  def merge_flat(self, x: jax.Array) -> jax.Array:
    """Returns [batch,...] of an array [M,size,...]."""
    shape = (self.num_segments, self.per_segment, *x.shape[1:])
    return self.merge(x.reshape(shape))


def count_microbatches(
  batch: int,
  *,
  num_microbatches: int | None,
  microbatch_size: int | None,
  shards: int,
  shrink: bool,
) -> int:
  """Returns the number of microbatches of a batch.

  Args:
    batch: Sequences of the batch.
    num_microbatches: Requested number, or None.
    microbatch_size: Requested sequences of each, or None.
    shards: How many shards of a microbatch the mesh has.
    shrink: Whether to use fewer microbatches if the requested ones do not
      divide the batch, or the shards do not divide each.

  Raises:
    ValueError: They do not divide the batch.
  """
  if microbatch_size is None:
    assert num_microbatches is not None
    wanted, field = num_microbatches, "num_microbatches"
    fits = batch % wanted == 0
  else:
    wanted, field = -(-batch // microbatch_size), "microbatch_size"
    fits = batch % microbatch_size == 0
  if shrink:
    # A microbatch of one sequence is not sharded.
    candidates = [
      n
      for n in range(1, min(wanted, batch) + 1)
      if batch % n == 0 and (batch == n or batch // n % shards == 0)
    ]
    return max(candidates, default=1)
  if fits:
    return wanted
  value = num_microbatches if microbatch_size is None else microbatch_size
  divisors = [n for n in range(1, batch + 1) if batch % n == 0]
  shown = ", ".join(map(str, divisors[:8]))
  more = ", ..." if len(divisors) > 8 else ""
  raise ValueError(
    f"PipelinedStack.{field} ({value}) must divide the batch of {batch}"
    f" sequences; use {shown}{more}."
  )
