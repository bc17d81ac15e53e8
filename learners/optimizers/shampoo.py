"""Shampoo: preconditioning by roots of Kronecker factors, with grafting.

For each block of a matrix with gradient g [inputs, outputs], and t from 0:

  l <- b2 l + (1 - b2) g g^T      r <- b2 r + (1 - b2) g^T g
  u = (l + damping)^(-1/4) g (r + damping)^(-1/4)
  u <- u |a| / |u|                a: the update of the grafted optimizer
  m <- b1 m + u                   n <- b1 n + a
  p <- p - rate (m + weight_decay p)     n in place of m for t < `start_step`

(Gupta et al. 2018, https://arxiv.org/abs/1802.09568; Anil et al. 2020,
https://arxiv.org/abs/2002.09018.) The damping is `matrix_epsilon` times the
largest eigenvalue. A vector has r only, with the exponent -1/2. With Nesterov
momentum, the update is u + b1 m. Pax's `DistributedShampoo` is this optimizer
with `decoupled_learning_rate_from_momentum`.

Matrices are those of `matrix_view`, and tables. They are split into blocks of
at most `block_size` squared. A variable with a larger side than `max_dim` is
not preconditioned. Moments are sharded like their parameters, l, r and their
roots only over layers; each root is an eigendecomposition, which is not
partitioned.
"""

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import matrix_view, optimizer
from paxon.sharding import checks, target

_TINY = 1e-16


