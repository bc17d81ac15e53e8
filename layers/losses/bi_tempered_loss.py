"""Bi-tempered logistic loss: a cross entropy that tolerates wrong labels.

Amid et al. 2019, https://arxiv.org/abs/1906.03361. With

  log_t(x) = (x ** (1 - t) - 1) / (1 - t)
  exp_t(x) = max(1 + (1 - t) x, 0) ** (1 / (1 - t))

the probabilities are `exp_t2(logits - normalizer)`, which sum to one, and the
loss is, for targets y and probabilities p, the sum over classes of

  y (log_t1(y) - log_t1(p)) - (y ** (2 - t1) - p ** (2 - t1)) / (2 - t1)

A first temperature below one bounds the loss of outliers; a second one above
one gives the softmax a heavy tail. Both are 1 for the cross entropy less the
entropy of the targets, with which `RampedBiTemperedLoss` begins.
"""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.layers.norms import batch_norm
from paxon.sharding import checks, variables

# A temperature: a number, or a scalar array for one that changes.
_Temperature = float | jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiTemperedLoss:
  """The loss of each example.

  Attributes:
    first: Temperature t1 of the loss, in [0, 1].
    second: Temperature t2 of the softmax, at least 1.
    iterations: Steps of the fixed point that finds the normalizer.
  """

  first: float
  second: float
  iterations: int = 20

  def __post_init__(self) -> None:
    checks.check_interval(self, "[0, 1]", "first")
    checks.check_positive(self, "iterations")
    if self.second < 1:
      raise ValueError(
        f"BiTemperedLoss.second must be at least 1, got {self.second}."
      )

  def __call__(
    self,
    logits: Float[Array, "*batch classes"],
    targets: Float[Array, "*batch classes"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "*batch"]:
    """Returns the loss in at least float32; targets are probabilities.

    `deterministic` makes no difference: the temperatures are constants.
    """
    del deterministic
    return self._compute(logits, targets, self.first, self.second)

  def at(
    self,
    progress: Float[Array, ""],
    logits: Float[Array, "*batch classes"],
    targets: Float[Array, "*batch classes"],
  ) -> Float[Array, "*batch"]:
    """Returns the loss with temperatures between 1 and those of the fields.

    Args:
      progress: 0 for temperatures of 1, 1 for those of the fields.
      logits: As for a call.
      targets: As for a call.
    """
    progress = progress.astype(precision.at_least_float32(logits.dtype))
    first, second = (1 + progress * (t - 1) for t in (self.first, self.second))
    return self._compute(logits, targets, first, second)

  def _compute(
    self,
    logits: jax.Array,
    targets: jax.Array,
    first: _Temperature,
    second: _Temperature,
  ) -> jax.Array:
    logits = precision.widen(logits)
    targets = targets.astype(logits.dtype)
    found = self._probabilities(logits, second)
    # A target of zero has the first term zero, whatever its logarithm.
    known = jnp.where(targets > 0, targets, 1)
    # Probabilities that underflow would have NaN gradients.
    likely = jnp.maximum(found, jnp.finfo(found.dtype).tiny)
    loss = targets * (_log(known, first) - _log(likely, first))
    power = 2 - first
    loss -= (targets**power - likely**power) / power
    return jnp.sum(loss, axis=-1)

  def probabilities(
    self, logits: Float[Array, "*batch classes"]
  ) -> Float[Array, "*batch classes"]:
    """Returns the tempered softmax."""
    return self._probabilities(logits, self.second)

  def _probabilities(
    self, logits: jax.Array, second: _Temperature
  ) -> jax.Array:
    if isinstance(second, float | int) and second == 1:
      return jax.nn.softmax(logits, axis=-1)
    normalizer = _normalizer(self.iterations, second, logits)
    return _exp(logits - normalizer, second)


class RampedBiTemperedLoss(nn.Module):
  """The loss with temperatures that training moves from 1 to their values.

  They are 1 up to `start_step`, then change linearly with the step, and have
  their values from `end_step` on and in evaluation. The step is a variable of
  the collection `batch_stats`.

  Attributes:
    loss: The loss with the last temperatures.
    end_step: First step with these.
    start_step: Last step with temperatures of 1.
  """

  loss: BiTemperedLoss
  end_step: int
  start_step: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 <= self.start_step < self.end_step:
      raise ValueError(
        "RampedBiTemperedLoss needs 0 <= start_step < end_step, got"
        f" {self.start_step} and {self.end_step}."
      )

  @nn.compact
  def __call__(
    self,
    logits: Float[Array, "*batch classes"],
    targets: Float[Array, "*batch classes"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "*batch"]:
    """Returns the loss in at least float32; targets are probabilities.

    Args:
      logits: Logits of classes.
      targets: Probabilities of classes.
      deterministic: False (training) counts the step.
    """
    boxed = variables.make_boxed_init(
      nn.initializers.zeros, (), shape=(), dtype=jnp.int32
    )
    step: Any = self.variable(batch_norm.COLLECTION, "step", boxed)
    can_update = self.is_mutable_collection(batch_norm.COLLECTION)
    if deterministic or not can_update or self.is_initializing():
      return self.loss(logits, targets)
    done = (step.value - self.start_step).astype(jnp.float32)
    progress = jnp.clip(done / (self.end_step - self.start_step), 0, 1)
    step.value = step.value + 1
    return self.loss.at(progress, logits, targets)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalizer(
  iterations: int, t: _Temperature, logits: jax.Array
) -> jax.Array:
  """Returns the normalizers [*batch,1], by the fixed point of the paper."""
  peak = jnp.max(logits, axis=-1, keepdims=True)
  shifted = scaled = logits - peak
  for _ in range(iterations):
    total = jnp.sum(_exp(scaled, t), axis=-1, keepdims=True)
    scaled = shifted * total ** (1 - t)
  total = jnp.sum(_exp(scaled, t), axis=-1, keepdims=True)
  return peak - _log(1 / total, t)


@_normalizer.defjvp
def _normalizer_jvp(
  iterations: int,
  primals: tuple[_Temperature, jax.Array],
  tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """The derivative of the exact normalizer: the escort distribution.

  Temperatures are not trained; their derivative is left out.
  """
  (t, logits), (_, tangent) = primals, tangents
  normalizer = _normalizer(iterations, t, logits)
  powers = _exp(logits - normalizer, t) ** t
  escort = powers / jnp.sum(powers, axis=-1, keepdims=True)
  return normalizer, jnp.sum(escort * tangent, axis=-1, keepdims=True)


def _log(x: jax.Array, t: _Temperature) -> jax.Array:
  if isinstance(t, float | int):
    return jnp.log(x) if t == 1 else (x ** (1 - t) - 1) / (1 - t)
  # Exact also near a temperature of 1, where powers minus 1 lose all digits.
  power, log = 1 - t, jnp.log(x)
  divisor = jnp.where(power == 0, 1, power)
  return jnp.where(power == 0, log, jnp.expm1(power * log) / divisor)


def _exp(x: jax.Array, t: _Temperature) -> jax.Array:
  if isinstance(t, float | int):
    if t == 1:
      return jnp.exp(x)
    return jnp.maximum(1 + (1 - t) * x, 0) ** (1 / (1 - t))
  power = 1 - t
  divisor = jnp.where(power == 0, 1, power)
  return jnp.exp(jnp.where(power == 0, x, jnp.log1p(power * x) / divisor))
