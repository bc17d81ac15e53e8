"""Bi-tempered logistic loss: a cross entropy that tolerates wrong labels.

Amid et al. 2019, https://arxiv.org/abs/1906.03361. With

  log_t(x) = (x ** (1 - t) - 1) / (1 - t)
  exp_t(x) = max(1 + (1 - t) x, 0) ** (1 / (1 - t))

the probabilities are `exp_t2(logits - normalizer)`, which sum to one, and the
loss is, for targets y and probabilities p, the sum over classes of

  y (log_t1(y) - log_t1(p)) - (y ** (2 - t1) - p ** (2 - t1)) / (2 - t1)

A first temperature below one bounds the loss of outliers; a second one above
one gives the softmax a heavy tail. Both are 1 for the cross entropy less the
entropy of the targets.

Letters: B batch, C classes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.sharding import checks


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
    logits: Float[Array, "batch classes"],
    targets: Float[Array, "batch classes"],
  ) -> Float[Array, "batch"]:
    """Returns the loss in at least float32; targets are probabilities."""
    logits, first = precision.widened(logits), self.first
    targets = targets.astype(logits.dtype)
    found = self.probabilities(logits)
    # A target of zero has the first term zero, whatever its logarithm.
    known = jnp.where(targets > 0, targets, 1)
    loss = targets * (_log(known, first) - _log(found, first))
    power = 2 - first
    loss -= (targets**power - found**power) / power
    return jnp.sum(loss, axis=-1)

  def probabilities(
    self, logits: Float[Array, "batch classes"]
  ) -> Float[Array, "batch classes"]:
    """Returns the tempered softmax."""
    if self.second == 1:
      return jax.nn.softmax(logits, axis=-1)
    normalizer = _normalizer(self.second, self.iterations, logits)
    return _exp(logits - normalizer, self.second)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _normalizer(t: float, iterations: int, logits: jax.Array) -> jax.Array:
  """Returns the normalizers [B,1], by the fixed point of the paper."""
  peak = jnp.max(logits, axis=-1, keepdims=True)
  shifted = scaled = logits - peak
  for _ in range(iterations):
    total = jnp.sum(_exp(scaled, t), axis=-1, keepdims=True)
    scaled = shifted * total ** (1 - t)
  total = jnp.sum(_exp(scaled, t), axis=-1, keepdims=True)
  return peak - _log(1 / total, t)


@_normalizer.defjvp
def _normalizer_jvp(
  t: float,
  iterations: int,
  primals: tuple[jax.Array],
  tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """The derivative of the exact normalizer: the escort distribution."""
  (logits,), (tangent,) = primals, tangents
  normalizer = _normalizer(t, iterations, logits)
  powers = _exp(logits - normalizer, t) ** t
  escort = powers / jnp.sum(powers, axis=-1, keepdims=True)
  return normalizer, jnp.sum(escort * tangent, axis=-1, keepdims=True)


def _log(x: jax.Array, t: float) -> jax.Array:
  return jnp.log(x) if t == 1 else (x ** (1 - t) - 1) / (1 - t)


def _exp(x: jax.Array, t: float) -> jax.Array:
  if t == 1:
    return jnp.exp(x)
  return jnp.maximum(1 + (1 - t) * x, 0) ** (1 / (1 - t))
