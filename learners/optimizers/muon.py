"""Muon: orthogonalized momentum for matrices, Adam for all other variables.

  m <- momentum m + g
  d <- momentum m + g, with the new m; without Nesterov momentum d = m
  u <- scale orthogonalize(d)
  p <- p - rate(t - 1) (u + weight_decay p)

(Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.) The scale is
sqrt(max(1, outputs / inputs)), or with `update_rms` r it is
r sqrt(max(inputs, outputs)). Then updates have about the RMS of Adam's, so both
parts share a learning rate and a weight decay (Liu et al. 2025,
https://arxiv.org/abs/2502.16982, section 2.2).

A matrix is a regularized variable with at least two dimensions in one layer,
other than tables of the vocabulary. Heads and their features are one side of
it; each layer and each expert has its own. Moments are float32 and sharded like
their parameters.

An iteration needs whole matrices. Gathering them in each iteration would send
ten times the parameters to each device; instead, they are exchanged so that
each device orthogonalizes its share of them, and sent back. If the number of
devices does not divide the matrices of each shape, devices are divided between
the shapes, so that few wait for others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import matrix_view, optimizer
from paxon.sharding import checks, target

# Of Jordan et al.: x <- a x + (b x x^T + c (x x^T)^2) x.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon:
  """The Muon optimizer.

  Attributes:
    schedule: Maps a step to a learning rate, of matrices and of the others.
    momentum: Decay of the sum of gradients of a matrix.
    nesterov: Whether to use Nesterov momentum.
    num_iterations: Number of Newton-Schulz iterations.
    iteration_dtype: Dtype of the iterations, and of matrices on their way
      between devices; `None` is bfloat16 as in the authors' code, and float32
      on CPUs, which multiply bfloat16 slowly.
    update_rms: RMS of the update of a full-rank matrix at rate 1; `None`
      scales by sqrt(max(1, outputs / inputs)), which needs higher rates.
    b1: Adam's decay of the mean of gradients.
    b2: Adam's decay of the mean of squared gradients.
    epsilon: Added to the norm of d and to Adam's root.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  momentum: float = 0.95
  nesterov: bool = True
  num_iterations: int = 5
  iteration_dtype: DTypeLike | None = None
  update_rms: float | None = 0.2
  b1: float = 0.9
  b2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_decay(self, "momentum", "b1", "b2")
    checks.check_positive(self, "num_iterations", "update_rms", "epsilon")
    checks.check_non_negative(self, "weight_decay")
    dtype = self.iteration_dtype
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        "Muon.iteration_dtype must be a floating dtype, such as bfloat16, got"
        f" {dtype}."
      )

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
    """Returns the transformation from g to the direction u."""

    def find(tree: Any) -> list[matrix_view.Sides | None]:
      found = matrix_view.find_all_sides(tree, specs)
      if specs is None:
        return found
      flat = jax.tree.structure(tree).flatten_up_to(specs)
      return [
        None if matrix_view.has_vocab(spec) else sides
        for spec, sides in zip(flat, found, strict=True)
      ]

    def init(params: Any) -> MuonState:
      leaves, treedef = jax.tree.flatten(params)
      squares = [
        jnp.zeros((1,) * x.ndim if sides else x.shape, jnp.float32)
        for x, sides in zip(leaves, find(params), strict=True)
      ]
      return MuonState(
        count=jnp.zeros((), jnp.int32),
        momentum=jax.tree.map(lambda x: jnp.zeros(x.shape), params),
        square=treedef.unflatten(squares),
      )

    def update(
      updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, MuonState]:
      del params
      count = optax.safe_increment(state.count)
      number = jnp.asarray(count, jnp.float32)
      leaves, treedef = jax.tree.flatten(updates)
      momenta = treedef.flatten_up_to(state.momentum)
      squares = treedef.flatten_up_to(state.square)
      matrices: dict[int, matrix_view.Sides] = {}
      for i, (g, sides) in enumerate(zip(leaves, find(updates), strict=True)):
        if sides:
          momenta[i] = self.momentum * momenta[i] + g
          d = self.momentum * momenta[i] + g if self.nesterov else momenta[i]
          leaves[i], matrices[i] = d, sides
        else:
          momenta[i] = self.b1 * momenta[i] + (1 - self.b1) * g
          squares[i] = self.b2 * squares[i] + (1 - self.b2) * jnp.square(g)
          mean = momenta[i] / (1 - self.b1**number)
          root = jnp.sqrt(squares[i] / (1 - self.b2**number))
          leaves[i] = mean / (root + self.epsilon)
      for i, direction in self._orthogonalize(leaves, matrices):
        leaves[i] = direction
      return treedef.unflatten(leaves), MuonState(
        count, treedef.unflatten(momenta), treedef.unflatten(squares)
      )

    return optax.GradientTransformation(init, update)

  def _orthogonalize(
    self, leaves: Sequence[jax.Array], matrices: Mapping[int, matrix_view.Sides]
  ) -> Iterator[tuple[int, jax.Array]]:
    """Yields the scaled, orthogonalized matrices of each variable."""
    dtype = self.iteration_dtype
    if dtype is None:
      dtype = target.fast_matmul_dtype()
    groups: dict[tuple[int, ...], list[tuple[int, jax.Array]]] = {}
    for i, sides in matrices.items():
      x = matrix_view.to_matrices(leaves[i], sides)
      x = x.mT if x.shape[-2] > x.shape[-1] else x
      x = x.reshape(-1, *x.shape[-2:]).astype(dtype)
      groups.setdefault(x.shape[-2:], []).append((i, x))
    found = _map_shared(
      lambda x: orthogonalize(
        x, num_iterations=self.num_iterations, epsilon=self.epsilon
      ),
      [jnp.concatenate([x for _, x in group]) for group in groups.values()],
    )
    for group, directions in zip(groups.values(), found, strict=True):
      begin = 0
      for i, stack in group:
        x, sides = directions[begin : begin + len(stack)], matrices[i]
        begin += len(stack)
        inputs, outputs = matrix_view.sizes(leaves[i].shape, sides)
        x = x.astype(jnp.float32)
        x = x.mT if inputs > outputs else x
        scale = math.sqrt(max(1, outputs / inputs))
        if self.update_rms is not None:
          scale = self.update_rms * math.sqrt(max(inputs, outputs))
        batch = matrix_view.batch_shape(leaves[i].shape, sides)
        x = x.reshape(*batch, inputs, outputs)
        yield i, scale * matrix_view.from_matrices(x, leaves[i].shape, sides)


