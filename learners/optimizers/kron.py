"""PSGD-Kron: momentum whitened by triangular Kronecker factors.

For a matrix with gradient g [inputs, outputs]:

  m <- b1 m + (1 - b1) g,   x = m / (1 - b1^t)
  u = ql^T ql x qr^T qr     clipped to an RMS of `max_update_rms`
  at some updates, before u, for v normal with the shape of x:
    a = ql x qr^T           b = ql^-T v qr^-1
    ql <- ql - rate_q / |a a^T + b b^T| triu(a a^T - b b^T) ql
    qr <- qr - rate_q / |a^T a + b^T b| triu(a^T a - b^T b) qr
  p <- p - rate (u + weight_decay p)

(Li 2015, https://arxiv.org/abs/1512.04202, and Pooladzandi & Li 2024,
https://arxiv.org/abs/2402.04553.) The norm is a lower bound of the spectral
norm. The factors start as identities and are scaled to equal maxima, which
leaves u as it is. A side larger than `max_dim`, and every variable that is not
a matrix, has a diagonal factor. The first `flat_steps` updates all change the
factors; then the probability falls exponentially to `min_probability`.

Random numbers depend only on the number of the update: matrices of the same
size, such as those of layers, share v, so that scanned and unrolled layers are
trained equally. m is sharded like its parameter, the factors only over layers.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import matrix_view, optimizer
from paxon.sharding import checks, target

# Keeps the factors of a variable without gradients finite.
_DAMPING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kron:
  """The PSGD-Kron optimizer.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Decay of the mean of gradients.
    factor_rate: Rate of the factors, less than 1.
    max_dim: Largest side of a matrix with a triangular factor.
    max_update_rms: Largest RMS of u of one variable; `None` clips none.
    flat_steps: Number of first updates that all change the factors.
    probability_decay: Decay per update of the probability after them.
    min_probability: Smallest probability that an update changes the factors.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  b1: float = 0.9
  factor_rate: float = 0.1
  max_dim: int = 8192
  max_update_rms: float | None = 1.1
  flat_steps: int = 500
  probability_decay: float = 0.001
  min_probability: float = 0.03
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1", "factor_rate")
    checks.check_positive(self, "factor_rate", "max_dim", "max_update_rms")
    checks.check_non_negative(
      self, "flat_steps", "probability_decay", "weight_decay"
    )
    checks.check_interval(self, "(0, 1]", "min_probability")

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
      max_update_rms=self.max_update_rms,
    )

  def changes_factors(self, count: ArrayLike) -> jax.Array:
    """Returns whether the update after `count` others changes the factors."""
    number = jnp.asarray(count, jnp.float32) - self.flat_steps
    probability = jnp.maximum(
      jnp.exp(-self.probability_decay * number), self.min_probability
    )
    return jax.random.uniform(_make_key(count, 0)) < probability

  def _direction(
    self, specs: variable_groups.Specs | None
  ) -> optax.GradientTransformation:
    """Returns the transformation from g to u."""

    def init(params: Any) -> KronState:
      leaves, treedef = jax.tree.flatten(params)
      pairs = [
        self._init(p, view)
        for p, view in zip(leaves, _find_views(params, specs), strict=True)
      ]
      return KronState(
        count=jnp.zeros((), jnp.int32),
        mean=jax.tree.map(lambda p: jnp.zeros(p.shape), params),
        left=treedef.unflatten([pair.left for pair in pairs]),
        right=treedef.unflatten([pair.right for pair in pairs]),
      )

    def update(
      updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, KronState]:
      del params
      count = optax.safe_increment(state.count)
      correction = 1 - self.b1 ** jnp.asarray(count, jnp.float32)
      mean = jax.tree.map(
        lambda m, g: self.b1 * m + (1 - self.b1) * g, state.mean, updates
      )
      leaves, treedef = jax.tree.flatten(mean)
      views = _find_views(updates, specs)
      xs = [
        view.to_matrices(m / correction)
        for m, view in zip(leaves, views, strict=True)
      ]
      lefts, rights = map(treedef.flatten_up_to, (state.left, state.right))
      pairs = [_Pair(*pair) for pair in zip(lefts, rights, strict=True)]

      def change(pairs: list[_Pair]) -> list[_Pair]:
        return [
          self._change(x, pair, view, state.count)
          for x, pair, view in zip(xs, pairs, views, strict=True)
        ]

      changes = self.changes_factors(state.count)
      pairs = jax.lax.cond(changes, change, lambda pairs: pairs, pairs)
      directions = [
        view.from_matrices(_whiten(x, pair, view), m.shape)
        for x, m, view, pair in zip(xs, leaves, views, pairs, strict=True)
      ]
      return treedef.unflatten(directions), KronState(
        count,
        mean,
        treedef.unflatten([pair.left for pair in pairs]),
        treedef.unflatten([pair.right for pair in pairs]),
      )

    return optax.GradientTransformation(init, update)

  def _init(self, p: jax.Array, view: "_View") -> "_Pair":
    *batch, rows, columns = jax.eval_shape(view.to_matrices, p).shape
    if view.sides is None:
      return _Pair(jnp.ones((*batch, rows)), jnp.ones((1,) * p.ndim))
    return _Pair(
      *(
        jnp.broadcast_to(jnp.eye(size), (*batch, size, size))
        if size <= self.max_dim
        else jnp.ones((*batch, size))
        for size in (rows, columns)
      )
    )

  def _change(
    self, x: jax.Array, pair: "_Pair", view: "_View", count: jax.Array
  ) -> "_Pair":
    """Returns the factors after one update of them."""
    left, right = pair
    probe = jnp.broadcast_to(draw_probe(count, x.shape[-2:]), x.shape)
    a = _multiply(left, x + _DAMPING * probe)
    b = _solve(left, probe)
    if view.sides is None:
      return pair._replace(left=self._step(left, a, b))
    a = _multiply(right, a.mT).mT
    b = _solve(right, b.mT).mT
    left, right = self._step(left, a, b), self._step(right, a.mT, b.mT)
    depth = x.ndim - 2
    largest = [
      jnp.max(jnp.abs(q), axis=tuple(range(depth, q.ndim)), keepdims=True)
      for q in (left, right)
    ]
    batch = x.shape[:-2]
    ratio = jnp.sqrt(largest[1].reshape(batch) / largest[0].reshape(batch))
    return _Pair(
      left * ratio.reshape(largest[0].shape),
      right / ratio.reshape(largest[1].shape),
    )

  def _step(self, q: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a factor after one step, for its side's a and b."""
    if q.ndim < a.ndim:
      of_a, of_b = (jnp.sum(jnp.square(x), axis=-1) for x in (a, b))
      norm = jnp.max(of_a + of_b, axis=-1, keepdims=True)
      return q - self.factor_rate * (of_a - of_b) / norm * q
    of_a, of_b = a @ a.mT, b @ b.mT
    norm = _bound_norm(of_a + of_b)[..., None, None]
    return q - self.factor_rate * jnp.triu((of_a - of_b) / norm) @ q


class KronState(NamedTuple):
  """Momentum and factors; each tree has the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    mean: m.
    left: ql: triangular [*batch, n, n], or a diagonal [*batch, n].
    right: qr; size one for a variable that is not a matrix.
  """

  count: Any
  mean: Any
  left: Any
  right: Any


class _Pair(NamedTuple):
  left: Any
  right: Any


@dataclasses.dataclass(frozen=True)
class _View:
  """A variable as matrices; one that has none is a column for each layer."""

  sides: matrix_view.Sides | None
  depth: int

  def to_matrices(self, x: jax.Array) -> jax.Array:
    if self.sides is None:
      return x.reshape(*x.shape[: self.depth], -1, 1)
    return matrix_view.to_matrices(x, self.sides)

  def from_matrices(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if self.sides is None:
      return x.reshape(shape)
    return matrix_view.from_matrices(x, shape, self.sides)


def draw_probe(count: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
  """Returns v of one layer, [inputs, outputs], after `count` updates."""
  return jax.random.normal(_make_key(count, 1), shape)


def _make_key(count: ArrayLike, stream: int) -> jax.Array:
  key = jax.random.key(stream, impl="threefry2x32")
  return jax.random.fold_in(key, count)


def _find_views(tree: Any, specs: variable_groups.Specs | None) -> list[_View]:
  depths = optimizer.find_depths(tree, specs)
  sides = matrix_view.find_all_sides(tree, specs)
  return [_View(*each) for each in zip(sides, depths, strict=True)]


def _whiten(x: jax.Array, pair: _Pair, view: _View) -> jax.Array:
  """Returns ql^T ql x qr^T qr."""
  left, right = pair
  x = _multiply(left, _multiply(left, x), is_transposed=True)
  if view.sides is None:
    return x
  x = x.mT
  return _multiply(right, _multiply(right, x), is_transposed=True).mT


def _multiply(
  q: jax.Array, x: jax.Array, *, is_transposed: bool = False
) -> jax.Array:
  """Returns q x or q^T x."""
  if q.ndim < x.ndim:
    return q[..., None] * x
  return (q.mT if is_transposed else q) @ x


def _solve(q: jax.Array, x: jax.Array) -> jax.Array:
  """Returns q^-T x."""
  if q.ndim < x.ndim:
    return x / q[..., None]
  solve = functools.partial(
    jax.scipy.linalg.solve_triangular, trans=1, lower=False
  )
  return target.map_matrices(solve, q, x)


def _bound_norm(x: jax.Array) -> jax.Array:
  """Returns a lower bound of the spectral norm of symmetric matrices.

  It is |x y| / |y| for y = x r, where r is the row of x with the largest norm.

  Args:
    x: [*batch, n, n].

  Returns:
    [*batch].
  """
  index = jnp.argmax(jnp.sum(jnp.square(x), axis=-1), axis=-1)
  row = jnp.take_along_axis(x, index[..., None, None], axis=-2)
  y = row @ x
  y = y / jnp.linalg.norm(y, axis=-1, keepdims=True)
  return jnp.linalg.norm(y @ x, axis=(-2, -1))
