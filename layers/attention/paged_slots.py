"""Pages of a cache: slots in blocks that sequences of a batch may share.

A paged cache has one pool of pages instead of slots for each sequence: arrays
[P,C] and, per head, [P,K,C,...] in place of [B,S] and [B,K,S,...], and a table
`pages` [B,N]. Slot `s` of a sequence is slot `s % C` of page
`pages[b, s // C]`. Page 0 belongs to no sequence: tokens without a slot are
written there.

The positions and segments of tokens are small and stay in [B,S]. Slots without
a token (segment 0) are read as zeros whatever their page holds, so that layers
get the same content as from a contiguous cache, bit by bit.

`with_pages` makes pages of a `ContiguousCache` that exists, so any model may
have them. Caches without an axis `kv_length`, such as ring buffers, stay.

Letters: L layers, B batch, P pages, N pages of a sequence, C slots of a page,
K key/value heads, S slots, T new tokens.
"""

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

from paxon.sharding import axes, variables

# The table of a paged cache.
PAGES: Final = "pages"
# Variables of a cache that have no pages.
_TOKENS: Final = ("positions", "segment_ids")
_INDEX: Final = "index"


def read(
  pool: jax.Array, layer: jax.Array, pages: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """Returns the slots [B,S] or [B,K,S,...] of one layer.

  Args:
    pool: [L,P,C] or [L,P,K,C,...].
    layer: Int of rank 0.
    pages: Int [B,N].
    segment_ids: Int [B,S].
  """
  axis = min(pool.ndim - 2, 2)
  # Layer and page in one index, so that no layer is copied.
  at = layer * pool.shape[1] + pages
  found = pool.reshape(-1, *pool.shape[2:])
  found = found.at[at].get(mode="promise_in_bounds")
  found = jnp.moveaxis(found, 1, axis)
  found = found.reshape(*found.shape[:axis], -1, *found.shape[axis + 2 :])
  batch, count = segment_ids.shape
  found = jax.lax.slice_in_dim(found, 0, count, axis=axis)
  shape = [1] * found.ndim
  shape[0], shape[axis] = batch, count
  is_token = segment_ids.reshape(shape) != 0
  return jnp.where(is_token, found, jnp.zeros((), found.dtype))


def write(
  pool: jax.Array,
  new: jax.Array,
  layer: jax.Array,
  pages: jax.Array,
  slots: jax.Array,
) -> jax.Array:
  """Returns the pool with tokens [B,T] or [B,K,T,...] in their slots.

  `slots` are int [B,T]; -1 is no slot.
  """
  axis = min(pool.ndim - 2, 2)
  size = pool.shape[axis + 1]
  number = jnp.maximum(slots, 0) // size
  page = jnp.take_along_axis(pages, number, axis=1)
  page = jnp.where(slots >= 0, page, 0)
  index = (layer, page, slots % size)
  if axis == 2:
    index = (layer, page, slice(None), slots % size)
  new = jnp.moveaxis(new, axis, 1)
  if pool.shape[0] == 1:
    # As in `cache_variables.write_from`: XLA:CPU would copy the pool.
    pool = pool[0].at[index[1:]].set(new, mode="promise_in_bounds")
    return pool[None]
  return pool.at[index].set(new, mode="promise_in_bounds")


def with_pages(cache: Any, *, num_pages: int, length: int) -> Any:
  """Returns an empty paged cache for the sequences of a cache.

  Args:
    cache: Boxed variables, with an index for each sequence
      (`decoding.cache_rows.with_row_index`).
    num_pages: Number of pages for all sequences, without page 0.
    length: Number of slots of a page.
  """
  if not isinstance(cache, Mapping):
    return cache
  if _INDEX not in cache:
    return {
      name: with_pages(x, num_pages=num_pages, length=length)
      for name, x in cache.items()
    }
  found, count = dict(cache), 0
  for name, box in cache.items():
    if name in _TOKENS or axes.KV_LENGTH not in box.names:
      continue
    batch, slot = (box.names.index(a) for a in (axes.BATCH, axes.KV_LENGTH))
    shape, names = list(box.value.shape), list(box.names)
    count = -(-shape[slot] // length)
    shape[batch], shape[slot] = num_pages + 1, length
    names[batch] = names[slot] = None
    value = jnp.zeros(shape, box.value.dtype)
    found[name] = box.replace(value=value, names=tuple(names))
  if count:
    index = cache[_INDEX]
    found[PAGES] = index.replace(
      value=jnp.zeros((*index.value.shape, count), jnp.int32),
      names=(*index.names, None),
    )
  return found


def is_paged(cache: Any) -> bool:
  """Returns whether pages hold all that a cache keeps of tokens."""
  if not isinstance(cache, Mapping):
    return False
  return PAGES in cache or (
    bool(cache) and all(is_paged(part) for part in cache.values())
  )


def with_table(cache: Any, table: jax.Array) -> Any:
  """Returns a paged cache with the pages [B,N] of each sequence."""

  def put(path: Any, box: Any) -> Any:
    if path[-1].key != PAGES:
      return box
    return box.replace(value=jnp.broadcast_to(table, box.value.shape))

  return jax.tree_util.tree_map_with_path(put, cache, is_leaf=_is_box)


def begin_at(cache: Any, count: jax.Array) -> Any:
  """Returns a paged cache in which each sequence has `count` tokens.

  These have the positions from 0 on and segment 1; `count` has rank 0. Caches
  without pages stay as they are.
  """
  if not isinstance(cache, Mapping):
    return cache
  if PAGES not in cache:
    return {name: begin_at(x, count) for name, x in cache.items()}
  found = dict(cache)
  for name in _TOKENS:
    box = cache[name]
    at = jnp.arange(box.value.shape[-1], dtype=box.value.dtype)
    value = at if name == "positions" else jnp.ones_like(at)
    value = jnp.where(at < count, value, 0)
    found[name] = box.replace(value=jnp.broadcast_to(value, box.value.shape))
  index = cache[_INDEX]
  value = jnp.full_like(index.value, count)
  return {**found, _INDEX: index.replace(value=value)}


def _is_box(leaf: Any) -> bool:
  return isinstance(leaf, variables.Variable)
