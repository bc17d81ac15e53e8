"""A cache whose slots are split over devices, for long contexts.

The slots have the logical axis `length`, which the rules split over the mesh
axis `sequence`. A new token is written by the device that has its slot;
attention over the slots reduces maxima, sums and weighted values over devices.
Keys and values are never moved between devices.

Letters: B batch, T new tokens, S slots, K key/value heads, H head_dim.
"""

import functools
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers.attention import cache_variables, kv_cache
from paxon.sharding import axes, logical


class SequenceCache(kv_cache.Cache):
  """Stores every token, in the order of arrival, in slots that are split.

  The number of slots is rounded up to a multiple of the devices. Tokens beyond
  the last slot turn the last slots into NaN, as in `ContiguousCache`.

  Attributes:
    storage: Format of stored keys and values.
  """

  storage: kv_cache.Storage = kv_cache.AsIs()

  slot_axis: ClassVar[str | None] = axes.LENGTH

  @nn.nowrap
  def fill(self, new: kv_cache.KeyValues, cache_length: int) -> None:
    """Makes the cache, with split slots."""
    shards = logical.num_shards((axes.LENGTH,))[0]
    count = -(-cache_length // shards) * shards
    slots = {
      name: _constrain(kv_cache.pad_slots(x, count))
      for name, x in self.to_arrays(new).items()
    }
    length = new.key.shape[1]
    cache_variables.save(self, slots, length, slot_axis=self.slot_axis)

  @staticmethod
  def place(
    segment_ids: jax.Array, index: jax.Array, count: int
  ) -> tuple[jax.Array, cache_variables.Write]:
    """Assigns the next slot to each token.

    Raises:
      ValueError: The index is not shared by all sequences.
    """
    if index.ndim:
      raise ValueError(
        "SequenceCache has one index for all sequences, got one of shape"
        f" {index.shape}; use ContiguousCache."
      )
    length = segment_ids.shape[1]
    # As `dynamic_update_slice` does if there are too few slots.
    first = jnp.minimum(index, count - length)
    return index + length, functools.partial(_write, first=first)


def _write(
  whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
) -> jax.Array:
  """Returns slots with tokens from `first` on; each device writes its own.

  See `cache_variables.write_from`.
  """
  axis = cache_variables.slot_axis(new)

  def write(
    whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
  ) -> jax.Array:
    count = new.shape[axis]
    if count == 1:
      return cache_variables.write_one(whole, new, layer, first)
    slots = first + jnp.arange(count, dtype=first.dtype)
    slots = jnp.broadcast_to(slots[None], (new.shape[0], count))
    return cache_variables.write_slots(whole, new, layer, slots)

  one_layer = whole.shape[1:]
  names = cache_variables.slot_axes(one_layer, axes.LENGTH)
  spec = logical.partition_spec(one_layer, names)
  if spec is None or logical.count_shards(spec[axis]) == 1:
    return write(whole, new, layer, first)
  split = spec[axis]

  def write_shard(
    whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
  ) -> jax.Array:
    before = jax.lax.axis_index(split) * whole.shape[axis + 1]
    return write(whole, new, layer, first - before)

  tokens = jax.P(*spec[:axis], None, *spec[axis + 1 :])
  stacked = jax.P(None, *spec)
  return jax.shard_map(
    write_shard,
    in_specs=(stacked, tokens, jax.P(), jax.P()),
    out_specs=stacked,
  )(whole, new, layer, first)


def _constrain(x: jax.Array) -> jax.Array:
  return logical.constrain(x, cache_variables.slot_axes(x.shape, axes.LENGTH))
