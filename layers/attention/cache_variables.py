"""Variables of a cache: slots for tokens, written in place where XLA can.

A cache has one array for each thing it stores, [B,S] or, per head, [B,K,S,...],
and `index`, the number of tokens it has received, one for all sequences or [B].
Heads come before slots, so that the slots of a head are one block of memory, as
the matmuls of attention read them. `slot_axis` returns the axis of the slots.

In a decoding step of a stack a cache gets the arrays of all layers, [L,B,S] and
[L,B,K,S,...], and the number of its layer (`layers.stacks.stacked_cache`); it
then reads and writes its own layer only. A cache outside of a stack is treated
as a stack of one layer.

The positions and segments of stored tokens, and the index, are the same in all
layers of a stack that passes its own arrays on to its caches. The stack then
writes them once per step (`stacked_cache.CommonTokens`) and no layer does.

Letters: L layers, B batch, K key/value heads, S slots, T new tokens.

No index is ever out of range: XLA looks through a slice of a slice without the
clamping of the first, and would read the previous content elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Final, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers.attention import paged_slots
from paxon.sharding import axes, variables

COLLECTION: Final = "cache"
# The number of tokens that a cache has received.
INDEX: Final = "index"
# Variables that a stack adds to a cache: the number of the layer, the
# first layer of the stack, and the stack's `CommonTokens`.
LAYER: Final = "layer"
FIRST: Final = "first"
COMMON: Final = "common"

# Begins the names of variables [B,...] of tokens that the sequences of a batch
# share: adjacent ones, such as the samples of a prompt. Nothing is appended to
# them.
SHARED: Final = "shared_"

# Variables that are the same in all layers of a stack, besides the index.
_TOKENS = ("positions", "segment_ids")

# `(slots [L,B,(K,)S,...], tokens [B,(K,)T,...], number of the layer) -> slots`,
# for each variable, such as `write_slots`.
Write = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# Assigns slots to tokens: `(their segments [B,T], index before, number of
# slots) -> (index after, function that writes them)`.
Place = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, Write]]


@runtime_checkable
class Common(Protocol):
  """The part of `stacked_cache.CommonTokens` that caches use."""

  def includes(self, *arrays: jax.Array) -> bool:
    """Returns whether each is an array that the stack passed on."""
    ...

  def defer(
    self,
    cache: nn.Module,
    update: Callable[[Mapping[str, Any]], Mapping[str, Any]],
  ) -> None:
    """Leaves an update of variables of all layers' caches to the stack."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """The content of a cache.

  Attributes:
    slots: Arrays [B,S] and [B,K,S,...] by variable.
    index: Number of tokens received: Int of rank 0, or [B].
    common: Writes positions, segments and index in place of the cache, if set.
    pages: Int [B,N] of a paged cache (`paged_slots`).
    shared: Arrays like `slots` of tokens that sequences share.
  """

  slots: Mapping[str, jax.Array]
  index: jax.Array
  common: Common | None = None
  pages: jax.Array | None = None
  shared: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

  @property
  def count(self) -> int:
    """The number of slots."""
    return self.slots[_TOKENS[0]].shape[1]


def is_filled(cache: nn.Module) -> bool:
  """Returns whether a prefill has made the variables of this cache."""
  return cache.has_variable(COLLECTION, INDEX)


def load(cache: nn.Module, *tokens: jax.Array) -> Stored:
  """Returns the content of a cache.

  `tokens` are the positions and segments of new tokens that will be appended,
  the arrays that the cache was called with.
  """
  slots = _get_stored(cache)
  layer = slots.pop(LAYER, None)
  first = slots.pop(FIRST, None)
  common = slots.pop(COMMON, None)
  if common is not None and not (tokens and common.includes(*tokens)):
    common = None
  paged = _get_paged(slots)
  pools = {name: slots.pop(name) for name in paged}
  if layer is not None:
    # Arrays of all layers of a stack; see `stacked_cache`.
    same = (paged_slots.PAGES,)
    if common is not None:
      same = (*same, *_TOKENS, INDEX, *(SHARED + name for name in _TOKENS))
    slots = {
      n: at_layer(x, first if n in same else layer) for n, x in slots.items()
    }
  pages = slots.pop(paged_slots.PAGES, None)
  if pages is not None:
    segments = slots["segment_ids"]
    for name, x in pools.items():
      slots[name] = paged_slots.read(*_pool(x, layer), pages, segments)
  shared = {n.removeprefix(SHARED): slots.pop(n) for n in _get_shared(slots)}
  return Stored(
    index=slots.pop(INDEX),
    slots=slots,
    common=common,
    pages=pages,
    shared=shared,
  )


def append(
  cache: nn.Module,
  stored: Stored,
  new: Mapping[str, jax.Array],
  place: Place,
  *,
  slot_axis: str | None,
) -> dict[str, jax.Array]:
  """Writes tokens into slots, in place where XLA can; returns all slots.

  `stored` is the result of `load` for the tokens `new`, arrays [B,T] and
  [B,K,T,...] by variable. `place` reads no other arrays of the layer.
  """
  places = {name: new[name] for name in _TOKENS}
  total, write = place(new["segment_ids"], stored.index, stored.count)
  stacked = _get_stored(cache)
  layer = stacked.get(LAYER)
  paged = {name: new[name] for name in _get_paged(stacked)}
  new = {name: x for name, x in new.items() if name not in paged}
  if stored.pages is not None:
    _write_pages(cache, stored, paged, places["segment_ids"])
  # The same operations as for a contiguous cache, so that attention, which XLA
  # compiles together with them, rounds as with one.
  in_pages = {
    n: _write_layer(write, stored.slots[n], x) for n, x in paged.items()
  }
  if layer is None:
    slots = {n: _write_layer(write, stored.slots[n], x) for n, x in new.items()}
    save(cache, slots, total, slot_axis=slot_axis)
    return slots | in_pages
  slots = {}
  if stored.common is not None:
    after = functools.partial(_after, new=places, place=place)
    stored.common.defer(cache, after)
    slots = after({**stored.slots, INDEX: stored.index})
    del slots[INDEX]
  else:
    total = with_layer(stacked[INDEX], total, layer)
    cache.put_variable(COLLECTION, INDEX, total)
  for name in new.keys() - slots.keys():
    whole = write(stacked[name], new[name], layer)
    cache.put_variable(COLLECTION, name, whole)
    slots[name] = at_layer(whole, layer)
  return slots | in_pages


def next_slots(
  segment_ids: jax.Array, index: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the index [B] after new tokens, and their slots [B,T].

  Each sequence has its own index. Padding gets the slot `count`, which does not
  exist. If there are too few slots, tokens take the last ones, as in
  `dynamic_update_slice`.
  """
  is_real = segment_ids != 0
  order = jnp.cumsum(is_real, axis=1, dtype=index.dtype)
  first = jnp.minimum(index, count - order[:, -1])
  slots = jnp.where(is_real, first[:, None] + order - 1, count)
  return index + order[:, -1], slots


