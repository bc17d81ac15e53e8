"""Learning rates that warm up linearly and then decay, one class per decay.

With W warm-up steps, N steps in all and the step t counted from 0, the rate is
`peak (t + 1) / (W + 1)` while t <= W, and then

  WarmupLinear        end + (peak - end) (N - t) / (N - W), from N on: end
  WarmupRsqrt         peak sqrt((W + 1) / (t + 1)), without an end
  WarmupExponential   peak (end / peak)^((t - W) / (N - W)), from N on: end

The first update is not wasted on a rate of zero, and step W has exactly the
peak. The decay by a half cosine is in `warmup_cosine`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.learners import field_checks, warmup


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupLinear:
  """A schedule: called with a step, gives a float32 learning rate.

  Attributes:
    peak: The highest learning rate, at step `warmup_steps`.
    warmup_steps: How many steps lie before the peak.
    total_steps: The step from which the rate is `end`.
    end: The last learning rate.
  """

  peak: float
  warmup_steps: int
  total_steps: int
  end: float = 0.0

  def __post_init__(self) -> None:
    field_checks.positive(self, "peak")
    field_checks.not_negative(self, "end")
    warmup.check(self)

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    decayed = self.peak - (self.peak - self.end) * warmup.fraction(self, step)
    return warmup.joined(self, step, decayed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupRsqrt:
  """A schedule: called with a step, gives a float32 learning rate.

  It needs no number of steps, so a run can always go on (Vaswani et al. 2017,
  https://arxiv.org/abs/1706.03762, section 5.3).

  Attributes:
    peak: The highest learning rate, at step `warmup_steps`.
    warmup_steps: How many steps lie before the peak; the rate is half the peak
      after three times as many more.
  """

  peak: float
  warmup_steps: int

  def __post_init__(self) -> None:
    field_checks.positive(self, "peak")
    field_checks.not_negative(self, "warmup_steps")

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    start = self.warmup_steps + 1
    # The maximum, because the branch not taken must not exceed float32 either.
    decayed = self.peak * jnp.sqrt(start / jnp.maximum(step + 1, start))
    return jnp.where(step < self.warmup_steps, warmup.rate(self, step), decayed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupExponential:
  """A schedule: called with a step, gives a float32 learning rate.

  Attributes:
    peak: The highest learning rate, at step `warmup_steps`.
    warmup_steps: How many steps lie before the peak.
    total_steps: The step from which the rate is `end`.
    end: The last learning rate, more than zero.
  """

  peak: float
  warmup_steps: int
  total_steps: int
  end: float

  def __post_init__(self) -> None:
    field_checks.positive(self, "peak", "end")
    warmup.check(self)

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    exponent = math.log(self.end / self.peak) * warmup.fraction(self, step)
    return warmup.joined(self, step, self.peak * jnp.exp(exponent))
