"""The variables in which a cache keeps its slots, alone or in a stack.

A cache has an array [B,S,...] for each thing that it keeps, and `index`, how
many tokens it has seen. In a decoding step of a stack these are the arrays of
all layers (`layers.stacked_cache`), of which each cache reads and writes its
layer's; a cache that uses these functions need not know.

Letters: L layers, B batch, T new tokens, S slots, K key/value heads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import stacked_cache
from paxon.sharding import axes, variables

COLLECTION = stacked_cache.COLLECTION
_INDEX = stacked_cache.INDEX


def is_filled(cache: nn.Module) -> bool:
  """Whether a prefill has made the variables of this cache."""
  return cache.has_variable(COLLECTION, _INDEX)


def load(cache: nn.Module) -> tuple[dict[str, jax.Array], jax.Array]:
  """Returns the arrays of a cache by variable, and its index."""
  kept = dict(variables.unbox(cache.variables[COLLECTION]))
  layer = kept.pop(stacked_cache.LAYER, None)
  if layer is not None:
    # In a stack, with those of all layers; see `stacked_cache`.
    kept = {n: stacked_cache.at_layer(x, layer) for n, x in kept.items()}
  return kept, kept.pop(_INDEX)


def append(
  cache: nn.Module,
  new: Mapping[str, jax.Array],
  write: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
  *,
  total: jax.Array,
  slot_axis: str | None,
) -> dict[str, jax.Array]:
  """Writes tokens into slots, in place where it can.

  Args:
    cache: Whose variables they are.
    new: Arrays [B,T,...] by variable.
    write: `(slots [L,B,S,...], tokens [B,T,...], number of the layer) -> slots`
      for each variable, such as a function of `slot_writes`.
    total: The index of the cache from here on.
    slot_axis: Logical axis of the slots.

  Returns:
    All slots [B,S,...] by variable.
  """
  stacked = dict(variables.unbox(cache.variables[COLLECTION]))
  layer = stacked.get(stacked_cache.LAYER)
  if layer is None:
    first = jnp.int32(0)
    slots = {n: write(stacked[n][None], x, first)[0] for n, x in new.items()}
    save(cache, slots, total, slot_axis=slot_axis)
    return slots
  for name, x in new.items():
    cache.put_variable(COLLECTION, name, write(stacked[name], x, layer))
  total = stacked_cache.with_layer(stacked[_INDEX], total, layer)
  cache.put_variable(COLLECTION, _INDEX, total)
  return load(cache)[0]


def save(
  cache: nn.Module,
  slots: Mapping[str, jax.Array],
  index: int | jax.Array,
  *,
  slot_axis: str | None,
) -> None:
  """Makes or replaces the variables of a cache.

  Args:
    cache: Whose variables they are.
    slots: Arrays [B,S,...] by variable.
    index: How many tokens came so far: a number, or Int [B].
    slot_axis: Logical axis of the slots.
  """
  index = jnp.asarray(index, jnp.int32)
  arrays = {**slots, _INDEX: index}
  stacked = cache.variables.get(COLLECTION, {})
  layer = stacked.get(stacked_cache.LAYER)
  if layer is not None:
    for name, x in arrays.items():
      whole = stacked_cache.with_layer(variables.unbox(stacked[name]), x, layer)
      cache.put_variable(COLLECTION, name, whole)
    return
  for name, x in slots.items():
    _put(cache, name, x, slot_axes(x.shape, slot_axis))
  _put(cache, _INDEX, index, (axes.BATCH,)[: index.ndim])


def slot_axes(
  shape: Sequence[int], slot_axis: str | None
) -> tuple[str | None, ...]:
  """Returns the logical axes of an array [B,S] or [B,S,K,...] of a cache."""
  # One head for all (multi-query, latent) is whole on every device.
  heads = axes.KV_HEADS if len(shape) > 2 and shape[2] > 1 else None
  return (axes.BATCH, slot_axis, heads, axes.HEAD_DIM)[: len(shape)]


def _put(
  cache: nn.Module, name: str, x: jax.Array, names: tuple[str | None, ...]
) -> None:
  # Linen unboxes what is read, and keeps the box around what is written.
  init: Callable[[], Any] = variables.boxed(
    nn.initializers.zeros, names, shape=x.shape, dtype=x.dtype
  )
  cache.variable(COLLECTION, name, init).value = x
