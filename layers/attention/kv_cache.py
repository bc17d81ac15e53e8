"""Keys and values of the tokens seen so far, for step-by-step decoding.

A cache is a part of an attention layer. It lives in the collection `cache`:

  * no collection and no `cache_length` (training): nothing is stored;
  * `cache_length` given (prefill): a cache for that many tokens is made, and
    the given tokens are its first;
  * the collection is there (decoding): the given tokens are appended.

Each slot keeps its token's position and segment. Padding (segment 0) is never
attended, so the prompts of a batch may have any lengths.

This module holds the plainest cache, and the record that all caches return.
`sliding_cache` and `sequence_cache` are others; what they share besides is in
`cache_variables` and `slot_writes`.

Letters: B batch, T new tokens, S slots, K key/value heads, H head_dim.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers.attention import cache_variables, slot_writes
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import storage as cache_storage
from paxon.sharding import axes

COLLECTION = cache_variables.COLLECTION

_ROWS = ("key", "value")


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("key", "value", "positions", "segment_ids"),
  meta_fields=("reach",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValues:
  """What a query may attend to.

  Attributes:
    key: Float [B, S, K, H].
    value: Float [B, S, K, H'], or None where the key says all.
    positions: Int [B, S].
    segment_ids: Int [B, S]; 0 where a slot is padding or empty.
    reach: For how many positions back, the query's own included, everything is
      here; None is no limit.
  """

  key: jax.Array
  value: jax.Array | None
  positions: jax.Array
  segment_ids: jax.Array
  reach: int | None = None

  def mask(
    self,
    name: str,
    positions: jax.Array,
    segment_ids: jax.Array,
    prefix: jax.Array | None,
    **rules: Any,
  ) -> attention_mask.AttentionMask:
    """Returns which of this the new tokens see, those of one sequence.

    Args:
      name: Class of the layer, for messages.
      positions: Positions of the new tokens.
      segment_ids: Their segments.
      prefix: Which of them are of a prefix; `None` is none.
      **rules: Those of `AttentionMask`.

    Raises:
      ValueError: The layer looks back further than the cache, or a prefix is
        given while decoding.
    """
    if prefix is not None and self.key.shape[1] != positions.shape[1]:
      raise ValueError(
        f"{name} got a prefix while decoding; the whole prefix must be in the "
        "prompt (with `cache_length`)."
      )
    mask = attention_mask.AttentionMask(
      q_positions=positions,
      kv_positions=self.positions,
      q_segment_ids=segment_ids,
      kv_segment_ids=self.segment_ids,
      q_prefix=prefix,
      kv_prefix=prefix,
      **rules,
    )
    before = mask.reach[0]
    if self.reach is None or (before is not None and before < self.reach):
      return mask
    sees = "all positions" if before is None else f"{before + 1} positions"
    raise ValueError(
      f"{name} sees {sees}, but its cache keeps the last {self.reach} only; "
      "give the cache the window of the layer, or use ContiguousCache."
    )


class ContiguousCache(nn.Module):
  """Stores every token, in the order of arrival.

  Attributes:
    storage: How keys and values are kept.
  """

  storage: cache_storage.Storage = cache_storage.AsIs()

  @nn.compact
  def __call__(
    self,
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads value_dim"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int | None = None,
  ) -> KeyValues:
    """Stores the new tokens and returns all that may be attended to.

    A token beyond the last slot is stored as NaN in place of the last tokens:
    it cannot raise inside a compiled loop, but the result is never silently
    wrong.

    Args:
      key: Keys of the new tokens, rotated.
      value: Their values; None where the key says all.
      positions: Their positions.
      segment_ids: Their segments.
      cache_length: Makes a new cache with this number of slots.

    Returns:
      The new tokens alone, or all slots while decoding.

    Raises:
      ValueError: The slots are too few, or there is a cache already.
    """
    new = tokens(key, value, positions, segment_ids)
    if cache_length is not None:
      check_prefill(self, new, cache_length)
      filled = jax.tree.map(
        lambda x: padded(x, cache_length), packed(new, self.storage)
      )
      cache_variables.save(self, filled, key.shape[1], slot_axis=axes.KV_LENGTH)
      return new
    if not cache_variables.is_filled(self):
      return new
    return appended(self, new, _in_order, slot_axis=axes.KV_LENGTH)


class NoCache(nn.Module):
  """Keeps nothing: each call sees its own tokens only, also in decoding.

  For layers that look at what one step is given and at nothing before it.
  """

  def __call__(
    self,
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads value_dim"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int | None = None,
  ) -> KeyValues:
    """Returns the new tokens."""
    del cache_length
    return tokens(key, value, positions, segment_ids)


def tokens(
  key: jax.Array,
  value: jax.Array | None,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  reach: int | None = None,
) -> KeyValues:
  """Returns the record of new tokens.

  Args:
    key: Keys [B,T,K,H].
    value: Values [B,T,K,H'], or None.
    positions: Positions [B,T].
    segment_ids: Segments [B,T].
    reach: See `KeyValues`.

  Raises:
    ValueError: Ranks or shapes do not go together.
  """
  if key.ndim != 4:
    raise ValueError(
      "A cache needs keys of shape [batch, length, kv_heads, head_dim], got "
      f"{key.shape}."
    )
  rows = key.shape[:3] if value is None else value.shape[:3]
  for name, found, wanted in (
    ("value", rows, key.shape[:3]),
    ("positions", positions.shape, key.shape[:2]),
    ("segment_ids", segment_ids.shape, key.shape[:2]),
  ):
    if found != wanted:
      raise ValueError(
        f"A cache needs `{name}` that begins with {wanted} for keys of shape "
        f"{key.shape}, got {found}."
      )
  return KeyValues(
    key=key,
    value=value,
    positions=positions,
    segment_ids=segment_ids,
    reach=reach,
  )


def appended(
  cache: Any,
  new: KeyValues,
  place: cache_variables.Place,
  *,
  slot_axis: str | None,
) -> KeyValues:
  """Stores the tokens of a decoding step, and returns all that may be seen.

  Args:
    cache: Which has been filled, with its `storage`.
    new: The tokens. With a `reach`, the slots are a ring if they are as many.
    place: Which slots they get.
    slot_axis: Logical axis of the slots.

  Raises:
    ValueError: The tokens do not go with what the cache holds.
  """
  kept = cache_variables.load(cache, new.positions, new.segment_ids)
  is_ring = kept.count == new.reach
  rows = packed(new, cache.storage)
  check_append(rows, kept.slots, is_ring=is_ring)
  if not is_ring:
    total, _ = place(new.segment_ids, kept.index, kept.count)
    rows = packed(poisoned(new, total <= kept.count), cache.storage)
  slots = cache_variables.append(cache, kept, rows, place, slot_axis=slot_axis)
  if new.reach is not None and new.key.shape[1] > 1:
    # The first of several tokens sees what the last of them pushes out.
    slots = {
      name: jnp.concatenate(
        [kept.slots[name], x], axis=slot_writes.slot_axis(x)
      )
      for name, x in rows.items()
    }
  return unpacked(slots, cache.storage, dtype=new.key.dtype, reach=new.reach)


def packed(
  new: KeyValues, storage: cache_storage.Storage
) -> dict[str, jax.Array]:
  """Returns the arrays in which tokens are kept, by variable.

  They are [B,T], and [B,K,T,...] with the heads before the tokens.
  """
  arrays = {"positions": new.positions, "segment_ids": new.segment_ids}
  for row in _ROWS:
    x = getattr(new, row)
    parts = {} if x is None else storage.encode(x)
    arrays.update({_name(row, part): _turned(x) for part, x in parts.items()})
  return arrays


def unpacked(
  slots: Mapping[str, jax.Array],
  storage: cache_storage.Storage,
  *,
  dtype: DTypeLike,
  reach: int | None = None,
) -> KeyValues:
  """Returns what the arrays of a cache hold.

  Args:
    slots: What `packed` returned, with slots in place of tokens.
    storage: What encoded the rows.
    dtype: Dtype of the keys and values.
    reach: See `KeyValues`.
  """
  rows: dict[str, jax.Array | None] = {}
  for row in _ROWS:
    parts = {
      name.removeprefix(row).removeprefix("_"): _turned(x)
      for name, x in slots.items()
      if name == row or name.startswith(f"{row}_")
    }
    rows[row] = storage.decode(parts, dtype) if parts else None
  key = rows["key"]
  assert key is not None
  return KeyValues(
    key=key,
    value=rows["value"],
    positions=slots["positions"],
    segment_ids=slots["segment_ids"],
    reach=reach,
  )


def padded(x: jax.Array, slots: int) -> jax.Array:
  """Returns tokens as `packed` gives them, and empty slots behind them."""
  axis = slot_writes.slot_axis(x)
  after = [(0, 0)] * x.ndim
  after[axis] = 0, slots - x.shape[axis]
  return jnp.pad(x, after)


def poisoned(new: KeyValues, fits: jax.Array) -> KeyValues:
  """Returns the tokens, with NaN for keys and values unless they fit.

  Args:
    new: New tokens.
    fits: Whether there is a slot: Bool of rank 0, or [B].
  """

  def mark(x: jax.Array) -> jax.Array:
    rows = fits.reshape(fits.shape + (1,) * (x.ndim - fits.ndim))
    return jnp.where(rows, x, jnp.full((), jnp.nan, x.dtype))

  value = None if new.value is None else mark(new.value)
  return dataclasses.replace(new, key=mark(new.key), value=value)


def check_prefill(cache: nn.Module, new: KeyValues, cache_length: int) -> None:
  """Raises ValueError if a prompt does not fit, or there is a cache."""
  length = new.key.shape[1]
  if cache_length < length:
    raise ValueError(
      f"cache_length ({cache_length}) must be at least the length of the "
      f"prompt ({length})."
    )
  if cache_variables.is_filled(cache):
    raise ValueError(
      "cache_length was given, but there is a cache already; leave the "
      f"collection {COLLECTION!r} out to start a new one, or cache_length "
      "to append to it."
    )


def check_append(
  new: Mapping[str, jax.Array],
  slots: Mapping[str, jax.Array],
  *,
  is_ring: bool = False,
) -> None:
  """Raises ValueError if new tokens cannot be appended.

  Args:
    new: The tokens, as they are kept, by variable.
    slots: What the cache holds, by variable.
    is_ring: Whether tokens may take the slots of earlier ones.
  """
  batch, length = new["positions"].shape
  rows, count = slots["positions"].shape
  if batch != rows:
    raise ValueError(
      f"{batch} rows of tokens do not go with the {rows} rows of the cache; "
      "layers.decoding.cache_rows makes one for other rows."
    )
  if length > count and not is_ring:
    raise ValueError(
      f"{length} tokens do not fit into the {count} slots of the cache."
    )
  given, kept = (
    {name: _kept_as(x) for name, x in each.items()} for each in (new, slots)
  )
  if given != kept:
    raise ValueError(
      f"Tokens are kept as {given}, but the cache holds {kept}; decode with "
      "the layer, dtype and storage that made it."
    )


def _in_order(
  segment_ids: jax.Array, index: jax.Array, count: int
) -> tuple[jax.Array, cache_variables.Write]:
  """Gives each token the next slot."""
  del count
  total = index + segment_ids.shape[1]
  return total, functools.partial(slot_writes.from_slot, first=index)


def _turned(x: jax.Array) -> jax.Array:
  """Returns [B,K,T,...] of [B,T,K,...], and the other way round."""
  return jnp.swapaxes(x, 1, 2) if x.ndim > 2 else x


def _kept_as(x: jax.Array) -> str:
  """Returns dtype and shape of what is kept of one token of one row."""
  axis = slot_writes.slot_axis(x)
  return f"{x.dtype.name}{list(x.shape[1:axis] + x.shape[axis + 1 :])}"


def _name(row: str, part: str) -> str:
  return f"{row}_{part}" if part else row
