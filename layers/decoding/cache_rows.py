"""Repeating, selecting, replacing and rewinding the sequences of a cache.

A cache is a tree of boxed variables (`sharding.variables`), which name the
batch axis wherever a stack has put it. Variables without a batch axis, such as
the number of filled slots, are kept.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paxon.layers.attention import cache_variables
from paxon.sharding import axes, variables


def repeat(cache: Any, count: int) -> Any:
  """Returns the cache with `count` adjacent copies of each sequence."""
  return map_axis(
    cache, axes.BATCH, lambda x, axis: jnp.repeat(x, count, axis=axis)
  )


def share(cache: Any, count: int, *, length: int) -> Any:
  """Returns the cache of `count` samples of each prompt, stored once.

  Keys and values of a prompt in a `ContiguousCache` or `SequenceCache` are kept
  for all its samples, which have slots for their own tokens only (the lazy
  prefix broadcast of Pax). Everything else, such as rings and recurrent states,
  is repeated.

  Args:
    cache: The cache of a prefill, with an index for all sequences.
    count: Number of adjacent samples of each prompt.
    length: Number of slots that the prompts take.

  Raises:
    ValueError: A variable does not name its axes.
  """
  map_axis(cache, axes.BATCH, lambda x, axis: x)

  def split(part: Any) -> Any:
    if not isinstance(part, Mapping):
      return repeat(part, count)
    tokens = part.get("positions")
    slots = {axes.KV_LENGTH, axes.LENGTH} & {*getattr(tokens, "names", ())}
    if not slots:
      return {name: split(x) for name, x in part.items()}
    (slot_axis,) = slots
    # Slots that are split over devices stay there, so all of them are shared.
    shards = 1
    if slot_axis == axes.LENGTH:
      from paxon.sharding import logical  # Few caches need it.

      (shards,) = logical.num_shards((slot_axis,))
    found = {}
    for name, box in part.items():
      if slot_axis not in box.names:
        # Only the index, which counts the tokens of the samples from now on.
        found[name] = box.replace(value=jnp.zeros_like(box.value))
        continue
      slot = box.names.index(slot_axis)
      cut = functools.partial(jax.lax.slice_in_dim, box.value, axis=slot)
      # At least one slot, because no array is empty.
      total = box.value.shape[slot]
      size = -(-max(total - length, 1) // shards) * shards
      own = jnp.zeros_like(cut(0, size))
      found[name] = repeat(box.replace(value=own), count)
      shared = box if shards > 1 else box.replace(value=cut(0, length))
      found[cache_variables.SHARED + name] = shared
    return found

  return split(cache)


def take(cache: Any, indices: jax.Array) -> Any:
  """Returns the cache of the sequences at `indices`, such as those of beams.

  Indices are int [R]; one out of range gives NaN. Where samples share what is
  stored of their prompt, they must be indices of the same prompt's samples.
  """
  return map_axis(
    cache, axes.BATCH, lambda x, axis: jnp.take(x, indices, axis=axis)
  )


def put(cache: Any, sequences: Any, first: jax.Array) -> Any:
  """Returns the cache with adjacent sequences replaced, in place where XLA can.

  Args:
    cache: The cache.
    sequences: A cache of fewer sequences.
    first: The sequence that the first one of `sequences` replaces.
  """

  def put_one(leaf: Any, sequence: Any) -> Any:
    if axes.BATCH not in leaf.names:
      return sequence
    axis = leaf.names.index(axes.BATCH)
    value = jax.lax.dynamic_update_slice_in_dim(
      leaf.value, sequence.value, first, axis
    )
    return leaf.replace(value=value)

  return jax.tree.map(put_one, cache, sequences, is_leaf=_is_box)


def with_row_index(cache: Any) -> Any:
  """Returns the cache with an index for each sequence.

  Caches whose index is that of each sequence already stay as they are.

  Raises:
    ValueError: A variable does not name its axes.
  """
  sizes: set[int] = set()

  def note(x: jax.Array, axis: int) -> jax.Array:
    sizes.add(x.shape[axis])
    return x

  map_axis(cache, axes.BATCH, note)
  (size,) = sizes

  def widen(path: Any, leaf: Any) -> Any:
    if path[-1].key != cache_variables.INDEX or axes.BATCH in leaf.names:
      return leaf
    value = jnp.broadcast_to(leaf.value[..., None], (*leaf.value.shape, size))
    return leaf.replace(value=value, names=(*leaf.names, axes.BATCH))

  return jax.tree_util.tree_map_with_path(widen, cache, is_leaf=_is_box)


def rewind(
  cache: Any, before: Any, fed: jax.Array, keep: jax.Array, *, most: int
) -> Any:
  """Returns the cache without the last tokens of each sequence.

  A contiguous cache keeps what was stored, which is in the future of all later
  tokens until they overwrite it. A ring gets back what was overwritten.

  Args:
    cache: A cache with an index for each sequence (`with_row_index`).
    before: The same one, before the last tokens.
    fed: int32 [B]; number of tokens since then.
    keep: int32 [B]; how many of them to keep, the first ones.
    most: Upper bound of `fed`.

  Raises:
    ValueError: A ring has fewer slots than `most`, or a layer has stored
      something else than tokens in slots.
  """
  flat = dict(jax.tree_util.tree_flatten_with_path(before, is_leaf=_is_box)[0])

  def is_ring(path: Any) -> bool:
    positions = (*path[:-1], jax.tree_util.DictKey("positions"))
    box = flat.get(positions)
    return box is not None and box.names[-1] is None

  def restore(path: Any, leaf: Any) -> Any:
    old = flat[path]
    if path[-1].key == cache_variables.INDEX:
      back = jnp.broadcast_to(fed - keep, leaf.value.shape)
      return leaf.replace(value=leaf.value - back)
    index = (*path[:-1], jax.tree_util.DictKey(cache_variables.INDEX))
    if index not in flat:
      if axes.BATCH in leaf.names and leaf.value is not old.value:
        raise ValueError(
          f"The cache variable {jax.tree_util.keystr(path)} has no index, so it"
          " cannot forget tokens; generate without speculation."
        )
      return leaf
    if not is_ring(path):
      return leaf
    first = flat[index]
    lead = leaf.names.index(axes.BATCH)
    axis = lead + cache_variables.slot_axis(
      jax.ShapeDtypeStruct(leaf.value.shape[lead:], leaf.value.dtype)
    )
    count = leaf.value.shape[axis]
    if count < most:
      raise ValueError(
        f"A ring of {count} slots cannot take back {most} tokens; speculate on"
        f" fewer tokens, at most {count - 1}, or use ContiguousCache."
      )
    begin = first.value.reshape(-1, first.value.shape[-1])[0] + keep
    after = (jnp.arange(count)[None] - begin[:, None]) % count
    rejected = after < (fed - keep)[:, None]
    shape = [1] * leaf.value.ndim
    shape[lead], shape[axis] = rejected.shape
    mask = rejected.reshape(shape)
    return leaf.replace(value=jnp.where(mask, old.value, leaf.value))

  return jax.tree_util.tree_map_with_path(restore, cache, is_leaf=_is_box)


def map_axis(
  cache: Any, axis: str, fn: Callable[[jax.Array, int], jax.Array]
) -> Any:
  """Applies a function to each array with a logical axis, and to its position.

  The axis is `batch` for sequences, or `kv_length` for the slots of a
  contiguous cache (to pad or truncate them). Variables that sequences share
  stay as they are.

  Raises:
    ValueError: A variable does not name its axes.
  """

  def apply(path: Any, leaf: Any) -> Any:
    if not isinstance(leaf, variables.Variable):
      raise ValueError(
        f"The cache variable {jax.tree_util.keystr(path)} does not name its"
        " axes; create it with sharding.variables.boxed, or pass another"
        " `repeat` to `generate`."
      )
    name = str(getattr(path[-1], "key", "")) if path else ""
    if axis not in leaf.names or name.startswith(cache_variables.SHARED):
      return leaf
    return leaf.replace(value=fn(leaf.value, leaf.names.index(axis)))

  return jax.tree_util.tree_map_with_path(apply, cache, is_leaf=_is_box)


def _is_box(leaf: Any) -> bool:
  return isinstance(leaf, variables.Variable)
