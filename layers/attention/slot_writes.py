"""New tokens written into the slots of a cache, in place where XLA can.

What there is of each head is kept with the heads before the slots, [B,K,S,...]:
the slots of a head are then one block of memory, as the products of attention
want it, and need not be turned at each step. What there is once is [B,S].
`slot_axis` says which is which.

The arrays are those of all layers of a stack, [L,B,K,S,...]; tokens
[B,K,T,...] are written for one layer, so that nothing else of the stack is
touched. A cache outside of a stack is one of a single layer.

Letters: L layers, B batch, K key/value heads, S slots, T new tokens.

No index is ever out of range: XLA looks through a slice of a slice without the
clamping of the first, and would read "what was there before" elsewhere.
"""

import jax
import jax.numpy as jnp

from paxon.layers import stacked_cache


def slot_axis(x: jax.Array | jax.ShapeDtypeStruct) -> int:
  """Returns which axis of one layer's array has its slots, or tokens."""
  return min(x.ndim - 1, 2)


def empty(new: jax.Array, count: int) -> jax.Array:
  """Returns one layer's slots, as many as asked for, of what tokens are."""
  axis = slot_axis(new)
  return jnp.zeros(
    (*new.shape[:axis], count, *new.shape[axis + 1 :]), new.dtype
  )


def from_slot(
  whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
) -> jax.Array:
  """Returns the arrays with tokens in the slots from `first` on, in all rows.

  Args:
    whole: Slots, [L,B,S] or [L,B,K,S,...].
    new: Tokens, [B,T] or [B,K,T,...].
    layer: Whose slots, int of rank 0.
    first: The first slot, likewise; as large as it may be if it is larger.
  """
  at = _begin(new, layer, first)
  return jax.lax.dynamic_update_slice(whole, new[None], at)


def one_or_none(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slot: jax.Array
) -> jax.Array:
  """Returns the arrays with one token a row in a slot, if it exists.

  Only this slot is read and written, not all of them.

  Args:
    whole: Slots, [L,B,S] or [L,B,K,S,...].
    new: Tokens, [B,1] or [B,K,1,...].
    layer: Whose slots, int of rank 0.
    slot: The slot of all rows, likewise; nothing is written if there is no
      such slot.
  """
  at = jnp.clip(slot, 0, whole.shape[slot_axis(new) + 1] - 1)
  start = _begin(new, layer, at)
  before = jax.lax.dynamic_slice(whole, start, (1, *new.shape))
  return from_slot(whole, jnp.where(at == slot, new, before[0]), layer, at)


def to_slots(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slots: jax.Array
) -> jax.Array:
  """Returns the arrays with each token in a slot of its own.

  Args:
    whole: Slots, [L,B,S] or [L,B,K,S,...].
    new: Tokens, [B,T] or [B,K,T,...].
    layer: Whose slots, int of rank 0.
    slots: The slot of each token, int [B,T]; no two of a row are the same.
      Tokens with a slot that does not exist are dropped.
  """
  axis = slot_axis(new)
  if new.shape[axis] == 1:
    return _one_each(whole, new, layer, slots)
  count = whole.shape[axis + 1]
  # Those that are dropped share one more slot.
  slots = jnp.where((slots >= 0) & (slots < count), slots, count)

  def rows(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    more = jnp.concatenate([old, old[:1]])
    return more.at[slots].set(new, mode="promise_in_bounds")[:count]

  old = stacked_cache.at_layer(whole, layer)
  old, new = (jnp.moveaxis(x, axis, 1) for x in (old, new))
  written = jnp.moveaxis(jax.vmap(rows)(old, new, slots), 1, axis)
  return stacked_cache.with_layer(whole, written, layer)


def _begin(
  new: jax.Array, layer: jax.Array, slot: jax.Array
) -> tuple[jax.Array | int, ...]:
  """Returns where tokens begin in the arrays of all layers."""
  axis = slot_axis(new)
  inside = (slot if i == axis else 0 for i in range(new.ndim))
  return (layer, *inside)


def _one_each(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slots: jax.Array
) -> jax.Array:
  """Returns the arrays with one token a row in a slot of the row's own.

  By `gather` and `scatter` with rows as their batch, wherever these stand:
  `vmap` would move the axis of rows, and with it the whole array.
  """
  axis = slot_axis(new) + 1
  at = jnp.clip(slots, 0, whole.shape[axis] - 1)
  index = jnp.concatenate([jnp.full_like(at, layer), at], axis=1)
  token = jnp.squeeze(new, axis - 1)
  window = tuple(range(1, token.ndim))
  sizes = [1 if i in (0, 1, axis) else n for i, n in enumerate(whole.shape)]
  before = jax.lax.gather(
    whole,
    index,
    jax.lax.GatherDimensionNumbers(
      offset_dims=window,
      collapsed_slice_dims=(0, axis),
      start_index_map=(0, axis),
      operand_batching_dims=(1,),
      start_indices_batching_dims=(0,),
    ),
    slice_sizes=sizes,
    mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
  exists = (at == slots).reshape(-1, *(1,) * len(window))
  return jax.lax.scatter(
    whole,
    index,
    jnp.where(exists, token, before),
    jax.lax.ScatterDimensionNumbers(
      update_window_dims=window,
      inserted_window_dims=(0, axis),
      scatter_dims_to_operand_dims=(0, axis),
      operand_batching_dims=(1,),
      scatter_indices_batching_dims=(0,),
    ),
    unique_indices=True,
    mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