class MuonState(NamedTuple):
  """Moments; both trees have the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    momentum: m of matrices, Adam's mean of the other variables.
    square: Adam's mean square; size one for matrices.
  """

  count: Any
  momentum: Any
  square: Any


def orthogonalize(
  x: jax.Array, *, num_iterations: int = 5, epsilon: float = 1e-8
) -> jax.Array:
  """Moves the singular values of matrices to about one.

  With Jordan's quintic Newton-Schulz iteration, they are within [0.5, 1.5]
  unless they were below about 1e-3 of the Frobenius norm.

  Args:
    x: Matrices [..., inputs, outputs]; iterations have their dtype.
    num_iterations: Number of iterations.
    epsilon: Added to the Frobenius norm, which is float32.

  Returns:
    [..., inputs, outputs], of the dtype of `x`.
  """
  is_tall = x.shape[-2] > x.shape[-1]
  if is_tall:
    x = x.mT
  wide = x.astype(jnp.float32)
  norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
  x = (wide / (norm + epsilon)).astype(x.dtype)
  a, b, c = _COEFFICIENTS
  for _ in range(num_iterations):
    square = x @ x.mT
    x = a * x + (b * square + c * (square @ square)) @ x
  return x.mT if is_tall else x


def _map_shared(
  fn: Callable[[jax.Array], jax.Array], stacks: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns `fn` of each stack, whose matrices are split over all devices.

  Args:
    fn: Maps matrices [number, rows, columns], each by itself, and zeros to
      zeros, which fill up shares.
    stacks: Matrices [number, rows, columns] of different shapes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = tuple(name for name, size in mesh.shape.items() if size > 1)
  if not axes or not stacks:
    return [fn(x) for x in stacks]
  blocks = assign_devices([x.shape for x in stacks], mesh.size)
  if blocks is None:
    blocks = [range(mesh.size)] * len(stacks)
  shares = []
  for x, block in zip(stacks, blocks, strict=True):
    number = -(-len(x) // len(block))
    before = block.start * number
    after = mesh.size * number - before - len(x)
    x = jnp.pad(x, ((before, after), (0, 0), (0, 0)))
    shares.append(jax.lax.with_sharding_constraint(x, jax.P(axes)))
  if blocks[0].start == blocks[-1].start:
    found = [fn(x) for x in shares]
  else:
    found = _switch(fn, shares, blocks, axes)
  return [
    y[(begin := block.start * (len(y) // mesh.size)) : begin + len(x)]
    for x, y, block in zip(stacks, found, blocks, strict=True)
  ]


def _switch(
  fn: Callable[[jax.Array], jax.Array],
  shares: Sequence[jax.Array],
  blocks: Sequence[range],
  axes: tuple[str, ...],
) -> list[jax.Array]:
  """Returns `fn` of the one share that each device has to compute."""

  def compute(*xs: jax.Array) -> list[jax.Array]:
    ends = jnp.asarray([block.stop for block in blocks[:-1]])
    chosen = jnp.sum(jax.lax.axis_index(axes) >= ends)
    return jax.lax.switch(
      chosen,
      [
        lambda *xs, i=i: [fn(x) if i == j else x for j, x in enumerate(xs)]
        for i in range(len(xs))
      ],
      *xs,
    )

  spec = jax.P(axes)
  return jax.shard_map(compute, in_specs=spec, out_specs=spec)(*shares)


def assign_devices(
  shapes: Sequence[tuple[int, ...]], num_devices: int
) -> list[range] | None:
  """Divides devices between shapes of matrices, for the shortest computation.

  Args:
    shapes: (number, rows, columns), with rows <= columns.
    num_devices: Number of devices.

  Returns:
    Consecutive devices of each shape; None if it is no faster than to split the
    matrices of each shape over all devices.
  """
  costs = [rows**2 * (2 * columns + rows) for _, rows, columns in shapes]
  numbers = [shape[0] for shape in shapes]

  def divide(limit: int) -> list[int]:
    return [
      -(-n // (limit // cost)) for n, cost in zip(numbers, costs, strict=True)
    ]

  limits = {
    k * cost
    for n, cost in zip(numbers, costs, strict=True)
    for k in range(1, n + 1)
    if k * cost >= max(costs)
  }
  together = sum(
    -(-n // num_devices) * cost for n, cost in zip(numbers, costs, strict=True)
  )
  fitting = [
    x for x in limits if sum(divide(x)) <= num_devices and x < together
  ]
  if len(shapes) < 2 or not fitting:
    return None
  counts = divide(min(fitting))
  ends = [sum(counts[: i + 1]) for i in range(len(counts))]
  return [range(end - n, end) for end, n in zip(ends, counts, strict=True)]