def save(
  cache: nn.Module,
  slots: Mapping[str, jax.Array],
  index: int | jax.Array,
  *,
  slot_axis: str | None,
) -> None:
  """Makes or replaces the variables of a cache.

  `slots` are arrays [B,S] and [B,K,S,...] by variable, `index` is the number of
  tokens received, also as Int [B].
  """
  index = jnp.asarray(index, jnp.int32)
  arrays = {**slots, INDEX: index}
  stacked = cache.variables.get(COLLECTION, {})
  layer = stacked.get(LAYER)
  if layer is not None:
    for name, x in arrays.items():
      whole = with_layer(variables.unbox(stacked[name]), x, layer)
      cache.put_variable(COLLECTION, name, whole)
    return
  for name, x in slots.items():
    _put(cache, name, x, slot_axes(x.shape, slot_axis))
  _put(cache, INDEX, index, (axes.BATCH,)[: index.ndim])


def slot_axes(
  shape: Sequence[int], slot_axis: str | None
) -> tuple[str | None, ...]:
  """Returns the logical axes of an array [B,S] or [B,K,S,...] of a cache."""
  if len(shape) == 2:
    return axes.BATCH, slot_axis
  # A single head (multi-query, latent) is replicated.
  heads = axes.KV_HEADS if shape[1] > 1 else None
  return (axes.BATCH, heads, slot_axis, axes.HEAD_DIM)[: len(shape)]


