"""Adafactor: factored second moments.

  u <- g / sqrt(factored mean of g^2)           see `scale_by_factored_rms`
  u <- u / max(1, rms(u) / max_update_rms)
  u <- u max(rms(p), min_param_rms)             unless min_param_rms is None
  u <- m <- b1 m + (1 - b1) u                   unless b1 is None
  p <- p - rate(t - 1) (u + weight_decay p)

(Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235.) The mean square of a
matrix takes the memory of one row and one column. Each layer of a stacked
variable has separate statistics and clipping. Statistics are float32 and
sharded like their parameter. Weight decay applies to variables with
`VariableSpec.regularized` and, unlike in optax's Adafactor, is scaled by the
learning rate.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxon.learners import optimizer, variable_clipping, variable_groups
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
  """The Adafactor optimizer.

  Attributes:
    schedule: Maps a step to a learning rate, which is relative to the RMS of
      the parameter unless `min_param_rms` is `None`.
    decay_exponent: The decay of the mean square is 1 - t^(-decay_exponent).
    epsilon: Added to squared gradients.
    min_dim_to_factor: Smallest dimension that is factored.
    max_update_rms: Largest RMS of the update of one variable of one layer at
      rate 1, before scaling by the parameter; `None` disables the clipping.
    min_param_rms: Updates are multiplied by the RMS of their parameter, at
      least this. `None` disables the scaling.
    b1: Decay of the momentum; `None` disables momentum.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  decay_exponent: float = 0.8
  epsilon: float = 1e-30
  min_dim_to_factor: int = 128
  max_update_rms: float | None = 1.0
  min_param_rms: float | None = 1e-3
  b1: float | None = None
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_positive(
      self,
      "decay_exponent",
      "epsilon",
      "min_dim_to_factor",
      "max_update_rms",
      "min_param_rms",
    )
    checks.check_decay(self, "b1")
    checks.check_non_negative(self, "weight_decay")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    `specs` None decays all variables and treats none as stacked.
    """

    def clip_and_scale(
      updates: optax.Updates, params: optax.Params | None
    ) -> optax.Updates:
      if self.max_update_rms is not None:
        updates = variable_clipping.by_rms(
          updates, max_rms=self.max_update_rms, specs=specs
        )
      if self.min_param_rms is not None:
        updates = variable_clipping.scale_by_rms(
          updates, params, min_rms=self.min_param_rms, specs=specs
        )
      return updates

    direction = optimizer.then(
      scale_by_factored_rms(
        decay_exponent=self.decay_exponent,
        epsilon=self.epsilon,
        min_dim_to_factor=self.min_dim_to_factor,
        specs=specs,
      ),
      clip_and_scale,
    )
    if self.b1 is not None:
      direction = optax.chain(
        direction,
        optax.ema(self.b1, debias=False, accumulator_dtype=jnp.float32),
      )
    return optimizer.descent(
      direction,
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )


class FactoredRmsState(NamedTuple):
  """Factored second moments; each tree has the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    row: Means over the largest dimension; size one if not factored.
    column: Means over the second largest dimension; size one if not factored.
    full: Mean squares; size one if factored.
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
  """Returns the transformation from g to the first u of the module docstring.

  The arguments are those of `Adafactor`; `specs` None treats no variable as
  stacked.
  """

  def depths(treedef: Any) -> list[int]:
    """Returns the number of leading stacked axes of each variable."""
    if specs is None:
      return [0] * treedef.num_leaves
    return [len(spec.stacked) for spec in treedef.flatten_up_to(specs)]

  def to_state(
    count: Any, treedef: Any, statistics: Iterable[_Statistics]
  ) -> FactoredRmsState:
    # Three empty columns if there are no variables.
    columns = list(zip(*statistics, strict=True)) or [()] * 3
    return FactoredRmsState(count, *map(treedef.unflatten, columns))

  def init(params: optax.Params) -> FactoredRmsState:
    leaves, treedef = jax.tree.flatten(params)
    statistics = (
      _Statistics(
        *(
          jnp.zeros(p.shape[:depth] + shape, jnp.float32)
          for shape in _shapes(p.shape[depth:], min_dim_to_factor)
        )
      )
      for p, depth in zip(leaves, depths(treedef), strict=True)
    )
    return to_state(jnp.zeros((), jnp.int32), treedef, statistics)

  def update(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, FactoredRmsState]:
    del params
    number = (state.count + 1).astype(jnp.float32)
    decay = 1 - number**-decay_exponent
    leaves, treedef = jax.tree.flatten(updates)
    kept = map(treedef.flatten_up_to, (state.row, state.column, state.full))
    scaled, statistics = [], []
    for g, depth, *old in zip(leaves, depths(treedef), *kept, strict=True):
      dims = _factored_dims(g.shape[depth:], min_dim_to_factor)
      axes = None if dims is None else (depth + dims[0], depth + dims[1])
      update, new = _update(
        g, _Statistics(*old), axes=axes, decay=decay, epsilon=epsilon
      )
      scaled.append(update)
      statistics.append(new)
    count = optax.safe_increment(state.count)
    return treedef.unflatten(scaled), to_state(count, treedef, statistics)

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

  Returns None if the mean square is not factored.
  """
  if len(shape) < 2:
    return None
  second, largest = sorted(range(len(shape)), key=lambda i: shape[i])[-2:]
  return None if shape[second] < min_dim_to_factor else (second, largest)


def _shapes(
  shape: tuple[int, ...], min_dim_to_factor: int
) -> list[tuple[int, ...]]:
  """Returns the shapes of the row, column and full statistics of one layer."""
  ones = (1,) * len(shape)
  dims = _factored_dims(shape, min_dim_to_factor)
  if dims is None:
    return [ones, ones, shape]
  second, largest = dims
  return [
    tuple(1 if i == reduced else n for i, n in enumerate(shape))
    for reduced in (largest, second)
  ] + [ones]
