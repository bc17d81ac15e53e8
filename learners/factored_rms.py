"""Gradients over the root of their mean square, kept as rows and columns.

For a matrix of one layer, with the decay b = 1 - t^(-decay_exponent):

  r <- b r + (1 - b) mean over columns of (g^2 + epsilon)
  c <- b c + (1 - b) mean over rows of (g^2 + epsilon)
  u  = g / sqrt(r c / mean(r))

Rows and columns are the two largest dimensions. A variable with fewer than two
dimensions of `min_dim_to_factor` keeps the whole mean square (Shazeer & Stern
2018, https://arxiv.org/abs/1804.04235, algorithms 4 and 5).

The formula is optax's. What differs is that each layer of a stacked variable is
a matrix of its own (optax would take `layers` for rows where a stack is deep),
that statistics keep the rank of their parameter, with size one for the
dimensions that are averaged, and that of equal dimensions the later ones are
taken (in optax that is up to numpy's sort, which differs between processors).
Therefore each statistic has the parameter's logical axes, and a square matrix
is no riddle.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups


class FactoredRmsState(NamedTuple):
  """Statistics; each tree has every parameter.

  Attributes:
    count: int32 scalar, the number of updates.
    row: Means over the largest dimension; size one where not factored.
    column: Means over the second largest; size one where not factored.
    full: Mean squares; size one where factored.
  """

  count: Any
  row: Any
  column: Any
  full: Any


class _Statistics(NamedTuple):
  row: jax.Array
  column: jax.Array
  full: jax.Array


def scale_by_factored_rms(
  *,
  decay_exponent: float,
  epsilon: float,
  min_dim_to_factor: int,
  specs: variable_groups.Specs | None,
) -> optax.GradientTransformation:
  """Returns the transformation from g to u.

  Args:
    decay_exponent: Of the number of updates in the decay.
    epsilon: Added to squared gradients.
    min_dim_to_factor: A dimension is factored from this size on.
    specs: Of the variables, which say what is stacked. `None`: nothing is.
  """

  def depths(tree: Any) -> Any:
    if specs is None:
      return jax.tree.map(lambda _: 0, tree)
    return jax.tree.map(lambda spec: len(spec.stacked), specs)

  def init(params: optax.Params) -> FactoredRmsState:
    statistics = jax.tree.map(
      lambda p, depth: _Statistics(
        *(
          jnp.zeros(p.shape[:depth] + shape, jnp.float32)
          for shape in _shapes(p.shape[depth:], min_dim_to_factor)
        )
      ),
      params,
      depths(params),
    )
    return _to_state(jnp.zeros((), jnp.int32), statistics)

  def update(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, FactoredRmsState]:
    del params
    number = (state.count + 1).astype(jnp.float32)
    decay = 1 - number**-decay_exponent

    def one(
      g: jax.Array, depth: int, *kept: jax.Array
    ) -> tuple[jax.Array, _Statistics]:
      dims = _factored_dims(g.shape[depth:], min_dim_to_factor)
      axes = None if dims is None else (depth + dims[0], depth + dims[1])
      return _update(
        g, _Statistics(*kept), axes=axes, decay=decay, epsilon=epsilon
      )

    pairs = jax.tree.map(
      one,
      updates,
      depths(updates),
      state.row,
      state.column,
      state.full,
    )
    scaled, statistics = (
      jax.tree.map(lambda pair, i=i: pair[i], pairs, is_leaf=_is_pair)
      for i in (0, 1)
    )
    return scaled, _to_state(optax.safe_increment(state.count), statistics)

  return optax.GradientTransformation(init, update)


def _update(
  gradient: jax.Array,
  kept: _Statistics,
  *,
  axes: tuple[int, int] | None,
  decay: jax.Array,
  epsilon: float,
) -> tuple[jax.Array, _Statistics]:
  """Updates one variable; `axes` are those of `_factored_dims`."""
  square = jnp.square(gradient) + epsilon

  def mixed(old: jax.Array, new: jax.Array) -> jax.Array:
    return decay * old + (1 - decay) * new

  if axes is None:
    full = mixed(kept.full, square)
    return gradient * full**-0.5, kept._replace(full=full)
  second, largest = axes
  row = mixed(kept.row, jnp.mean(square, axis=largest, keepdims=True))
  column = mixed(kept.column, jnp.mean(square, axis=second, keepdims=True))
  share = row / jnp.mean(row, axis=second, keepdims=True)
  return (
    gradient * share**-0.5 * column**-0.5,
    kept._replace(row=row, column=column),
  )


def _factored_dims(
  shape: tuple[int, ...], min_dim_to_factor: int
) -> tuple[int, int] | None:
  """Returns the second largest and the largest dimension of one layer.

  None where the whole mean square is kept.
  """
  if len(shape) < 2:
    return None
  second, largest = sorted(range(len(shape)), key=lambda i: shape[i])[-2:]
  return None if shape[second] < min_dim_to_factor else (second, largest)


def _shapes(
  shape: tuple[int, ...], min_dim_to_factor: int
) -> list[tuple[int, ...]]:
  """Shapes of the row, column and full statistics of one layer."""
  ones = (1,) * len(shape)
  dims = _factored_dims(shape, min_dim_to_factor)
  if dims is None:
    return [ones, ones, shape]
  second, largest = dims
  return [
    tuple(1 if i == reduced else n for i, n in enumerate(shape))
    for reduced in (largest, second)
  ] + [ones]


def _is_pair(node: Any) -> bool:
  return (
    isinstance(node, tuple)
    and len(node) == 2
    and isinstance(node[1], _Statistics)
  )


def _to_state(count: Any, statistics: Any) -> FactoredRmsState:
  row, column, full = (
    jax.tree.map(
      lambda s, i=i: s[i],
      statistics,
      is_leaf=lambda node: isinstance(node, _Statistics),
    )
    for i in range(3)
  )
  return FactoredRmsState(count=count, row=row, column=column, full=full)