def _get_stored(cache: nn.Module) -> dict[str, Any]:
  return dict(variables.unbox(cache.variables[COLLECTION]))


def _get_shared(stored: Mapping[str, Any]) -> list[str]:
  return [name for name in stored if name.startswith(SHARED)]


def _get_paged(stacked: Mapping[str, Any]) -> set[str]:
  """Returns the variables of a cache that have pages."""
  if paged_slots.PAGES not in stacked:
    return set()
  own = (*_TOKENS, INDEX, paged_slots.PAGES, LAYER, FIRST, COMMON)
  return set(stacked) - {*own}


def _pool(x: jax.Array, layer: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Returns the pages of a stack, and the number of a layer in it."""
  return (x[None], jnp.int32(0)) if layer is None else (x, layer)


def _write_pages(
  cache: nn.Module,
  stored: Stored,
  new: Mapping[str, jax.Array],
  segment_ids: jax.Array,
) -> None:
  """Writes tokens with segments [B,T] into their pages."""
  stacked, pages = _get_stored(cache), stored.pages
  layer = stacked.get(LAYER)
  _, slots = next_slots(segment_ids, stored.index, stored.count)
  slots = jnp.where(slots < stored.count, slots, -1)
  assert pages is not None
  for name, x in new.items():
    pool, at = _pool(stacked[name], layer)
    pool = paged_slots.write(pool, x, at, pages, slots)
    if layer is None:
      _put(cache, name, pool[0], (None,) * x.ndim)
    else:
      cache.put_variable(COLLECTION, name, pool)


def _after(
  stored: Mapping[str, jax.Array],
  *,
  new: Mapping[str, jax.Array],
  place: Place,
) -> dict[str, jax.Array]:
  """Returns positions, segments and index of a cache after new tokens."""
  count = stored[_TOKENS[0]].shape[1]
  total, write = place(new["segment_ids"], stored[INDEX], count)
  slots = {
    name: _write_layer(write, stored[name], x) for name, x in new.items()
  }
  return {**slots, INDEX: total}


def _write_layer(write: Write, slots: jax.Array, new: jax.Array) -> jax.Array:
  """Returns the slots of one layer with tokens written."""
  return write(slots[None], new, jnp.int32(0))[0]


def _put(
  cache: nn.Module, name: str, x: jax.Array, names: tuple[str | None, ...]
) -> None:
  # Linen unboxes on reading, and keeps the box on writing.
  init: Callable[[], Any] = variables.make_boxed_init(
    nn.initializers.zeros, names, shape=x.shape, dtype=x.dtype
  )
  cache.variable(COLLECTION, name, init).value = x


def slot_axis(x: jax.Array | jax.ShapeDtypeStruct) -> int:
  """Returns the axis of slots, or of tokens, of one layer's array."""
  return min(x.ndim - 1, 2)


def empty(new: jax.Array, count: int) -> jax.Array:
  """Returns `count` empty slots of one layer for tokens like `new`."""
  axis = slot_axis(new)
  return jnp.zeros(
    (*new.shape[:axis], count, *new.shape[axis + 1 :]), new.dtype
  )


def write_from(
  whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
) -> jax.Array:
  """Writes tokens [B,T] or [B,K,T,...] into the slots from `first` on.

  The slots [L,B,S] or [L,B,K,S,...] are those of all layers. `layer` and
  `first` are ints of rank 0; `first` is clamped so that all tokens fit.
  """
  at = _begin(new, layer, first)
  if whole.shape[0] == 1:
    # XLA may take the axis of layers for that of one head, and copy the array
    # to swap them.
    return jax.lax.dynamic_update_slice(whole[0], new, at[1:])[None]
  return jax.lax.dynamic_update_slice(whole, new[None], at)


def write_one_head(
  whole: jax.Array, new: jax.Array, layer: jax.Array, first: jax.Array
) -> jax.Array:
  """Writes like `write_from`; one token of one head by a scatter."""
  if whole.shape[0] > 1 or new.shape[1:3] != (1, 1):
    return write_from(whole, new, layer, first)
  slot = jnp.clip(first, 0, whole.shape[slot_axis(new) + 1] - 1)
  slots = jnp.full((new.shape[0], 1), slot)
  return _write_one_each(whole, new, layer, slots)


def write_one(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slot: jax.Array
) -> jax.Array:
  """Writes one token per sequence into the same slot, if it exists.

  Only this slot is read and written; see `write_from`.
  """
  at = jnp.clip(slot, 0, whole.shape[slot_axis(new) + 1] - 1)
  start = _begin(new, layer, at)
  before = jax.lax.dynamic_slice(whole, start, (1, *new.shape))
  return write_from(whole, jnp.where(at == slot, new, before[0]), layer, at)


def write_slots(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slots: jax.Array
) -> jax.Array:
  """Writes each token into a separate slot; see `write_from`.

  `slots` are int [B,T], no two of a sequence the same. Tokens with a slot that
  does not exist are dropped.
  """
  axis = slot_axis(new)
  if new.shape[axis] == 1:
    return _write_one_each(whole, new, layer, slots)
  count = whole.shape[axis + 1]
  # Dropped tokens share one more slot.
  slots = jnp.where((slots >= 0) & (slots < count), slots, count)

  def write(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    more = jnp.concatenate([old, old[:1]])
    return more.at[slots].set(new, mode="promise_in_bounds")[:count]

  old = at_layer(whole, layer)
  old, new = (jnp.moveaxis(x, axis, 1) for x in (old, new))
  written = jnp.moveaxis(jax.vmap(write)(old, new, slots), 1, axis)
  return with_layer(whole, written, layer)


def _begin(
  new: jax.Array, layer: jax.Array, slot: jax.Array
) -> tuple[jax.Array | int, ...]:
  """Returns the start index of tokens in the arrays of all layers."""
  axis = slot_axis(new)
  inside = (slot if i == axis else 0 for i in range(new.ndim))
  return (layer, *inside)


def _write_one_each(
  whole: jax.Array, new: jax.Array, layer: jax.Array, slots: jax.Array
) -> jax.Array:
  """Writes one token per sequence, each into a slot of its sequence.

  By `gather` and `scatter` with a batch axis in place: `vmap` would move the
  batch axis, and with it the whole array.
  """
  # As in `write_from`, one layer has no axis.
  outer = int(whole.shape[0] > 1)
  old = whole if outer else whole[0]
  axis = slot_axis(new) + outer
  at = jnp.clip(slots, 0, old.shape[axis] - 1)
  index = at
  if outer:
    index = jnp.concatenate([jnp.full_like(at, layer), at], axis=1)
  token = jnp.squeeze(new, axis - outer)
  window = tuple(range(1, token.ndim))
  once = (*range(outer), axis)
  sizes = [1 if i in (*once, outer) else n for i, n in enumerate(old.shape)]
  before = jax.lax.gather(
    old,
    index,
    jax.lax.GatherDimensionNumbers(
      offset_dims=window,
      collapsed_slice_dims=once,
      start_index_map=once,
      operand_batching_dims=(outer,),
      start_indices_batching_dims=(0,),
    ),
    slice_sizes=sizes,
    mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
  exists = (at == slots).reshape(-1, *(1,) * len(window))
  written = jax.lax.scatter(
    old,
    index,
    jnp.where(exists, token, before),
    jax.lax.ScatterDimensionNumbers(
      update_window_dims=window,
      inserted_window_dims=once,
      scatter_dims_to_operand_dims=once,
      operand_batching_dims=(outer,),
      scatter_indices_batching_dims=(0,),
    ),
    unique_indices=True,
    mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
  return written.reshape(whole.shape)


def at_layer(x: jax.Array, number: jax.Array) -> jax.Array:
  """Returns entry `number` of a stacked array."""
  return jax.lax.dynamic_index_in_dim(x, number, axis=0, keepdims=False)


def with_layer(x: jax.Array, part: jax.Array, number: jax.Array) -> jax.Array:
  """Returns a stacked array with `part` in place of entry `number`."""
  return jax.lax.dynamic_update_index_in_dim(x, part, number, axis=0)
