"""Adam-mini: Adam with one second moment for a block of a variable.

  m <- b1 m + (1 - b1) g
  v <- b2 v + (1 - b2) mean of g^2 over each block
  u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)

(Zhang et al. 2024, https://arxiv.org/abs/2406.16793, algorithm 1.) Blocks
follow the Hessian: a head of queries and of keys, an output of another kernel,
a token of an embedding or head, and a whole vector. Kernels of queries and keys
are those whose name ends with a name in `query_key`; tables and heads of the
vocabulary are recognized by the axis `vocab`. A kernel with all heads in one
array, queries, keys and values, has a block for each output.

m is sharded like its parameter, v like what is left of it.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import matrix_view, optimizer
from paxon.sharding import axes as axis_names
from paxon.sharding import checks, variables


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamMini:
  """The Adam-mini optimizer.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Decay of the mean of gradients.
    b2: Decay of the mean of squared gradients.
    epsilon: Added to the root of the mean of squared gradients.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
    query_key: Names of the kernels with one block for each head.
  """

  schedule: optax.Schedule
  b1: float = 0.9
  b2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.0
  query_key: Sequence[str] = ("query", "key")

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1", "b2")
    checks.check_positive(self, "epsilon")
    checks.check_non_negative(self, "weight_decay")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    `specs` None takes arrays of two dimensions for matrices, and decays all
    variables.
    """

    def init(params: Any) -> AdamMiniState:
      square = jax.tree.map(
        lambda p, dims: jnp.zeros(
          [1 if i in dims else n for i, n in enumerate(p.shape)]
        ),
        params,
        self._find_block_dims(params, specs),
      )
      zeros = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
      return AdamMiniState(jnp.zeros((), jnp.int32), zeros, square)

    def update(
      updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, AdamMiniState]:
      del params
      count = optax.safe_increment(state.count)
      mean = jax.tree.map(
        lambda m, g: self.b1 * m + (1 - self.b1) * g, state.mean, updates
      )
      square = jax.tree.map(
        lambda v, g, dims: (
          self.b2 * v
          + (1 - self.b2) * jnp.mean(jnp.square(g), axis=dims, keepdims=True)
        ),
        state.square,
        updates,
        self._find_block_dims(updates, specs),
      )
      t = jnp.asarray(count, jnp.float32)
      direction = jax.tree.map(
        lambda m, v: (
          (m / (1 - self.b1**t))
          / (jnp.sqrt(v / (1 - self.b2**t)) + self.epsilon)
        ),
        mean,
        square,
      )
      return direction, AdamMiniState(count, mean, square)

    return optimizer.descent(
      optax.GradientTransformation(init, update),
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )

  def _find_block_dims(
    self, tree: Any, specs: variable_groups.Specs | None
  ) -> Any:
    """Returns the dimensions over which each variable's blocks extend."""
    if specs is None:
      return jax.tree.map(
        lambda x: (0,) if x.ndim == 2 else tuple(range(x.ndim)), tree
      )
    return jax.tree.map(self._reduced_dims, specs)

  def _reduced_dims(self, spec: variables.VariableSpec) -> tuple[int, ...]:
    every = tuple(range(len(spec.stacked), len(spec.shape)))
    sides = matrix_view.find_sides(spec)
    if sides is None:
      return every
    if matrix_view.has_vocab(spec):
      kept = [i for i in every if spec.axes[i] == axis_names.VOCAB]
    elif spec.name.rpartition("/")[2] in self.query_key:
      heads = (axis_names.HEADS, axis_names.KV_HEADS)
      kept = [i for i in every if spec.axes[i] in heads]
    else:
      return sides.inputs
    return tuple(i for i in every if i not in kept)


class AdamMiniState(NamedTuple):
  """Moments; each tree has the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    mean: m.
    square: v, of size one in the dimensions of a block.
  """

  count: Any
  mean: Any
  square: Any
