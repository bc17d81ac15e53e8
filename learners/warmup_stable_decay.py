"""A learning rate that warms up, stays, and decays at the end of a run.

With W warm-up steps, N steps in all of which the last D decay, and the step t
counted from 0:

  t <= W:           peak (t + 1) / (W + 1)
  W <= t <= N - D:  peak
  N - D <= t < N:   end + (peak - end) shape((t - (N - D)) / D)
  t >= N:           end

A checkpoint of the stable phase can be trained on for any number of steps (Hu
et al. 2024, https://arxiv.org/abs/2404.06395). `shape` falls from 1 to 0:
`linear` is 1 - x, `one_minus_sqrt` is 1 - sqrt(x) (Hagele et al. 2024,
https://arxiv.org/abs/2405.18392).
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxon.learners import field_checks, warmup


def linear(fraction: jax.Array) -> jax.Array:
  """Returns 1 - fraction."""
  return 1 - fraction


def one_minus_sqrt(fraction: jax.Array) -> jax.Array:
  """Returns 1 - sqrt(fraction): falls fast at first."""
  return 1 - jnp.sqrt(fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
  """A schedule: called with a step, gives a float32 learning rate.

  Attributes:
    peak: The learning rate between warm-up and decay.
    warmup_steps: How many steps lie before the peak.
    decay_steps: How many steps before `total_steps` the decay begins.
    total_steps: The step from which the rate is `end`.
    end: The last learning rate.
    shape: From the share of the decay that is done, float32 in [0, 1], to the
      share of `peak - end` that is left.
  """

  peak: float
  warmup_steps: int
  decay_steps: int
  total_steps: int
  end: float = 0.0
  shape: Callable[[jax.Array], jax.Array] = linear

  def __post_init__(self) -> None:
    field_checks.positive(self, "peak")
    field_checks.not_negative(self, "end", "warmup_steps", "decay_steps")
    if self.end > self.peak:
      raise ValueError(
        f"WarmupStableDecay.end must be at most the peak ({self.peak}), got"
        f" {self.end}."
      )
    if self.warmup_steps + self.decay_steps > self.total_steps:
      raise ValueError(
        "WarmupStableDecay.total_steps must be at least warmup_steps +"
        f" decay_steps ({self.warmup_steps + self.decay_steps}), got"
        f" {self.total_steps}."
      )

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    begin = self.total_steps - self.decay_steps
    fraction = jnp.clip((step - begin) / max(self.decay_steps, 1), 0, 1)
    # Subtracted from the peak, so that the stable phase is exact.
    decayed = self.peak - (self.peak - self.end) * (1 - self.shape(fraction))
    return warmup.joined(self, step, decayed)
