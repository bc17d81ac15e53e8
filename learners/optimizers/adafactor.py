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

Three fields select the variant of Praxis, `sharded_adafactor`: `b2`, a decay as
Adam's; `factoring` LAST, the last two dimensions of any size; and
`momentum_after_rate`, with which the momentum averages the steps:

  u <- m <- b1 m + (1 - b1) rate(t - 1) u
  p <- p - u - rate(t - 1) weight_decay p

`layerwise_adaptation` scales the last update of each variable of one layer,
divided by the rate, to the RMS of the parameter, as LAMB does (You et al. 2020,
https://arxiv.org/abs/1904.00962).
"""

from collections.abc import Callable, Iterable
import dataclasses
import enum
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import optax

from paxon.learners import variable_clipping, variable_groups
from paxon.learners.optimizers import optimizer
from paxon.sharding import axes as axis_names
from paxon.sharding import checks

_HEADS = (axis_names.HEADS, axis_names.KV_HEADS)


class Factoring(enum.Enum):
  """The two dimensions over which the mean square of a layer is factored."""

  # The two largest, if both have `min_dim_to_factor`.
  LARGEST = "largest"
  # The last two of any size; of a kernel with heads, the heads and their
  # features, which are last in Praxis.
  LAST = "last"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor:
  """The Adafactor optimizer.

  Attributes:
    schedule: Maps a step to a learning rate, which is relative to the RMS of
      the parameter unless `min_param_rms` is `None`.
    decay_exponent: The decay of the mean square is 1 - t^(-decay_exponent).
    b2: Decay of the mean square with Adam's bias correction, in step t
      `b2 (1 - b2^(t-1)) / (1 - b2^t)`; `None` uses `decay_exponent`.
    epsilon: Added to squared gradients.
    factoring: The dimensions over which mean squares are factored.
    min_dim_to_factor: Smallest dimension that is factored with LARGEST.
    max_update_rms: Largest RMS of the update of one variable of one layer at
      rate 1, before scaling by the parameter; `None` disables the clipping.
    min_param_rms: Updates are multiplied by the RMS of their parameter, at
      least this. `None` disables the scaling.
    b1: Decay of the momentum; `None` disables momentum.
    momentum_after_rate: Whether the momentum averages updates times their
      learning rates, so that it keeps the rates of previous steps.
    momentum_dtype: Storage dtype of the momentum: float32, bfloat16 or int8.
      int8 has a float32 scale for each index of all but the first dimension of
      a layer: its largest absolute value is 127.
    layerwise_adaptation: Whether updates have the RMS of their parameters.
    not_adapted: Regular expression of the logical names that layerwise
      adaptation leaves out; the whole name must match. `None` is none.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  decay_exponent: float = 0.8
  b2: float | None = None
  epsilon: float = 1e-30
  factoring: Factoring = Factoring.LARGEST
  min_dim_to_factor: int = 128
  max_update_rms: float | None = 1.0
  min_param_rms: float | None = 1e-3
  b1: float | None = None
  momentum_after_rate: bool = False
  momentum_dtype: DTypeLike = jnp.float32
  layerwise_adaptation: bool = False
  not_adapted: str | None = None
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
    checks.check_decay(self, "b1", "b2")
    if self.momentum_after_rate and self.b1 is None:
      raise ValueError("Adafactor.momentum_after_rate requires b1, got None.")
    dtype = jnp.dtype(self.momentum_dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.int8):
      raise ValueError(
        "Adafactor.momentum_dtype must be float32, bfloat16 or int8, got"
        f" {dtype.name}."
      )
    if self.b1 is None and dtype != jnp.float32:
      raise ValueError(
        f"Adafactor.momentum_dtype {dtype.name} requires b1, got None."
      )
    if self.layerwise_adaptation and self.min_param_rms is not None:
      raise ValueError(
        "Adafactor.layerwise_adaptation requires min_param_rms None, because"
        f" both scale by the parameter, got {self.min_param_rms}."
      )
    checks.check_pattern("Adafactor.not_adapted", self.not_adapted)
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
        updates = variable_clipping.clip_by_rms(
          updates, max_rms=self.max_update_rms, specs=specs
        )
      if self.min_param_rms is not None:
        updates = variable_clipping.scale_by_rms(
          updates, params, min_rms=self.min_param_rms, specs=specs
        )
      return updates

    direction = optimizer.append_stateless(
      scale_by_factored_rms(
        decay_exponent=self.decay_exponent,
        b2=self.b2,
        epsilon=self.epsilon,
        factoring=self.factoring,
        min_dim_to_factor=self.min_dim_to_factor,
        specs=specs,
      ),
      clip_and_scale,
    )
    average = None
    if self.b1 is not None:
      average = _momentum(self.b1, jnp.dtype(self.momentum_dtype), specs)
    if average is not None and self.momentum_after_rate:
      return _descent_with_momentum(
        direction,
        average=average,
        adapt=self._adapt(specs) if self.layerwise_adaptation else None,
        schedule=self.schedule,
        weight_decay=self.weight_decay,
        specs=specs,
      )
    if average is not None:
      direction = optax.chain(direction, average)
    if self.layerwise_adaptation:
      mask = optimizer.find_regularized(specs)
      decay = optax.add_decayed_weights(self.weight_decay, mask)
      return optimizer.with_standard_promotion(
        optax.chain(
          optimizer.append_stateless(
            optax.chain(direction, decay), self._adapt(specs)
          ),
          optax.scale_by_learning_rate(self.schedule),
        )
      )
    return optimizer.descent(
      direction,
      schedule=self.schedule,
      weight_decay=self.weight_decay,
      specs=specs,
    )

  def _adapt(
    self, specs: variable_groups.Specs | None
  ) -> Callable[[Any, Any], Any]:
    """Returns the function that scales updates to the RMS of parameters."""

    def adapt(updates: Any, params: Any) -> Any:
      def scale(update: jax.Array, param: jax.Array, spec: Any) -> jax.Array:
        if spec and re.fullmatch(self.not_adapted or "(?!)", spec.name):
          return update
        axes = tuple(range(len(spec.stacked) if spec else 0, param.ndim))
        size = variable_clipping.rms(param, axes)
        norm = variable_clipping.rms(update, axes) + self.epsilon
        return update * jnp.where((size > 0) & (norm > 0), size / norm, 1.0)

      found = specs or jax.tree.map(lambda _: (), updates)
      leaves, treedef = jax.tree.flatten(updates)
      rest = treedef.flatten_up_to(params), treedef.flatten_up_to(found)
      return treedef.unflatten(map(scale, leaves, *rest))

    return adapt


class MomentumState(NamedTuple):
  """A quantized momentum; both trees have the structure of the parameters.

  Attributes:
    momentum: bfloat16 or int8; float32 for scalars of int8.
    scale: float32 factors of int8, size one in the first dimension of a layer;
      size one for other dtypes.
  """

  momentum: Any
  scale: Any


def _momentum(
  b1: float, dtype: jnp.dtype, specs: variable_groups.Specs | None
) -> optax.GradientTransformation:
  """Returns an average whose state is stored in `dtype`."""
  if dtype == jnp.float32:
    return optax.ema(b1, debias=False, accumulator_dtype=jnp.float32)

  def store(x: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    if dtype != jnp.int8:
      return x.astype(dtype), jnp.ones((1,) * x.ndim, jnp.float32)
    if x.ndim == depth:
      return x, jnp.ones((1,) * x.ndim, jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=depth, keepdims=True) / 127
    whole = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
    return whole.astype(dtype), scale

  def to_state(treedef: Any, stored: Iterable[Any]) -> MomentumState:
    columns = list(zip(*stored, strict=True)) or [()] * 2
    return MomentumState(*map(treedef.unflatten, columns))

  def init(params: Any) -> MomentumState:
    leaves, treedef = jax.tree.flatten(params)
    zeros = [jnp.zeros(p.shape, jnp.float32) for p in leaves]
    return to_state(
      treedef, map(store, zeros, optimizer.find_depths(params, specs))
    )

  def update(
    updates: Any, state: Any, params: Any = None
  ) -> tuple[Any, MomentumState]:
    del params
    leaves, treedef = jax.tree.flatten(updates)
    kept = map(treedef.flatten_up_to, (state.momentum, state.scale))
    new = [
      b1 * (m.astype(jnp.float32) * scale) + (1 - b1) * u
      for u, m, scale in zip(leaves, *kept, strict=True)
    ]
    stored = map(store, new, optimizer.find_depths(updates, specs))
    return treedef.unflatten(new), to_state(treedef, stored)

  return optax.GradientTransformation(init, update)


def _descent_with_momentum(
  direction: optax.GradientTransformation,
  *,
  average: optax.GradientTransformation,
  adapt: Callable[[Any, Any], Any] | None,
  schedule: optax.Schedule,
  weight_decay: float,
  specs: variable_groups.Specs | None,
) -> optax.GradientTransformation:
  """Returns the update rule whose momentum averages steps, not directions."""

  def init(params: optax.Params) -> tuple[Any, Any, Any]:
    count = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
    return direction.init(params), average.init(params), count

  def update(
    updates: Any, state: Any, params: Any = None
  ) -> tuple[Any, tuple[Any, Any, Any]]:
    first, second, third = state
    rate: Any = schedule(third.count)
    updates, first = direction.update(updates, first, params)
    steps, second = average.update(
      jax.tree.map(lambda u: rate * u, updates), second
    )
    if weight_decay:
      decays = optimizer.find_regularized(specs)
      if decays is None:
        decays = jax.tree.map(lambda _: True, params)
      steps = jax.tree.map(
        lambda u, p, is_decayed: (
          u + rate * weight_decay * p if is_decayed else u
        ),
        steps,
        params,
        decays,
      )
    if adapt is not None:
      # The ratio is that of norms at rate 1; a rate of zero leaves the steps.
      adapted = adapt(jax.tree.map(lambda u: u / rate, steps), params)
      steps = jax.tree.map(
        lambda new, old: jnp.where(rate != 0, rate * new, old), adapted, steps
      )
    count = optax.ScaleByScheduleState(optax.safe_increment(third.count))
    return jax.tree.map(jnp.negative, steps), (first, second, count)

  return optimizer.with_standard_promotion(
    optax.GradientTransformation(init, update)
  )


class FactoredRmsState(NamedTuple):
  """Factored second moments; each tree has the structure of the parameters.

  Attributes:
    count: int32 scalar, the number of updates.
    row: Means over the largest (last) dimension; size one if not factored.
    column: Means over the second largest (second last) dimension; size one if
      not factored.
    full: Mean squares; size one if factored.
  """

  count: Any
  row: Any
  column: Any
  full: Any


class _Dims(NamedTuple):
  """The number of stacked axes of a variable, and its factored axes."""

  depth: int
  factored: tuple[int, int] | None


def scale_by_factored_rms(
  *,
  decay_exponent: float,
  epsilon: float,
  min_dim_to_factor: int,
  specs: variable_groups.Specs | None,
  b2: float | None = None,
  factoring: Factoring = Factoring.LARGEST,
) -> optax.GradientTransformation:
  """Returns the transformation from g to the first u of the module docstring.

  The arguments are those of `Adafactor`; `specs` None treats no variable as
  stacked and no dimension as one of heads.
  """

  def find_dims(tree: Any) -> list[_Dims]:
    """Returns the stacked axes and the factored ones of each variable."""
    leaves, treedef = jax.tree.flatten(tree)
    depths = optimizer.find_depths(tree, specs)
    names = [(None,) * leaf.ndim for leaf in leaves]
    if specs is not None:
      names = [spec.axes for spec in treedef.flatten_up_to(specs)]
    found = []
    for leaf, axes, depth in zip(leaves, names, depths, strict=True):
      shape = leaf.shape[depth:]
      if factoring is Factoring.LAST:
        dims = _last_dims(shape, axes[depth:])
      else:
        dims = _factored_dims(shape, min_dim_to_factor)
      found.append(_Dims(depth, dims and (depth + dims[0], depth + dims[1])))
    return found

  def init(p: jax.Array, dims: _Dims) -> list[jax.Array]:
    return [jnp.zeros(shape, jnp.float32) for shape in _shapes(p.shape, dims)]

  def update(
    g: jax.Array, old: FactoredRmsState, dims: _Dims
  ) -> tuple[jax.Array, FactoredRmsState]:
    number = (old.count + 1).astype(jnp.float32)
    if b2 is None:
      decay = 1 - number**-decay_exponent
    elif b2 == 0:
      decay = jnp.zeros_like(number)
    else:
      # expm1, because b2^t is close to one.
      log = math.log(b2)
      decay = b2 * jnp.expm1((number - 1) * log) / jnp.expm1(number * log)
    return _update(g, old, axes=dims.factored, decay=decay, epsilon=epsilon)

  return optimizer.make_per_variable(
    FactoredRmsState, find=find_dims, init=init, update=update
  )


def _update(
  gradient: jax.Array,
  kept: FactoredRmsState,
  *,
  axes: tuple[int, int] | None,
  decay: jax.Array,
  epsilon: float,
) -> tuple[jax.Array, FactoredRmsState]:
  """Updates one variable; `axes` are those of `_factored_dims`."""
  square = jnp.square(gradient) + epsilon

  def mix(old: jax.Array, new: jax.Array) -> jax.Array:
    return decay * old + (1 - decay) * new

  if axes is None:
    full = mix(kept.full, square)
    return gradient * full**-0.5, kept._replace(full=full)
  second, largest = axes
  row = mix(kept.row, jnp.mean(square, axis=largest, keepdims=True))
  column = mix(kept.column, jnp.mean(square, axis=second, keepdims=True))
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


def _last_dims(
  shape: tuple[int, ...], names: tuple[str | None, ...]
) -> tuple[int, int] | None:
  """Returns heads and head features of one layer, or the last two dimensions.

  Returns None if the mean square is not factored.
  """
  if len(shape) < 2:
    return None
  heads = [i for i, name in enumerate(names) if name in _HEADS]
  if heads and axis_names.HEAD_DIM in names:
    return heads[0], names.index(axis_names.HEAD_DIM)
  return len(shape) - 2, len(shape) - 1


def _shapes(shape: tuple[int, ...], dims: _Dims) -> list[tuple[int, ...]]:
  """Returns the shapes of the row, column and full statistics."""
  ones = shape[: dims.depth] + (1,) * (len(shape) - dims.depth)
  if dims.factored is None:
    return [ones, ones, shape]
  second, largest = dims.factored
  return [
    tuple(1 if i == reduced else n for i, n in enumerate(shape))
    for reduced in (largest, second)
  ] + [ones]
