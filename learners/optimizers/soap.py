"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

For a matrix with gradient g [inputs, outputs] and t updates after the first:

  g' = ql^T g qr                  ql, qr: bases of l, r
  m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g'^2
  u = ql ((ql^T m qr) sqrt(1 - b2^t) / (1 - b1^t) / (sqrt(v) + epsilon)) qr^T
  l <- b l + (1 - b) g g^T        r <- b r + (1 - b) g^T g
  every `refresh_every` updates:  ql <- QR(l ql), qr <- QR(r qr)
  p <- p - rate (u + weight_decay p)

(Vyas et al. 2024, https://arxiv.org/abs/2409.11321, algorithm 3, and the
authors' code.) The first gradient only initializes l and r, and the bases by an
eigendecomposition: the first u is zero. Before each QR, the columns of a basis
and their v are sorted by estimated eigenvalues. All other variables have the
same Adam without a basis.

Matrices are those of `matrix_view`, and tables. m and v are sharded like their
parameters; l, r and their bases only over layers. The refresh computes one QR
decomposition a side and is not partitioned.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import matrix_view, optimizer
from paxon.sharding import checks, target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soap:
  """The SOAP optimizer.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Decay of the mean of gradients.
    b2: Decay of the mean of squared gradients in the basis.
    statistics_decay: Decay b of l and r.
    epsilon: Added to the root of v.
    refresh_every: Number of updates between refreshes of the bases.
    max_dim: Largest side of a matrix with a basis; a larger side has none.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  b1: float = 0.95
  b2: float = 0.95
  statistics_decay: float = 0.95
  epsilon: float = 1e-8
  refresh_every: int = 10
  max_dim: int = 10_000
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1", "b2", "statistics_decay")
    checks.check_positive(self, "epsilon", "refresh_every", "max_dim")
    checks.check_non_negative(self, "weight_decay")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    `specs` None takes arrays of two dimensions for matrices, and decays all
    variables.
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
    """Returns the transformation from g to u."""
    return optimizer.make_per_variable(
      SoapState,
      find=lambda tree: matrix_view.find_all_sides(tree, specs),
      init=self._init,
      update=self._update,
    )

  def _init(
    self, p: jax.Array, sides: matrix_view.Sides | None
  ) -> list[jax.Array]:
    statistics = [jnp.zeros((1,) * p.ndim)] * 2
    if sides:
      batch = matrix_view.batch_shape(p.shape, sides)
      for i, size in enumerate(matrix_view.sizes(p.shape, sides)):
        if size <= self.max_dim:
          statistics[i] = jnp.zeros((*batch, size, size))
    zeros = jnp.zeros(p.shape)
    # Bases begin as zeros, because the first update sets them.
    return [zeros, zeros, *statistics, *statistics]

  def _update(
    self,
    g: jax.Array,
    old: "SoapState",
    sides: matrix_view.Sides | None,
  ) -> tuple[jax.Array, "SoapState"]:
    """Returns u of one variable, and its new state."""
    is_first = old.count == 0
    number = jnp.maximum(old.count, 1).astype(jnp.float32)
    correction = jnp.sqrt(1 - self.b2**number) / (1 - self.b1**number)
    # The first gradient is in no moment.
    mean = jnp.where(is_first, 0, self.b1 * old.mean + (1 - self.b1) * g)
    if sides is None:
      square = self.b2 * old.square + (1 - self.b2) * jnp.square(g)
      square = jnp.where(is_first, 0, square)
      u = mean * correction / (jnp.sqrt(square) + self.epsilon)
      return u, old._replace(mean=mean, square=square)

    sizes = matrix_view.sizes(g.shape, sides)
    used = [size <= self.max_dim for size in sizes]
    matrix = matrix_view.to_matrices(g, sides)
    bases = [old.left_basis, old.right_basis]
    projected = _rotate(matrix, bases, used)
    square = matrix_view.to_matrices(old.square, sides)
    square = self.b2 * square + (1 - self.b2) * jnp.square(projected)
    square = jnp.where(is_first, 0, square)
    direction = _rotate(matrix_view.to_matrices(mean, sides), bases, used)
    direction = direction * correction / (jnp.sqrt(square) + self.epsilon)
    direction = _rotate(direction, [basis.mT for basis in bases], used)

    statistics = [old.left, old.right]
    for i, outer in enumerate((lambda x: x @ x.mT, lambda x: x.mT @ x)):
      if used[i]:
        statistics[i] = self.statistics_decay * statistics[i] + (
          1 - self.statistics_decay
        ) * outer(matrix)
    branch = jnp.where(
      is_first, 2, jnp.where(old.count % self.refresh_every == 0, 1, 0)
    )
    bases, square = jax.lax.switch(
      branch,
      (
        lambda _, bases, square: (bases, square),
        functools.partial(_refresh, used=used),
        functools.partial(_decompose, used=used),
      ),
      statistics,
      bases,
      square,
    )
    return matrix_view.from_matrices(direction, g.shape, sides), SoapState(
      old.count,
      mean,
      matrix_view.from_matrices(square, g.shape, sides),
      *statistics,
      *bases,
    )


class SoapState(NamedTuple):
  """Moments and bases; each tree has the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    mean: m.
    square: v; of a matrix in the bases.
    left: l of matrices; size one for other variables and larger sides.
    right: r, likewise.
    left_basis: Columns are the basis of l.
    right_basis: Columns are the basis of r.
  """

  count: Any
  mean: Any
  square: Any
  left: Any
  right: Any
  left_basis: Any
  right_basis: Any


def _rotate(x: jax.Array, bases: Any, used: list[bool]) -> jax.Array:
  """Returns left^T x right, without the bases that are not used."""
  left, right = bases
  if used[0]:
    x = left.mT @ x
  return x @ right if used[1] else x


def _decompose(
  statistics: Any, bases: Any, square: jax.Array, *, used: list[bool]
) -> tuple[list[jax.Array], jax.Array]:
  """Returns the eigenvectors, by decreasing eigenvalues, and the squares."""
  new = [
    jnp.flip(target.map_matrices(jnp.linalg.eigh, x)[1], -1)
    if is_used
    else basis
    for x, basis, is_used in zip(statistics, bases, used, strict=True)
  ]
  return new, square


def _refresh(
  statistics: Any, bases: Any, square: jax.Array, *, used: list[bool]
) -> tuple[list[jax.Array], jax.Array]:
  """Returns the bases after one QR iteration, and their squares."""
  new = list(bases)
  for i, (x, basis) in enumerate(zip(statistics, bases, strict=True)):
    if not used[i]:
      continue
    product = x @ basis
    order = jnp.argsort(jnp.sum(basis * product, axis=-2), descending=True)
    columns = jnp.expand_dims(order, -2)
    rows = jnp.expand_dims(order, -1)
    product = jnp.take_along_axis(product, columns, axis=-1)
    square = (
      jnp.take_along_axis(square, rows, axis=-2)
      if i == 0
      else jnp.take_along_axis(square, columns, axis=-1)
    )
    new[i] = target.map_matrices(jnp.linalg.qr, product)[0]
  return new, square
