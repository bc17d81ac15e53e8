"""State of layers in a pipeline: caches, replaced variables and sown values.

Every microbatch begins with the same values. Afterwards

  * a value that a layer sowed (a summary, an auxiliary loss, a user's record)
    is averaged over microbatches if it is a number. An array whose first axis
    is the sequences of a microbatch is merged to the batch. Only the size of
    that axis decides: an array of something else that happens to have that size
    (a histogram of 8 bins, with 8 sequences) is merged too, so sow numbers, or
    arrays with one entry for each sequence;
  * a variable that the forward pass replaces is combined by its `CombineRule`
    (`learners.combining`);
  * a cache has the sequences of the batch.

In a decoding step each stage holds the caches of its layers for all
microbatches, [R,K,batch,...], and in each tick reads and writes the sequences
of one microbatch in place. They stay in the order of the batch, so a cache is
the one that a plain stack would have made. Cache variables without a batch
axis, such as the number of tokens seen, are the same for all microbatches: each
reads the value before the step, and the last one's is kept.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import traverse_util
from flax.core import meta
import jax
import jax.numpy as jnp

from paxon.layers.losses import auxiliary_loss
from paxon.layers.stacks import stacked_cache
from paxon.learners import combining
from paxon.pipeline import stages
from paxon.sharding import axes, variables

_Path = tuple[str, ...]
# Arrays by path.
FlatCaches = Mapping[_Path, jax.Array]


def combine_microbatches(
  made: Any,
  *,
  old: Any,
  specs: variables.Specs,
  microbatches: stages.Microbatches,
  size: int,
  period: int,
) -> dict[str, Any]:
  """Returns the collections of all layers, [G,...].

  Args:
    made: Collections of each microbatch, arrays [M,G,...]; boxes around them
      are those of one layer.
    old: The collections before the step.
    specs: Of the variables that the model begins with.
    microbatches: Which sequences are in which microbatch.
    size: Sequences of a microbatch.
    period: Blocks of a group, for boxes.

  Raises:
    ValueError: A sown value is neither a number nor has one entry for each
      sequence.
  """
  flat = _flat(made)
  flat_old, flat_specs = _flat(old), _flat(specs)
  replaced = {p for p in flat if p in flat_old and p in flat_specs}
  result: dict[_Path, Any] = _flat(
    combining.combine_replaced(
      _tree({p: flat[p] for p in replaced}),
      old=_tree({p: flat_old[p] for p in replaced}),
      specs=_tree({p: flat_specs[p] for p in replaced}),
    )
  )
  for path, leaf in flat.items():
    if path not in replaced:
      is_cache = path[0] == stacked_cache.COLLECTION
      merge = functools.partial(
        _merge_cache if is_cache else _merge_sown,
        path,
        microbatches=microbatches,
        size=size,
      )
      result[path] = _map_boxed(leaf, period, merge)
  return _tree(result)


def _map_boxed(
  leaf: Any, period: int, fn: Callable[[jax.Array], jax.Array]
) -> Any:
  """Returns `fn` of the arrays of a leaf, in boxes with an axis of layers."""
  params = {meta.PARTITION_NAME: axes.LAYERS, variables.PERIOD: period}

  def one(x: Any) -> Any:
    if isinstance(x, meta.AxisMetadata):
      return x.replace_boxed(fn(x.unbox())).add_axis(0, params)
    return fn(x)

  return jax.tree.map(
    one, leaf, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)
  )


def _merge_cache(
  path: _Path, x: jax.Array, *, microbatches: stages.Microbatches, size: int
) -> jax.Array:
  """[M,G,size,...] to [G,batch,...]; [M,G] to [G]."""
  if x.ndim == 2:
    return x[0]
  return _merge_batch(path, x, microbatches, size)


def _merge_sown(
  path: _Path, x: jax.Array, *, microbatches: stages.Microbatches, size: int
) -> jax.Array:
  # Auxiliary losses are means over tokens.
  if x.ndim == 2 or path[0] == auxiliary_loss.COLLECTION:
    if jnp.issubdtype(x.dtype, jnp.floating):
      return jnp.mean(x, axis=0)
    raise ValueError(
      f"A layer in a pipeline sowed {'/'.join(path)}, a number of dtype"
      f" {x.dtype.name}, which cannot be averaged over microbatches; sow it as"
      " a float."
    )
  return _merge_batch(path, x, microbatches, size)


def _merge_batch(
  path: _Path, x: jax.Array, microbatches: stages.Microbatches, size: int
) -> jax.Array:
  if x.shape[2] != size:
    raise ValueError(
      f"A layer in a pipeline made {'/'.join(path)} of shape {x.shape[2:]} from"
      f" a microbatch of {size} sequences; it must be a number, or an array"
      f" whose first axis has size {size}."
    )
  return jax.vmap(microbatches.merge_flat, in_axes=1)(x)


def split_caches(
  tree: Any, microbatches: stages.Microbatches, *, batch: int
) -> tuple[FlatCaches, FlatCaches]:
  """Splits caches into those with a batch axis and those without.

  Args:
    tree: Caches [P,R,K,batch,...], and numbers [P,R,K].
    microbatches: Which sequences are in which microbatch.
    batch: Sequences of the batch.

  Returns:
    Arrays [P,R,K,segments,size,per_segment,...], and arrays [P,R,K].

  Raises:
    ValueError: A variable is neither a number nor has one entry for each
      sequence.
  """
  batched, unbatched = {}, {}
  for path, x in _flat(tree).items():
    if x.ndim == 3:
      unbatched[path] = x
    elif x.shape[3] == batch:
      own = jax.vmap(microbatches.unfold)(x.reshape(-1, *x.shape[3:]))
      batched[path] = own.reshape(*x.shape[:3], *own.shape[1:])
    else:
      raise ValueError(
        f"A pipeline splits caches into microbatches, but cache/"
        f"{'/'.join(path)} of shape {x.shape[3:]} does not begin with the batch"
        f" of {batch} sequences."
      )
  return batched, unbatched


def merge_caches(batched: FlatCaches, unbatched: FlatCaches) -> Any:
  """Undoes `split_caches`."""
  flat = {
    path: x.reshape(*x.shape[:3], -1, *x.shape[6:])
    for path, x in batched.items()
  }
  return _tree({**flat, **unbatched})


def read_caches(
  batched: FlatCaches,
  unbatched: FlatCaches,
  work: stages.Work,
  microbatches: stages.Microbatches,
) -> Any:
  """Returns the caches that one stage reads in a tick, [K,size,...] and [K].

  Args:
    batched: Caches of the stage, [R,K,segments,size,per_segment,...].
    unbatched: Variables without a batch axis before the step, [R,K].
    work: Microbatch and repeat of the stage in this tick.
    microbatches: Which sequences are in which microbatch.
  """

  def one(x: jax.Array) -> jax.Array:
    start = _start(x, work, microbatches)
    found = jax.lax.dynamic_slice(x, start, _sizes(x))
    shape = () if x.ndim == 2 else (x.shape[3], *x.shape[5:])
    return found.reshape(x.shape[1], *shape)

  return _tree({path: one(x) for path, x in {**batched, **unbatched}.items()})


def write_caches(
  flat: FlatCaches,
  changed: Any,
  work: stages.Work,
  microbatches: stages.Microbatches,
) -> FlatCaches:
  """Returns the caches of one stage with the changes of a tick."""
  new = _flat(changed)

  def one(x: jax.Array, part: jax.Array) -> jax.Array:
    part = part.reshape(_sizes(x)).astype(x.dtype)
    start = _start(x, work, microbatches)
    return jax.lax.dynamic_update_slice(x, part, start)

  return {path: one(x, new[path]) for path, x in flat.items()}


def _start(
  x: jax.Array, work: stages.Work, microbatches: stages.Microbatches
) -> tuple[Any, ...]:
  first = (work.repeat, 0)
  if x.ndim > 2:
    segment, index = divmod(work.microbatch, microbatches.per_segment)
    first += (segment, 0, index)
  return first + (0,) * (x.ndim - len(first))


def _sizes(x: jax.Array) -> tuple[int, ...]:
  if x.ndim == 2:
    return (1, x.shape[1])
  return (1, x.shape[1], 1, x.shape[3], 1, *x.shape[5:])


def _flat(tree: Any) -> dict[_Path, Any]:
  return traverse_util.flatten_dict(tree)


def _tree(flat: Mapping[_Path, Any]) -> dict[str, Any]:
  return traverse_util.unflatten_dict(dict(flat))
