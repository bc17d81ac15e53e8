"""A cache whose slots are split over devices, for long contexts.

The slots have the logical axis `length`, which the rules split over the mesh
axis `sequence`. A new token is written by the device that has its slot;
attention over the slots reduces maxima, sums and weighted values over devices.
Keys and values are never moved between devices.

Letters: B batch, T new tokens, S slots, K key/value heads, H head_dim.
"""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers.attention import cache_variables, kv_cache
from paxon.sharding import axes, logical, rules


class SequenceCache(nn.Module):
  """Stores every token, in the order of arrival, in slots that are split.

  Attributes:
    storage: Format of stored keys and values.
  """

  storage: kv_cache.Storage = kv_cache.AsIs()

  @nn.compact
  def __call__(
    self,
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads value_dim"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int | None = None,
  ) -> kv_cache.KeyValues:
    """Stores the new tokens and returns all that may be attended to.

    Tokens beyond the last slot turn the last slots into NaN, as in
    `ContiguousCache`.

    Args:
      key: Keys of the new tokens, rotated.
      value: Their values; None if the layer makes values from keys.
      positions: Their positions.
      segment_ids: Their segments.
      cache_length: Makes a new cache with this number of slots, rounded up to
        a multiple of the devices.

    Returns:
      The new tokens alone, or all slots while decoding.

    Raises:
      ValueError: The slots are too few, there is a cache already, or it has
        other rows.
    """
    new = kv_cache.tokens(key, value, positions, segment_ids)
    length = key.shape[1]
    if cache_length is not None:
      kv_cache.check_prefill(self, new, cache_length)
      shards = _shards(_split(axes.LENGTH))
      count = -(-cache_length // shards) * shards
      filled = {
        name: _placed(kv_cache.padded(x, count))
        for name, x in kv_cache.packed(new, self.storage).items()
      }
      cache_variables.save(self, filled, length, slot_axis=axes.LENGTH)
      return new
    if not cache_variables.is_filled(self):
      return new
    return kv_cache.appended(self, new, _in_order, slot_axis=axes.LENGTH)


def _in_order(
  segment_ids: jax.Array, index: jax.Array, count: int
) -> tuple[jax.Array, cache_variables.Write]:
  length = segment_ids.shape[1]
  # As `dynamic_update_slice` does, where there are too few slots.
  first = jnp.minimum(index, count - length)
  return index + length, functools.partial(_write, first=first)


def _write(
  whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
) -> jax.Array:
  """Returns slots with tokens from `first` on, each device its own.

  Args:
    whole: Slots of all layers, [L,B,S] or [L,B,K,S,...].
    new: Tokens [B,T] or [B,K,T,...].
    layer: Whose slots.
    first: The slot of the first token.
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
  if spec is None or _shards(spec[axis]) == 1:
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


def _placed(x: jax.Array) -> jax.Array:
  return logical.constrain(x, cache_variables.slot_axes(x.shape, axes.LENGTH))


def _split(axis: str) -> rules.MeshAxes:
  """Returns the mesh axes that split a logical axis."""
  active = nn.get_logical_axis_rules()
  if not active:
    return None
  return rules.to_partition_spec((axis,), rules=tuple(active))[0]


def _shards(entry: rules.MeshAxes) -> int:
  """Returns into how many parts mesh axes split."""
  names = (entry,) if isinstance(entry, str) else entry or ()
  sizes = jax.sharding.get_abstract_mesh().shape
  return math.prod(sizes[name] for name in names)
