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
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers.attention import cache_variables, kv_cache
from paxon.sharding import checks


class SlidingCache(kv_cache.Cache):
  """Stores the last tokens of each sequence.

  If `cache_length` is less than the window, there are that many slots, and a
  token beyond them is stored as NaN. Otherwise the buffer is never full.

  Attributes:
    window: Number of stored tokens; at least the window (or chunk) of the
      layer, which checks it.
    storage: Format of stored keys and values.
  """

  window: int
  storage: kv_cache.Storage = kv_cache.AsIs()

  # Never split over devices: it is short, and its slots have no order.
  slot_axis: ClassVar[str | None] = None

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "window")

  @property
  def reach(self) -> int | None:
    """The window."""
    return self.window

  @nn.nowrap
  def fill(self, new: kv_cache.KeyValues, cache_length: int) -> None:
    """Makes the cache with the last tokens of each prompt."""
    count = min(self.window, cache_length)
    total, write = self.place(
      new.segment_ids, jnp.zeros_like(new.segment_ids[:, 0]), count
    )
    slots = {}
    for name, x in self.to_arrays(new).items():
      empty = cache_variables.empty(x, count)[None]
      slots[name] = write(empty, x, jnp.int32(0))[0]
    cache_variables.save(self, slots, total, slot_axis=self.slot_axis)

  @staticmethod
  def place(
    segment_ids: jax.Array, index: jax.Array, count: int
  ) -> tuple[jax.Array, cache_variables.Write]:
    """Assigns slots to real tokens; the index counts those of each sequence.

    Padding, and all but the last of the tokens for one slot, get the slot
    `count`, which does not exist.
    """
    is_real = segment_ids != 0
    order = index[:, None] + jnp.cumsum(is_real, axis=1, dtype=index.dtype) - 1
    total = index + jnp.sum(is_real, axis=1, dtype=index.dtype)
    is_kept = is_real & (order >= total[:, None] - count)
    slots = jnp.where(is_kept, order % count, count)
    return total, functools.partial(cache_variables.write_slots, slots=slots)
