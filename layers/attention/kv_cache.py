"""Keys and values of the tokens seen so far, for step-by-step decoding.

A cache is a part of an attention layer. It lives in the collection `cache`:

  * no collection and no `cache_length` (training): nothing is stored;
  * `cache_length` given (prefill): a cache with that many slots is made, and
    the given tokens fill the first ones;
  * the collection is there (decoding): the given tokens are appended.

Each slot keeps its token's position and segment. Padding (segment 0) takes
slots but is never attended, so the prompts of a batch may have any lengths.

Letters: B batch, T new tokens, S slots, K key/value heads, H head_dim.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.sharding import axes, variables

COLLECTION = "cache"


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("key", "value", "positions", "segment_ids"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValues:
  """What a query may attend to.

  Attributes:
    key: Float [B, S, K, H].
    value: Float [B, S, K, H].
    positions: Int [B, S].
    segment_ids: Int [B, S]; 0 where a slot is padding or empty.
  """

  key: jax.Array
  value: jax.Array
  positions: jax.Array
  segment_ids: jax.Array


class ContiguousCache(nn.Module):
  """Stores every token, in the order of arrival.

  Attributes:
    dtype: Dtype in which keys and values are stored; `None` keeps theirs.
  """

  dtype: DTypeLike | None = None

  @nn.compact
  def __call__(
    self,
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads head_dim"],
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
      value: Their values.
      positions: Their positions.
      segment_ids: Their segments.
      cache_length: Makes a new cache with this number of slots.

    Returns:
      The new tokens alone, or all slots while decoding.

    Raises:
      ValueError: The slots are too few, or there is a cache already.
    """
    new = KeyValues(
      key=key, value=value, positions=positions, segment_ids=segment_ids
    )
    if cache_length is not None:
      self._fill(new, cache_length)
      return new
    if not self.has_variable(COLLECTION, "index"):
      return new
    return self._append(new)

  def _fill(self, new: KeyValues, cache_length: int) -> None:
    length = new.key.shape[1]
    if cache_length < length:
      raise ValueError(
        f"cache_length ({cache_length}) must be at least the length of the "
        f"prompt ({length})."
      )
    if self.has_variable(COLLECTION, "index"):
      raise ValueError(
        "cache_length was given, but there is a cache already; leave the "
        f"collection {COLLECTION!r} out to start a new one, or cache_length "
        "to append to it."
      )
    empty = jax.tree.map(
      lambda x: jnp.zeros((x.shape[0], cache_length, *x.shape[2:]), x.dtype),
      self._stored(new),
    )
    self._store(_write(empty, self._stored(new), jnp.int32(0)), length)

  def _append(self, new: KeyValues) -> KeyValues:
    stored = {
      name: variables.unbox(self.get_variable(COLLECTION, name))
      for name in (*(f.name for f in dataclasses.fields(KeyValues)), "index")
    }
    index = stored.pop("index")
    old = KeyValues(**stored)
    length, slots = new.key.shape[1], old.key.shape[1]
    if length > slots:
      raise ValueError(
        f"{length} tokens do not fit into the {slots} slots of the cache."
      )
    fits = index + length <= slots

    def poison(x):
      return jnp.where(fits, x, jnp.full((), jnp.nan, x.dtype))

    new = dataclasses.replace(new, key=poison(new.key), value=poison(new.value))
    everything = _write(old, self._stored(new), index)
    self._store(everything, index + length)
    return dataclasses.replace(
      everything,
      key=everything.key.astype(new.key.dtype),
      value=everything.value.astype(new.value.dtype),
    )

  def _stored(self, new: KeyValues) -> KeyValues:
    return dataclasses.replace(
      new,
      key=new.key.astype(self.dtype or new.key.dtype),
      value=new.value.astype(self.dtype or new.value.dtype),
    )

  def _store(self, contents: KeyValues, index: int | jax.Array) -> None:
    per_slot = (axes.BATCH, axes.KV_LENGTH)
    per_head = (*per_slot, axes.KV_HEADS, axes.HEAD_DIM)
    for field in dataclasses.fields(KeyValues):
      x = getattr(contents, field.name)
      self._put(field.name, x, per_head if x.ndim == 4 else per_slot)
    self._put("index", jnp.asarray(index, jnp.int32), ())

  def _put(
    self, name: str, x: jax.Array, names: tuple[str | None, ...]
  ) -> None:
    # Linen unboxes what is read, and keeps the box around what is written.
    init: Callable[[], Any] = variables.boxed(
      nn.initializers.zeros, names, shape=x.shape, dtype=x.dtype
    )
    self.variable(COLLECTION, name, init).value = x


def _write(old: KeyValues, new: KeyValues, index: jax.Array) -> KeyValues:
  """Returns `old` with `new` in the slots from `index` on."""
  return jax.tree.map(
    lambda o, n: jax.lax.dynamic_update_slice_in_dim(o, n, index, axis=1),
    old,
    new,
  )
