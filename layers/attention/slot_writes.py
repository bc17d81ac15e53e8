"""New tokens written into the slots of a cache, in place where XLA can.

The arrays are those of all layers of a stack, [L,B,S,...]; tokens [B,T,...] are
written for one layer, so that nothing else of the stack is touched. A cache
outside of a stack is one of a single layer.

No index is ever out of range: XLA looks through a slice of a slice without the
clamping of the first, and would read "what was there before" elsewhere.
"""

import jax
import jax.numpy as jnp

from paxon.layers import stacked_cache


def from_slot(
  whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
) -> jax.Array:
  """Returns the arrays with tokens in the slots from `first` on, in all rows.

  Args:
    whole: Slots [L,B,S,...].
    new: Tokens [B,T,...].
    layer: Whose slots, int of rank 0.
    first: The first slot, likewise; as large as it may be if it is larger.
  """
  at = (layer, 0, first) + (0,) * (new.ndim - 2)
  return jax.lax.dynamic_update_slice(whole, new[None], at)


def one_or_none(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slot: jax.Array
) -> jax.Array:
  """Returns the arrays with one token a row in a slot, if it exists.

  Only this slot is read and written, not all of them.

  Args:
    whole: Slots [L,B,S,...].
    new: Tokens [B,1,...].
    layer: Whose slots, int of rank 0.
    slot: The slot of all rows, likewise; nothing is written if there is no
      such slot.
  """
  at = jnp.clip(slot, 0, whole.shape[2] - 1)
  start = (layer, 0, at) + (0,) * (new.ndim - 2)
  before = jax.lax.dynamic_slice(whole, start, (1, *new.shape))
  return from_slot(whole, jnp.where(at == slot, new, before[0]), layer, at)


def to_slots(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slots: jax.Array
) -> jax.Array:
  """Returns the arrays with each token in a slot of its own.

  Args:
    whole: Slots [L,B,S,...].
    new: Tokens [B,T,...].
    layer: Whose slots, int of rank 0.
    slots: The slot of each token, int [B,T]; no two of a row are the same.
      Tokens with a slot that does not exist are dropped.
  """
  if new.shape[1] == 1:
    return _one_each(whole, new, layer, slots)
  count = whole.shape[2]
  # Those that are dropped share one more slot.
  slots = jnp.where((slots >= 0) & (slots < count), slots, count)

  def rows(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    more = jnp.concatenate([old, old[:1]])
    return more.at[slots].set(new, mode="promise_in_bounds")[:count]

  old = stacked_cache.at_layer(whole, layer)
  return stacked_cache.with_layer(whole, jax.vmap(rows)(old, new, slots), layer)


def _one_each(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slots: jax.Array
) -> jax.Array:
  """Returns the arrays with one token a row in a slot of the row's own.

  By `gather` and `scatter` with rows as their batch, wherever these stand:
  `vmap` would move the axis of rows, and with it the whole array.
  """
  at = jnp.clip(slots, 0, whole.shape[2] - 1)
  index = jnp.concatenate([jnp.full_like(at, layer), at], axis=1)
  window = tuple(range(1, new.ndim - 1))
  before = jax.lax.gather(
    whole,
    index,
    jax.lax.GatherDimensionNumbers(
      offset_dims=window,
      collapsed_slice_dims=(0, 2),
      start_index_map=(0, 2),
      operand_batching_dims=(1,),
      start_indices_batching_dims=(0,),
    ),
    slice_sizes=(1, 1, 1, *new.shape[2:]),
    mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
  exists = (at == slots).reshape(-1, *(1,) * len(window))
  return jax.lax.scatter(
    whole,
    index,
    jnp.where(exists, new[:, 0], before),
    jax.lax.ScatterDimensionNumbers(
      update_window_dims=window,
      inserted_window_dims=(0, 2),
      scatter_dims_to_operand_dims=(0, 2),
      operand_batching_dims=(1,),
      scatter_indices_batching_dims=(0,),
    ),
    unique_indices=True,
    mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
