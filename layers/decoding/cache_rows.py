"""Rows of a cache: one for each row that decodes.

A cache is a tree of the boxes that layers make (`sharding.variables`), which
name the axis of the rows wherever a stack has put it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxon.sharding import axes, variables


def repeated(cache: Any, count: int) -> Any:
  """Returns the cache with `count` neighbouring copies of each row.

  Args:
    cache: A tree of boxed variables, as a model's prefill returns it. What has
      no axis of rows, such as a number of filled slots, stays.
    count: Number of copies, at least 1.

  Raises:
    ValueError: A variable does not name its axes.
  """
  return mapped(
    cache, axes.BATCH, lambda x, axis: jnp.repeat(x, count, axis=axis)
  )


def taken(cache: Any, rows: jax.Array) -> Any:
  """Returns the cache of other rows: row `i` is row `rows[i]` of this one.

  For beams, which go on from some of the rows, some of them several times.

  Args:
    cache: See `repeated`.
    rows: int [R]; a row that does not exist is NaN.

  Raises:
    ValueError: A variable does not name its axes.
  """
  return mapped(cache, axes.BATCH, lambda x, axis: jnp.take(x, rows, axis=axis))


def mapped(
  cache: Any, axis: str, fn: Callable[[jax.Array, int], jax.Array]
) -> Any:
  """Returns the cache with each array changed that has a logical axis.

  Args:
    cache: See `repeated`.
    axis: The logical axis: `batch` for rows, `kv_length` for the slots of a
      contiguous cache (to pad or cut them).
    fn: Given an array and the number of the axis, returns what replaces it.

  Raises:
    ValueError: A variable does not name its axes.
  """

  def changed(path: Any, leaf: Any) -> Any:
    if not isinstance(leaf, variables.Variable):
      raise ValueError(
        f"The cache's variable {jax.tree_util.keystr(path)} does not name its "
        "axes, so its rows are not known; make it with sharding.variables."
        "boxed, or give `generate` another `repeat`."
      )
    if axis not in leaf.names:
      return leaf
    return leaf.replace(value=fn(leaf.value, leaf.names.index(axis)))

  return jax.tree_util.tree_map_with_path(
    changed, cache, is_leaf=lambda leaf: isinstance(leaf, variables.Variable)
  )
