"""Caches of keys and values for step-by-step decoding.

A cache is a submodule of an attention layer. Its collection is `cache`:

  * no collection and no `cache_length` (training): nothing is stored;
  * `cache_length` given (prefill): a cache for that many tokens is made, and
    the given tokens are its first;
  * the collection exists (decoding): the given tokens are appended.

Each slot keeps the position and segment of its token. Padding (segment 0) is
never attended to, so the prompts of a batch may have any lengths.

A storage is the format in which a cache keeps keys and values. It maps vectors
of features to arrays, and back; the cache puts these arrays into slots, moves
and shards them. So a storage does not depend on slots, nor a cache on a number
format:

  encode(x [B, T, K, H]) -> {suffix: array with the leading dimensions of x}
  decode(arrays, dtype)  -> [B, S, K, H], in this dtype or a wider one

The variables of a cache are named after both: suffix `""` of `key` is `key`,
suffix `scale` is `key_scale`. Each vector is encoded alone, so it may be
written into any slot; a slot that was never written (zeros) is never attended
to. A vector of NaN must stay NaN: caches mark tokens that found no slot by it.

Other caches are `sliding_cache` and `sequence_cache`; `cache_variables` has
what they share.

Letters: B batch, T new tokens, S slots, K key/value heads, H head_dim.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, ClassVar, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers.attention import cache_variables
from paxon.layers.attention import mask as attention_mask
from paxon.layers.cpu import forms
from paxon.sharding import axes

COLLECTION = cache_variables.COLLECTION

_KEY_VALUE = ("key", "value")


@runtime_checkable
class Storage(Protocol):
  """Format in which a cache keeps keys and values."""

  def encode(self, x: jax.Array) -> Mapping[str, jax.Array]:
    """Returns the stored arrays of `x` [B,T,K,H] by suffix.

    Each array has the dimensions [B,T], [B,T,K] or [B,T,K,H'].
    """
    ...

  def decode(
    self, arrays: Mapping[str, jax.Array], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the vectors [B,S,K,H] of stored arrays.

    They are in `dtype`, or in a wider dtype in which they are stored exactly.
    """
    ...


@dataclasses.dataclass(frozen=True)
class AsIs:
  """Keeps the values of the keys and values.

  Their dtype too, except on CPUs (`forms.cached_dtype`).
  """

  def encode(self, x: jax.Array) -> Mapping[str, jax.Array]:
    """Returns `x`, on CPUs in at least float32."""
    return {"": x.astype(forms.cached_dtype(x.dtype))}

  def decode(
    self, arrays: Mapping[str, jax.Array], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the vectors in `dtype`, or bfloat16 ones of CPUs in float32."""
    x = arrays[""]
    return x if x.dtype == forms.cached_dtype(dtype) else x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Cast(AsIs):
  """Casts keys and values to another floating-point dtype.

  Attributes:
    dtype: Stored dtype; it must have NaN.
  """

  dtype: DTypeLike

  def __post_init__(self) -> None:
    dtype = jnp.dtype(self.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        f"Cast.dtype must be a floating-point dtype, got {dtype.name}; "
        "for integers use layers.attention.quantized_rows.QuantizedRows."
      )

  def encode(self, x: jax.Array) -> Mapping[str, jax.Array]:
    """Returns `x` rounded to the stored dtype."""
    return {"": x.astype(self.dtype)}

  def decode(
    self, arrays: Mapping[str, jax.Array], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the vectors in `dtype`."""
    return arrays[""].astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValues:
  """Keys and values that queries may attend to.

  While decoding their dtype may be wider than that of the new tokens, which
  have the same values in it (`Storage.decode`, `kernels.call`).

  Attributes:
    key: Float [B, S, K, H].
    value: Float [B, S, K, H'], or None if the layer makes values from keys.
    positions: Int [B, S].
    segment_ids: Int [B, S]; 0 where a slot is padding or empty.
    reach: Number of latest positions that are complete, the query's own
      included; None is no limit.
    split: Keys and values [B', P] that B / B' adjacent sequences share, and the
      rest of each sequence; together they are the slots above, which are
      computed only where they are used. None if nothing is shared.
  """

  key: jax.Array
  value: jax.Array | None
  positions: jax.Array
  segment_ids: jax.Array
  reach: int | None = dataclasses.field(default=None, metadata={"static": True})
  split: "tuple[KeyValues, KeyValues] | None" = None

  @property
  def parts(self) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Keys and values of `split`, for `kernels.call`; () without."""
    return tuple(
      (x.key, x.key if x.value is None else x.value) for x in self.split or ()
    )

  def mask(
    self,
    name: str,
    positions: jax.Array,
    segment_ids: jax.Array,
    prefix: jax.Array | None,
    rules: attention_mask.MaskRules,
  ) -> attention_mask.AttentionMask:
    """Returns the mask of the new tokens of a layer with the class `name`.

    Raises:
      ValueError: The layer attends to earlier tokens than the cache keeps, or a
        prefix is given while decoding.
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
      rules=rules,
    )
    before = mask.reach[0]
    if self.reach is None or (before is not None and before < self.reach):
      return mask
    reach = "all" if before is None else f"the last {before + 1}"
    raise ValueError(
      f"{name} attends to {reach} positions, but its cache keeps only the last "
      f"{self.reach}; give the cache the window of the layer, or use "
      "ContiguousCache."
    )


class Cache(nn.Module):
  """Base of caches, which have a field `storage`; subclasses assign slots."""

  # Logical axis of the slots.
  slot_axis: ClassVar[str | None] = axes.KV_LENGTH

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

    Args:
      key: Keys of the new tokens, rotated.
      value: Their values; None if the layer makes values from keys.
      positions: Their positions.
      segment_ids: Their segments.
      cache_length: Makes a new cache for this number of tokens.

    Returns:
      The new tokens alone, or all slots while decoding.

    Raises:
      ValueError: There are too few slots, a cache exists already, or it has
        other sequences.
    """
    new = tokens(key, value, positions, segment_ids, reach=self.reach)
    if cache_length is not None:
      check_prefill(self, new, cache_length)
      self.fill(new, cache_length)
    elif cache_variables.is_filled(self):
      return append_tokens(self, new, self.place, slot_axis=self.slot_axis)
    return new

  @property
  def reach(self) -> int | None:
    """See `KeyValues`."""
    return None

  @nn.nowrap
  def to_arrays(self, new: KeyValues) -> dict[str, jax.Array]:
    """Returns the stored arrays of tokens by variable; see `to_arrays`."""
    cache: Any = self
    return to_arrays(new, cache.storage)

  @nn.nowrap
  def fill(self, new: KeyValues, cache_length: int) -> None:
    """Makes the cache with the tokens of a prompt."""
    raise NotImplementedError

  @staticmethod
  def place(
    segment_ids: jax.Array, index: jax.Array, count: int
  ) -> tuple[jax.Array, cache_variables.Write]:
    """Assigns the slots of a decoding step; see `cache_variables.Place`."""
    raise NotImplementedError


class ContiguousCache(Cache):
  """Stores every token, in the order of arrival.

  A token beyond the last slot is stored as NaN in place of the last tokens:
  a compiled loop cannot raise, but the result is never silently wrong.

  The index is shared by all sequences, and their padding takes slots, too. With
  one for each sequence (`decoding.cache_rows.with_row_index`) padding takes
  no slot, and sequences advance independently.

  Attributes:
    storage: Format of stored keys and values.
  """

  storage: Storage = AsIs()

  @nn.nowrap
  def fill(self, new: KeyValues, cache_length: int) -> None:
    """Makes the cache, padded to `cache_length` slots."""
    slots = {
      n: pad_slots(x, cache_length) for n, x in self.to_arrays(new).items()
    }
    length = new.key.shape[1]
    cache_variables.save(self, slots, length, slot_axis=self.slot_axis)

  @staticmethod
  def place(
    segment_ids: jax.Array, index: jax.Array, count: int
  ) -> tuple[jax.Array, cache_variables.Write]:
    """Assigns the next slot to each token."""
    if index.ndim == 0:
      total = index + segment_ids.shape[1]
      write = cache_variables.write_from
      if segment_ids.shape[1] == 1 and forms.scatters_one_head():
        write = cache_variables.write_one_head
      return total, functools.partial(write, first=index)
    total, slots = cache_variables.next_slots(segment_ids, index, count)
    write = functools.partial(cache_variables.write_slots, slots=slots)
    return total, write


class NoCache(nn.Module):
  """Stores nothing: each call attends to its own tokens only."""

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
  """Returns new tokens as `KeyValues`, with T slots.

  Raises:
    ValueError: Shapes do not fit each other.
  """
  if key.ndim != 4:
    raise ValueError(
      "A cache needs keys of shape [batch, length, kv_heads, head_dim], got "
      f"{key.shape}."
    )
  heads = key.shape[:3] if value is None else value.shape[:3]
  for name, found, wanted in (
    ("value", heads, key.shape[:3]),
    ("positions", positions.shape, key.shape[:2]),
    ("segment_ids", segment_ids.shape, key.shape[:2]),
  ):
    if found != wanted:
      raise ValueError(
        f"A cache needs `{name}` with leading dimensions {wanted} for keys of "
        f"shape {key.shape}, got {found}."
      )
  return KeyValues(
    key=key,
    value=value,
    positions=positions,
    segment_ids=segment_ids,
    reach=reach,
  )


def append_tokens(
  cache: Any,
  new: KeyValues,
  place: cache_variables.Place,
  *,
  slot_axis: str | None,
) -> KeyValues:
  """Stores the tokens of a decoding step; returns all that may be attended to.

  The cache is filled and has a `storage`. Its slots are a ring if there are
  `new.reach` of them.

  Raises:
    ValueError: The tokens do not fit the content of the cache.
  """
  stored = cache_variables.load(cache, new.positions, new.segment_ids)
  is_ring = stored.count == new.reach
  rows = to_arrays(new, cache.storage)
  check_append(rows, stored.slots, is_ring=is_ring)
  if not is_ring:
    total, _ = place(new.segment_ids, stored.index, stored.count)
    rows = to_arrays(fill_nan(new, total <= stored.count), cache.storage)
  slots = cache_variables.append(
    cache, stored, rows, place, slot_axis=slot_axis
  )
  if new.reach is not None and new.key.shape[1] > 1:
    # The first of several tokens attends to what the last one overwrites.
    slots = {
      name: jnp.concatenate(
        [stored.slots[name], x], axis=cache_variables.slot_axis(x)
      )
      for name, x in rows.items()
    }
  dtype, reach = new.key.dtype, new.reach
  own = from_arrays(slots, cache.storage, dtype=dtype, reach=reach)
  if not stored.shared:
    return own
  shared = from_arrays(stored.shared, cache.storage, dtype=dtype, reach=reach)
  count = new.positions.shape[0] // shared.positions.shape[0]
  whole = jax.tree.map(
    lambda x, y: jnp.concatenate([jnp.repeat(x, count, axis=0), y], axis=1),
    shared,
    own,
  )
  return dataclasses.replace(whole, split=(shared, own))


def to_arrays(new: KeyValues, storage: Storage) -> dict[str, jax.Array]:
  """Returns the stored arrays of tokens, [B,T] or [B,K,T,...], by variable."""
  arrays = {"positions": new.positions, "segment_ids": new.segment_ids}
  for name, x in zip(_KEY_VALUE, (new.key, new.value), strict=True):
    encoded = {} if x is None else storage.encode(x)
    for suffix, x in encoded.items():
      arrays[f"{name}_{suffix}" if suffix else name] = _swap_heads(x)
  return arrays


def from_arrays(
  slots: Mapping[str, jax.Array],
  storage: Storage,
  *,
  dtype: DTypeLike,
  reach: int | None = None,
) -> KeyValues:
  """Returns the keys and values of a cache; undoes `to_arrays`."""
  decoded: dict[str, jax.Array | None] = {}
  for which in _KEY_VALUE:
    arrays = {
      name.removeprefix(which).removeprefix("_"): _swap_heads(x)
      for name, x in slots.items()
      if name == which or name.startswith(f"{which}_")
    }
    decoded[which] = storage.decode(arrays, dtype) if arrays else None
  key = decoded["key"]
  assert key is not None
  return KeyValues(
    key=key,
    value=decoded["value"],
    positions=slots["positions"],
    segment_ids=slots["segment_ids"],
    reach=reach,
  )


def pad_slots(x: jax.Array, slots: int) -> jax.Array:
  """Returns an array of `to_arrays` tokens, padded to a number of slots."""
  axis = cache_variables.slot_axis(x)
  after = [(0, 0)] * x.ndim
  after[axis] = 0, slots - x.shape[axis]
  return jnp.pad(x, after)


def fill_nan(new: KeyValues, fits: jax.Array) -> KeyValues:
  """Returns the tokens, with NaN for keys and values where `fits` is false.

  `fits` is Bool of rank 0, or [B].
  """

  def mark(x: jax.Array) -> jax.Array:
    is_kept = fits.reshape(fits.shape + (1,) * (x.ndim - fits.ndim))
    return jnp.where(is_kept, x, jnp.full((), jnp.nan, x.dtype))

  value = None if new.value is None else mark(new.value)
  return dataclasses.replace(new, key=mark(new.key), value=value)


def check_prefill(cache: nn.Module, new: KeyValues, cache_length: int) -> None:
  """Raises ValueError if a prompt does not fit, or a cache exists already."""
  length = new.key.shape[1]
  if cache_length < length:
    raise ValueError(
      f"cache_length ({cache_length}) must be at least the length of the "
      f"prompt ({length})."
    )
  if cache_variables.is_filled(cache):
    raise ValueError(
      "cache_length was given, but a cache exists already; leave out the "
      f"collection {COLLECTION!r} to start a new one, or cache_length to "
      "append to it."
    )


def check_append(
  new: Mapping[str, jax.Array],
  slots: Mapping[str, jax.Array],
  *,
  is_ring: bool = False,
) -> None:
  """Raises ValueError if new tokens cannot be appended.

  Both are stored arrays by variable. In a ring, tokens overwrite earlier ones.
  """
  batch, length = new["positions"].shape
  cached, count = slots["positions"].shape
  if batch != cached:
    raise ValueError(
      f"A batch of {batch} sequences does not fit a cache of {cached}; "
      "layers.decoding.cache_rows repeats or selects the sequences of a cache."
    )
  if length > count and not is_ring:
    raise ValueError(
      f"{length} tokens do not fit in the {count} slots of the cache."
    )
  given, stored = (
    {name: _token_type(x) for name, x in each.items()} for each in (new, slots)
  )
  if given != stored:
    raise ValueError(
      f"The new tokens have the arrays {given}, but the cache {stored}; decode "
      "with the layer, dtype and storage that made the cache."
    )


def _swap_heads(x: jax.Array) -> jax.Array:
  """Maps [B,T,K,...] to [B,K,T,...] and back."""
  return jnp.swapaxes(x, 1, 2) if x.ndim > 2 else x


def _token_type(x: jax.Array) -> str:
  """Returns dtype and shape of the stored array of one token."""
  axis = cache_variables.slot_axis(x)
  return f"{x.dtype.name}{list(x.shape[1:axis] + x.shape[axis + 1 :])}"
