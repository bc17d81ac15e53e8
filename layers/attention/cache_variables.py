"""The variables in which a cache keeps its slots, alone or in a stack.

A cache has an array for each thing that it keeps, [B,S] or, of each head,
[B,K,S,...] (`slot_writes`), and `index`, how many tokens it has seen. In a
decoding step of a stack these are the arrays of all layers
(`layers.stacked_cache`), of which each cache reads and writes its layer's; a
cache that uses these functions need not know.

Where tokens stand, their positions and segments and the index, is the same in
all layers of a stack that hands on what it was given. Then the stack keeps it
once a step (`stacked_cache.CommonTokens`), and no layer writes it.

Letters: L layers, B batch, T new tokens, S slots, K key/value heads.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import stacked_cache
from paxon.sharding import axes, variables

COLLECTION = stacked_cache.COLLECTION
_INDEX = stacked_cache.INDEX
# Variables that say where tokens stand.
_PLACES = ("positions", "segment_ids")

# `(slots [L,B,(K,)S,...], tokens [B,(K,)T,...], number of the layer) -> slots`,
# for each variable, such as a function of `slot_writes`.
Write = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# Which slots tokens get: `(their segments [B,T], index before, number of slots)
# -> (index after, what writes them)`.
Place = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, Write]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
  """What a cache holds.

  Attributes:
    slots: Arrays [B,S] and [B,K,S,...] by variable.
    index: How many tokens came so far: Int of rank 0, or [B].
    common: Who keeps where tokens stand, if not the cache.
  """

  slots: Mapping[str, jax.Array]
  index: jax.Array
  common: stacked_cache.CommonTokens | None = None

  @property
  def count(self) -> int:
    """The number of slots."""
    return self.slots[_PLACES[0]].shape[1]


def is_filled(cache: nn.Module) -> bool:
  """Whether a prefill has made the variables of this cache."""
  return cache.has_variable(COLLECTION, _INDEX)


def load(cache: nn.Module, *tokens: jax.Array) -> Kept:
  """Returns what a cache holds.

  Args:
    cache: Whose variables they are.
    *tokens: Where new tokens stand, as the cache was given it, if it is to
      append them.
  """
  slots = _stored(cache)
  layer = slots.pop(stacked_cache.LAYER, None)
  first = slots.pop(stacked_cache.FIRST, None)
  common = slots.pop(stacked_cache.COMMON, None)
  if common is not None and not (tokens and common.includes(*tokens)):
    common = None
  if layer is not None:
    # In a stack, with those of all layers; see `stacked_cache`.
    shared = () if common is None else (*_PLACES, _INDEX)
    slots = {
      n: stacked_cache.at_layer(x, first if n in shared else layer)
      for n, x in slots.items()
    }
  return Kept(index=slots.pop(_INDEX), slots=slots, common=common)


def append(
  cache: nn.Module,
  kept: Kept,
  new: Mapping[str, jax.Array],
  place: Place,
  *,
  slot_axis: str | None,
) -> dict[str, jax.Array]:
  """Writes tokens into slots, in place where it can.

  Args:
    cache: Whose variables they are.
    kept: What `load` returned for these tokens.
    new: Arrays [B,T] and [B,K,T,...] by variable.
    place: Which slots they get; it reads no other arrays of the layer.
    slot_axis: Logical axis of the slots.

  Returns:
    All slots by variable.
  """
  places = {name: new[name] for name in _PLACES}
  total, write = place(new["segment_ids"], kept.index, kept.count)
  stacked = _stored(cache)
  layer = stacked.get(stacked_cache.LAYER)
  if layer is None:
    slots = {n: _written(write, kept.slots[n], x) for n, x in new.items()}
    save(cache, slots, total, slot_axis=slot_axis)
    return slots
  slots = {}
  if kept.common is not None:
    after = functools.partial(_after, new=places, place=place)
    kept.common.leave(cache, after)
    slots = after({**kept.slots, _INDEX: kept.index})
    del slots[_INDEX]
  else:
    total = stacked_cache.with_layer(stacked[_INDEX], total, layer)
    cache.put_variable(COLLECTION, _INDEX, total)
  for name in new.keys() - slots.keys():
    whole = write(stacked[name], new[name], layer)
    cache.put_variable(COLLECTION, name, whole)
    slots[name] = stacked_cache.at_layer(whole, layer)
  return slots


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
    slots: Arrays [B,S] and [B,K,S,...] by variable.
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
  """Returns the logical axes of an array [B,S] or [B,K,S,...] of a cache."""
  if len(shape) == 2:
    return axes.BATCH, slot_axis
  # One head for all (multi-query, latent) is whole on every device.
  heads = axes.KV_HEADS if shape[1] > 1 else None
  return (axes.BATCH, heads, slot_axis, axes.HEAD_DIM)[: len(shape)]


def _stored(cache: nn.Module) -> dict[str, Any]:
  return dict(variables.unbox(cache.variables[COLLECTION]))


def _after(
  kept: Mapping[str, jax.Array],
  *,
  new: Mapping[str, jax.Array],
  place: Place,
) -> dict[str, jax.Array]:
  """Returns where the tokens of a cache stand after new ones, and its index."""
  count = kept[_PLACES[0]].shape[1]
  total, write = place(new["segment_ids"], kept[_INDEX], count)
  slots = {name: _written(write, kept[name], x) for name, x in new.items()}
  return {**slots, _INDEX: total}


def _written(write: Write, slots: jax.Array, new: jax.Array) -> jax.Array:
  """Returns the slots of one layer with tokens written."""
  return write(slots[None], new, jnp.int32(0))[0]


def _put(
  cache: nn.Module, name: str, x: jax.Array, names: tuple[str | None, ...]
) -> None:
  # Linen unboxes what is read, and keeps the box around what is written.
  init: Callable[[], Any] = variables.boxed(
    nn.initializers.zeros, names, shape=x.shape, dtype=x.dtype
  )
  cache.variable(COLLECTION, name, init).value = x
