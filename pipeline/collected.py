"""What layers made for each microbatch, as a stack that is no pipeline has it.

Every microbatch begins with the same values. Afterwards

  * what a layer recorded (`sow`: summaries, auxiliary losses, records of users)
    is averaged over microbatches if it is a number; an array whose first axis
    is the rows of a microbatch gets the rows of the batch. Rows are told by the
    size of that axis alone: an array of something else that is as long by
    chance (a histogram of 8 bins, with 8 rows) is taken for rows, so sow means
    and other numbers, or arrays that have rows;
  * a variable that the forward pass replaces is combined as its `CombineRule`
    says (`learners.combining`);
  * a cache has the rows of the batch; what in it has no rows is the same for
    all microbatches.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import traverse_util
from flax.core import meta
import jax
import jax.numpy as jnp

from paxon.layers import stacked_cache
from paxon.learners import combining
from paxon.pipeline import microbatch_rows
from paxon.sharding import axes, variables

_Path = tuple[str, ...]


def combined(
  made: Any,
  *,
  old: Any,
  specs: variables.Specs,
  rows: microbatch_rows.Rows,
  size: int,
  period: int,
) -> dict[str, Any]:
  """Returns the collections of all layers, [G,...].

  Args:
    made: Of each microbatch, arrays [M,G,...] by collection; boxes around them
      are of one layer's.
    old: The collections before.
    specs: Of the variables that the model begins with.
    rows: Which rows are in which microbatch.
    size: Rows of a microbatch.
    period: Blocks of a group, for boxes.

  Raises:
    ValueError: A record is neither a number nor has rows.
  """
  flat = _flat(made)
  flat_old, flat_specs = _flat(old), _flat(specs)
  replaced = {p for p in flat if p in flat_old and p in flat_specs}
  result: dict[_Path, Any] = _flat(
    combining.replaced(
      _tree({p: flat[p] for p in replaced}),
      old=_tree({p: flat_old[p] for p in replaced}),
      specs=_tree({p: flat_specs[p] for p in replaced}),
    )
  )
  for path, leaf in flat.items():
    if path not in replaced:
      whole = _cached if path[0] == stacked_cache.COLLECTION else _recorded
      whole = functools.partial(whole, path, rows=rows, size=size)
      result[path] = _boxed(leaf, period, whole)
  return _tree(result)


def _boxed(leaf: Any, period: int, fn: Callable[[jax.Array], jax.Array]) -> Any:
  """Returns `fn` of the arrays of a leaf, which are stacked then."""
  params = {meta.PARTITION_NAME: axes.LAYERS, variables.PERIOD: period}

  def one(x: Any) -> Any:
    if isinstance(x, meta.AxisMetadata):
      return x.replace_boxed(fn(x.unbox())).add_axis(0, params)
    return fn(x)

  return jax.tree.map(
    one, leaf, is_leaf=lambda x: isinstance(x, meta.AxisMetadata)
  )


def _cached(
  path: _Path, x: jax.Array, *, rows: microbatch_rows.Rows, size: int
) -> jax.Array:
  """[M,G,rows,...] to [G,M * rows,...]; what has no rows to [G]."""
  if x.ndim == 2:
    return x[0]
  _check_rows(path, x, size)
  return jax.vmap(rows.merge_flat, in_axes=1)(x)


def _recorded(
  path: _Path, x: jax.Array, *, rows: microbatch_rows.Rows, size: int
) -> jax.Array:
  if x.ndim == 2:
    if jnp.issubdtype(x.dtype, jnp.floating):
      return jnp.mean(x, axis=0)
    raise ValueError(
      f"A layer in a pipeline recorded {'/'.join(path)}, a number of dtype"
      f" {x.dtype.name}, which cannot be averaged over microbatches; record it"
      " as a float."
    )
  _check_rows(path, x, size)
  return jax.vmap(rows.merge_flat, in_axes=1)(x)


def _check_rows(path: _Path, x: jax.Array, size: int) -> None:
  if x.shape[2] != size:
    raise ValueError(
      f"A layer in a pipeline made {'/'.join(path)} of shape {x.shape[2:]} from"
      f" a microbatch of {size} rows; it must be a number, or have the rows as"
      " its first axis."
    )


def _flat(tree: Any) -> dict[_Path, Any]:
  return traverse_util.flatten_dict(tree)


def _tree(flat: dict[_Path, Any]) -> dict[str, Any]:
  return traverse_util.unflatten_dict(flat)
