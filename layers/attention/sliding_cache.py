"""A ring buffer of keys and values, for layers with a window.

  slot(token) = (number of earlier real tokens of its sequence) mod window

A new token takes the slot of the token that has just left the window, so memory
does not depend on the length. Padding takes no slot: a batch may hold prompts
of several lengths, and each sequence has its own count.

It is exact if the tokens of each document are contiguous and positions of
neighbours differ by one.

Letters: B batch, T new tokens, S slots, K key/value heads, H head_dim.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers.attention import cache_variables, kv_cache
from paxon.sharding import checks


class SlidingCache(nn.Module):
  """Stores the last tokens of each sequence.

  Attributes:
    window: Number of stored tokens; at least the window (or chunk) of the
      layer, which checks it.
    storage: Format of stored keys and values.
  """

  window: int
  storage: kv_cache.Storage = kv_cache.AsIs()

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "window")

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

    If `cache_length` is less than the window, there are that many slots, and a
    token beyond them is stored as NaN. Otherwise the buffer is never full.

    Args:
      key: Keys of the new tokens, rotated.
      value: Their values; None if the layer makes values from keys.
      positions: Their positions.
      segment_ids: Their segments.
      cache_length: Makes a new cache, for this number of tokens.

    Returns:
      The new tokens alone; while decoding also those kept before.

    Raises:
      ValueError: The prompt is longer than `cache_length`, there is a cache
        already, or it has other rows.
    """
    new = kv_cache.tokens(key, value, positions, segment_ids, reach=self.window)
    if cache_length is not None:
      kv_cache.check_prefill(self, new, cache_length)
      count = min(self.window, cache_length)
      total, target = _slots(
        segment_ids, jnp.zeros_like(segment_ids[:, 0]), count
      )
      filled = {
        name: cache_variables.write_slots(
          cache_variables.empty(x, count)[None],
          x,
          jnp.int32(0),
          target,
        )[0]
        for name, x in kv_cache.packed(new, self.storage).items()
      }
      cache_variables.save(self, filled, total, slot_axis=None)
      return new
    if not cache_variables.is_filled(self):
      return new
    # Never split over devices: it is short, and its slots have no order.
    return kv_cache.appended(self, new, _in_a_ring, slot_axis=None)


def _in_a_ring(
  segment_ids: jax.Array, index: jax.Array, count: int
) -> tuple[jax.Array, cache_variables.Write]:
  total, target = _slots(segment_ids, index, count)
  return total, functools.partial(cache_variables.write_slots, slots=target)


def _slots(
  segment_ids: jax.Array, index: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
  """Returns how many real tokens there are then, [B], and their slots [B,T].

  Padding, and all but the last of the tokens for one slot, get the slot
  `count`, which does not exist.

  Args:
    segment_ids: Of the new tokens, [B,T].
    index: How many real tokens each row had before, int [B].
    count: Number of slots.
  """
  is_real = segment_ids != 0
  order = index[:, None] + jnp.cumsum(is_real, axis=1, dtype=index.dtype) - 1
  total = index + jnp.sum(is_real, axis=1, dtype=index.dtype)
  is_kept = is_real & (order >= total[:, None] - count)
  return total, jnp.where(is_kept, order % count, count)
