"""A learning rate that warms up linearly and decays by a half cosine.

With W warm-up steps and N steps in all, step counted from 0:

  step <= W:     peak * (step + 1) / (W + 1)
  W <= step < N: end + (peak - end) * (1 + cos(pi (step - W) / (N - W))) / 2
  step >= N:     end

The first update is not wasted on a rate of zero, and step W has exactly the
peak. (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983.)
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.learners import field_checks, warmup


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine:
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
    # Subtracted from the peak, so that the peak itself is exact.
    decayed = self.peak - (self.peak - self.end) * 0.5 * (
      1 - jnp.cos(jnp.pi * warmup.fraction(self, step))
    )
    return warmup.joined(self, step, decayed)