class Graft(enum.Enum):
  """The optimizer that determines the norm of an update."""

  SGD = "sgd"
  # g / (sqrt(sum of g^2) + diagonal_epsilon)
  ADAGRAD = "adagrad"
  # g / (sqrt(v) + diagonal_epsilon), v without bias correction.
  RMSPROP = "rmsprop"
  # RMSPROP of g / |g|.
  RMSPROP_NORMALIZED = "rmsprop_normalized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shampoo:
  """The Shampoo optimizer, with the defaults of Pax.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Decay of the momentum.
    b2: Decay of statistics and of the grafted optimizer; 1 sums them.
    graft: The grafted optimizer.
    diagonal_epsilon: Added to the root of the grafted optimizer.
    matrix_epsilon: Initial diagonal of statistics, and relative damping.
    block_size: Largest side of a block.
    start_step: First step, from 0, with the preconditioned momentum.
    roots_every: Number of steps between new roots.
    statistics_every: Number of steps between new statistics.
    nesterov: Whether to use Nesterov momentum.
    average_momentum: Whether the momentum is a mean: u and a have the factor
      1 - b1.
    max_dim: Largest side of a preconditioned variable.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  b1: float = 0.9
  b2: float = 0.999
  graft: Graft = Graft.ADAGRAD
  diagonal_epsilon: float = 1e-16
  matrix_epsilon: float = 1e-6
  block_size: int = 1024
  start_step: int = 101
  roots_every: int = 100
  statistics_every: int = 1
  nesterov: bool = True
  average_momentum: bool = False
  max_dim: int = 4096
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1")
    checks.check_interval(self, "[0, 1]", "b2")
    checks.check_positive(
      self,
      "diagonal_epsilon",
      "matrix_epsilon",
      "block_size",
      "roots_every",
      "statistics_every",
      "max_dim",
    )
    checks.check_non_negative(self, "start_step", "weight_decay")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    `specs` None treats no variable as stacked, takes arrays of two dimensions
    for matrices, and decays all variables.
    """
    return optimizer.descent(
      self._direction(specs),
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )

  def _direction(
    self, specs: variable_groups.Specs | None
  ) -> optax.GradientTransformation:
    """Returns the transformation from g to m."""
    return optimizer.make_per_variable(
      ShampooState,
      find=lambda tree: _find_views(tree, specs, self),
      init=self._init,
      update=self._update,
    )

  def _init(self, p: jax.Array, view: "_View") -> list[jax.Array]:
    one, zeros = jnp.zeros((1,) * p.ndim), jnp.zeros(p.shape)
    statistics, roots = [one, one], [one, one]
    blocks = view.to_blocks(zeros)
    for i in view.sides:
      size = blocks.shape[-2 + i]
      eye = jnp.broadcast_to(jnp.eye(size), (*blocks.shape[:-2], size, size))
      statistics[i], roots[i] = self.matrix_epsilon * eye, eye
    diagonal = one if self.graft is Graft.SGD else zeros
    return [zeros, zeros, diagonal, *statistics, *roots]

  def _update(
    self, g: jax.Array, old: "ShampooState", view: "_View"
  ) -> tuple[jax.Array, "ShampooState"]:
    """Returns the direction of one variable, and its new state."""
    axes = tuple(range(view.depth, g.ndim))
    grafted, diagonal = self._graft(g, old.diagonal, axes)
    statistics, roots = [old.left, old.right], [old.left_root, old.right_root]
    u = grafted
    if view.sides:
      blocks = view.to_blocks(g)
      keep, share = self.b2, 1.0 if self.b2 == 1 else 1 - self.b2
      is_counted = old.count % self.statistics_every == 0
      for i in view.sides:
        outer = blocks @ blocks.mT if i == 0 else blocks.mT @ blocks
        statistics[i] = jnp.where(
          is_counted, keep * statistics[i] + share * outer, statistics[i]
        )
      roots = jax.lax.cond(
        old.count % self.roots_every == 0,
        lambda statistics, roots: [
          self._root(x, root, len(view.sides)) if i in view.sides else root
          for i, (x, root) in enumerate(zip(statistics, roots, strict=True))
        ],
        lambda _, roots: roots,
        statistics,
        roots,
      )
      if 0 in view.sides:
        blocks = roots[0] @ blocks
      u = view.from_blocks(blocks @ roots[1], g.shape)
    u = u * (_norm(grafted, axes) / (_norm(u, axes) + _TINY))
    share = 1 - self.b1 if self.average_momentum else 1.0
    momentum = self.b1 * old.momentum + share * u
    grafted_momentum = self.b1 * old.grafted_momentum + share * grafted
    is_started = old.count >= self.start_step
    direction = jnp.where(is_started, momentum, grafted_momentum)
    if self.nesterov:
      direction = self.b1 * direction + share * jnp.where(
        is_started, u, grafted
      )
    return direction, ShampooState(
      old.count, momentum, grafted_momentum, diagonal, *statistics, *roots
    )

  def _graft(
    self, g: jax.Array, diagonal: jax.Array, axes: tuple[int, ...]
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the update of the grafted optimizer and its statistics."""
    if self.graft is Graft.SGD:
      return g, diagonal
    if self.graft is Graft.RMSPROP_NORMALIZED:
      g = g / (_norm(g, axes) + _TINY)
    if self.graft is Graft.ADAGRAD or self.b2 == 1:
      diagonal = diagonal + jnp.square(g)
    else:
      diagonal = self.b2 * diagonal + (1 - self.b2) * jnp.square(g)
    return g / (jnp.sqrt(diagonal) + self.diagonal_epsilon), diagonal

  def _root(self, x: jax.Array, old: jax.Array, num_sides: int) -> jax.Array:
    """Returns (x + damping)^(-1 / (2 num_sides)); `old` if it is not finite."""
    values, vectors = target.map_matrices(jnp.linalg.eigh, x)
    values = jnp.maximum(values, 0)
    values = values + self.matrix_epsilon * values[..., -1:]
    powers = jnp.expand_dims(values ** (-1 / (2 * num_sides)), -2)
    root = (vectors * powers) @ vectors.mT
    return jnp.where(
      jnp.all(jnp.isfinite(root), axis=(-2, -1), keepdims=True), root, old
    )


class ShampooState(NamedTuple):
  """Moments and preconditioners; trees with the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    momentum: m.
    grafted_momentum: n.
    diagonal: Squares of the grafted optimizer; size one for SGD.
    left: l of all blocks, [..., blocks of inputs, of outputs, size, size];
      size one for variables without it.
    right: r, likewise.
    left_root: Inverse root of l.
    right_root: Inverse root of r.
  """

  count: Any
  momentum: Any
  grafted_momentum: Any
  diagonal: Any
  left: Any
  right: Any
  left_root: Any
  right_root: Any


@dataclasses.dataclass(frozen=True)
class _View:
  """A variable as blocks of matrices.

  Attributes:
    depth: Number of stacked axes.
    matrix: Sides of a matrix; None for a vector or no preconditioner.
    sides: Preconditioned sides: 0 for inputs, 1 for outputs.
    block_size: Largest side of a block.
  """

  depth: int
  matrix: matrix_view.Sides | None
  sides: tuple[int, ...]
  block_size: int

  def to_blocks(self, x: jax.Array) -> jax.Array:
    """Returns [..., blocks of inputs, of outputs, inputs, outputs]."""
    if not self.sides:
      return x
    x = (
      matrix_view.to_matrices(x, self.matrix)
      if self.matrix
      else jnp.expand_dims(x, -2)
    )
    *batch, inputs, outputs = x.shape
    rows, columns = (min(n, self.block_size) for n in (inputs, outputs))
    # Zeros change neither statistics nor roots of the other elements.
    pads = [(0, 0)] * len(batch) + [
      (0, -inputs % rows),
      (0, -outputs % columns),
    ]
    x = jnp.pad(x, pads)
    x = x.reshape(
      *batch, x.shape[-2] // rows, rows, x.shape[-1] // columns, columns
    )
    return jnp.swapaxes(x, -3, -2)

  def from_blocks(self, blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the variable of this shape, the inverse of `to_blocks`."""
    x = jnp.swapaxes(blocks, -3, -2)
    *batch, first, rows, second, columns = x.shape
    x = x.reshape(*batch, first * rows, second * columns)
    if self.matrix is None:
      return x[..., 0, : shape[-1]]
    inputs, outputs = matrix_view.sizes(shape, self.matrix)
    return matrix_view.from_matrices(
      x[..., :inputs, :outputs], shape, self.matrix
    )


def _find_views(
  tree: Any, specs: variable_groups.Specs | None, fields: Shampoo
) -> list[_View]:
  found = matrix_view.find_all_sides(tree, specs)
  depths = optimizer.find_depths(tree, specs)
  views = []
  for x, matrix, depth in zip(
    jax.tree.leaves(tree), found, depths, strict=True
  ):
    sides: tuple[int, ...] = ()
    if matrix and max(matrix_view.sizes(x.shape, matrix)) <= fields.max_dim:
      sides = 0, 1
    elif x.ndim - depth == 1 and x.shape[-1] <= fields.max_dim:
      sides = (1,)
    views.append(_View(depth, matrix, sides, fields.block_size))
  return views


def _norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))
