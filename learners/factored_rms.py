"""Gradients over the root of their mean square, kept as rows and columns.

For a matrix of one layer, with the decay b = 1 - t^(-decay_exponent):

  r <- b r + (1 - b) mean over columns of (g^2 + epsilon)
  c <- b c + (1 - b) mean over rows of (g^2 + epsilon)
  u  = g / sqrt(r c / mean(r))

Rows and columns are the two largest dimensions. A variable with fewer than two
dimensions of `min_dim_to_factor` keeps the whole mean square (Shazeer & Stern
2018, https://arxiv.org/abs/1804.04235, algorithms 4 and 5).

The formula is optax's. What is done here is that each layer of a stacked
variable is a matrix of its own (optax alone would take `layers` for rows where
a stack is deep), and that statistics keep the rank of their parameter, with
size one for the dimensions that are averaged. Therefore each statistic has the
parameter's logical axes, and a square matrix is no riddle.
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
  inner: Any = optax.scale_by_factored_rms(
    decay_rate=decay_exponent,
    epsilon=epsilon,
    min_dim_size_to_factor=min_dim_to_factor,
  )

  def depths(tree: Any) -> Any:
    if specs is None:
      return jax.tree.map(lambda _: 0, tree)
    return jax.tree.map(lambda spec: len(spec.stacked), specs)

  def init(params: optax.Params) -> FactoredRmsState:
    statistics = jax.tree.map(
      lambda p, depth: _Statistics(
        *(
          jnp.zeros(p.shape[:depth] + shape, jnp.float32)
          for shape in _kept_shapes(inner, p.shape[depth:])
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
    pairs = jax.tree.map(
      lambda g, depth, *stats: _update(
        inner, g, _Statistics(*stats), state.count, depth
      ),
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
  inner: Any,
  gradient: jax.Array,
  statistics: _Statistics,
  count: jax.Array,
  depth: int,
) -> tuple[jax.Array, _Statistics]:
  """Updates one variable, each of its layers alone."""
  shapes = _shapes(inner, gradient.shape[depth:])

  def one_layer(
    g: jax.Array, kept: _Statistics
  ) -> tuple[jax.Array, _Statistics]:
    parts = (x.reshape(s) for x, s in zip(kept, shapes, strict=True))
    state = inner.init(g)._replace(
      count=count, **dict(zip(("v_row", "v_col", "v"), parts, strict=True))
    )
    scaled, new = inner.update(g, state, g)
    return scaled, _Statistics(
      *(
        x.reshape(old.shape)
        for x, old in zip((new.v_row, new.v_col, new.v), kept, strict=True)
      )
    )

  fn = one_layer
  for _ in range(depth):
    fn = jax.vmap(fn)
  return fn(gradient, statistics)


def _shapes(
  inner: Any, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
  """Shapes of optax's row, column and full statistics of one layer."""
  state = jax.eval_shape(inner.init, jax.ShapeDtypeStruct(shape, jnp.float32))
  return state.v_row.shape, state.v_col.shape, state.v.shape


def _kept_shapes(inner: Any, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
  """The same with the rank of the parameter."""
  _, _, full = _shapes(inner, shape)
  ones = (1,) * len(shape)
  if full == shape:
    return [ones, ones, shape]
  # As optax does: the two largest dimensions, of equal ones the later.
  second, largest = sorted(range(len(shape)), key=lambda i: shape[i])[-2:]
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
