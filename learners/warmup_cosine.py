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

from paxon.learners import field_checks


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
    if not 0 <= self.end <= self.peak:
      raise ValueError(
        f"WarmupCosine.end must lie between 0 and the peak ({self.peak}), got"
        f" {self.end}."
      )
    if not 0 <= self.warmup_steps <= self.total_steps:
      raise ValueError(
        "WarmupCosine.warmup_steps must lie between 0 and total_steps"
        f" ({self.total_steps}), got {self.warmup_steps}."
      )

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    warmup = self.peak * (step + 1) / (self.warmup_steps + 1)
    fraction = (step - self.warmup_steps) / max(
      self.total_steps - self.warmup_steps, 1
    )
    # Subtracted from the peak, so that the peak itself is exact.
    decay = self.peak - (self.peak - self.end) * 0.5 * (
      1 - jnp.cos(jnp.pi * jnp.clip(fraction, 0, 1))
    )
    rate = jnp.where(step < self.warmup_steps, warmup, decay)
    # Exactly `end`: the cosine of a float32 pi need not be exactly -1.
    return jnp.where(step >= self.total_steps, jnp.float32(self.end), rate)
