"""Learning-rate schedules: from a step to a float32 learning rate.

With W warmup steps, N total steps and the step t counted from 0, every warmup
schedule has the rate `peak (t + 1) / (W + 1)` for t <= W: the first update has
a positive rate, and step W has exactly the peak. Then:

  WarmupCosine       end + (peak - end) (1 + cos(pi (t - W) / (N - W))) / 2
  WarmupLinear       end + (peak - end) (N - t) / (N - W)
  WarmupExponential  peak (end / peak)^((t - W) / (N - W))
  WarmupRsqrt        peak sqrt((W + 1) / (t + 1)), for any number of steps
  WarmupStableDecay  peak, and in the last D steps
                     end + (peak - end) shape((t - (N - D)) / D)

From step N on, the rate is `end`. `Constant`, `PiecewiseConstant` and
`PiecewiseLinear` have no warmup. Any optax schedule works in their place.

Sources: cosine, Loshchilov & Hutter 2017 (https://arxiv.org/abs/1608.03983);
rsqrt, Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762, section 5.3);
stable decay, Hu et al. 2024 (https://arxiv.org/abs/2404.06395), with
`one_minus_sqrt` from Hagele et al. 2024 (https://arxiv.org/abs/2405.18392).
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
  """A constant learning rate.

  Attributes:
    value: The learning rate.
  """

  value: float

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "value")

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns `value`, float32, with the shape of `step`."""
    return jnp.full(jnp.shape(step), self.value, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupDecay(abc.ABC):
  """Base of schedules with a linear warmup and a decay to `end`.

  Attributes:
    peak: Highest learning rate, reached at step `warmup_steps`.
    warmup_steps: Number of steps before the peak.
    total_steps: Step from which the rate is `end`.
    end: Final learning rate.
  """

  peak: float
  warmup_steps: int
  total_steps: int
  end: float = 0.0

  def __post_init__(self) -> None:
    checks.check_positive(self, "peak")
    checks.check_non_negative(self, "end")
    _check_end(self)
    if not 0 <= self.warmup_steps <= self.total_steps:
      raise ValueError(
        f"{type(self).__name__}.warmup_steps must be between 0 and total_steps"
        f" ({self.total_steps}), got {self.warmup_steps}."
      )

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    steps = max(self.total_steps - self.warmup_steps, 1)
    fraction = jnp.clip((step - self.warmup_steps) / steps, 0, 1)
    return _add_warmup_and_end(self, step, self._decay(fraction))

  @abc.abstractmethod
  def _decay(self, fraction: jax.Array) -> jax.Array:
    """Returns the rate after this fraction of the decay, float32 in [0, 1]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine(WarmupDecay):
  """Linear warmup, then a half-cosine decay; fields as in `WarmupDecay`."""

  def _decay(self, fraction: jax.Array) -> jax.Array:
    # Subtracted from the peak, so that the peak itself is exact.
    return self.peak - (self.peak - self.end) * 0.5 * (
      1 - jnp.cos(jnp.pi * fraction)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupLinear(WarmupDecay):
  """Linear warmup, then a linear decay; fields as in `WarmupDecay`."""

  def _decay(self, fraction: jax.Array) -> jax.Array:
    return self.peak - (self.peak - self.end) * fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupExponential(WarmupDecay):
  """Linear warmup, then an exponential decay to `end`, which is positive."""

  end: float = dataclasses.field()

  def __post_init__(self) -> None:
    checks.check_positive(self, "end")
    super().__post_init__()

  def _decay(self, fraction: jax.Array) -> jax.Array:
    return self.peak * jnp.exp(math.log(self.end / self.peak) * fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupRsqrt:
  """Linear warmup, then a decay by the inverse square root of the step.

  It does not depend on the number of steps, so a run can always be extended.

  Attributes:
    peak: Highest learning rate, reached at step `warmup_steps`.
    warmup_steps: Number of steps before the peak. The rate is half the peak
      after three times as many more steps.
  """

  peak: float
  warmup_steps: int

  def __post_init__(self) -> None:
    checks.check_positive(self, "peak")
    checks.check_non_negative(self, "warmup_steps")

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    start = self.warmup_steps + 1
    # The maximum, because the unselected branch must not overflow either.
    decayed = self.peak * jnp.sqrt(start / jnp.maximum(step + 1, start))
    return jnp.where(step < self.warmup_steps, _warm_up(self, step), decayed)


def linear(fraction: jax.Array) -> jax.Array:
  """Returns 1 - fraction."""
  return 1 - fraction


def one_minus_sqrt(fraction: jax.Array) -> jax.Array:
  """Returns 1 - sqrt(fraction)."""
  return 1 - jnp.sqrt(fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
  """Linear warmup, a constant rate, and a decay at the end of the run.

  A checkpoint of the constant phase can be trained for any number of steps.

  Attributes:
    peak: Learning rate between warmup and decay.
    warmup_steps: Number of steps before the peak.
    decay_steps: Number of decay steps, the last before `total_steps`.
    total_steps: Step from which the rate is `end`.
    end: Final learning rate.
    shape: Maps the fraction of the decay, float32 in [0, 1], to the remaining
      share of `peak - end`: `linear` or `one_minus_sqrt`.
  """

  peak: float
  warmup_steps: int
  decay_steps: int
  total_steps: int
  end: float = 0.0
  shape: Callable[[jax.Array], jax.Array] = linear

  def __post_init__(self) -> None:
    checks.check_positive(self, "peak")
    checks.check_non_negative(self, "end", "warmup_steps", "decay_steps")
    _check_end(self)
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
    # Subtracted from the peak, so that the constant phase is exact.
    decayed = self.peak - (self.peak - self.end) * (1 - self.shape(fraction))
    return _add_warmup_and_end(self, step, decayed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecewiseConstant:
  """A step function: `values[i]` from step `boundaries[i - 1]` on.

  Attributes:
    boundaries: Increasing steps at which the rate changes.
    values: Learning rates, one more than boundaries.
  """

  boundaries: Sequence[int]
  values: Sequence[float]

  def __post_init__(self) -> None:
    if len(self.values) != len(self.boundaries) + 1:
      raise ValueError(
        "PiecewiseConstant.values must have one more entry than boundaries"
        f" ({len(self.boundaries)}), got {len(self.values)}."
      )
    _check_table(self, "boundaries", self.boundaries, self.values)

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    rate = jnp.full(step.shape, self.values[0], jnp.float32)
    for boundary, value in zip(self.boundaries, self.values[1:], strict=True):
      rate = jnp.where(step >= boundary, jnp.float32(value), rate)
    return rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecewiseLinear:
  """Linear interpolation between the points `(steps[i], values[i])`.

  The rate is constant before the first and after the last of these steps.

  Attributes:
    steps: Increasing steps.
    values: Learning rates, one per step.
  """

  steps: Sequence[int]
  values: Sequence[float]

  def __post_init__(self) -> None:
    if not self.steps or len(self.values) != len(self.steps):
      raise ValueError(
        "PiecewiseLinear.values must have as many entries as steps"
        f" ({len(self.steps)}) and at least one, got {len(self.values)}."
      )
    _check_table(self, "steps", self.steps, self.values)

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    points = list(zip(self.steps, self.values, strict=True))
    rate = jnp.full(step.shape, self.values[0], jnp.float32)
    for (begin, low), (end, high) in itertools.pairwise(points):
      # Not `jnp.interp`, which need not give the last value exactly.
      line = low + (high - low) * ((step - begin) / (end - begin))
      rate = jnp.where(step >= begin, line, rate)
    return jnp.where(step >= self.steps[-1], jnp.float32(self.values[-1]), rate)


def _warm_up(
  schedule: WarmupDecay | WarmupStableDecay | WarmupRsqrt, step: jax.Array
) -> jax.Array:
  return schedule.peak * (step + 1) / (schedule.warmup_steps + 1)


def _add_warmup_and_end(
  schedule: WarmupDecay | WarmupStableDecay,
  step: jax.Array,
  decayed: jax.Array,
) -> jax.Array:
  """Replaces `decayed` before the peak and from `total_steps` on."""
  rate = jnp.where(
    step < schedule.warmup_steps, _warm_up(schedule, step), decayed
  )
  # Exactly `end`, which the rounded decay may miss.
  return jnp.where(
    step >= schedule.total_steps, jnp.float32(schedule.end), rate
  )


def _check_end(schedule: WarmupDecay | WarmupStableDecay) -> None:
  if schedule.end > schedule.peak:
    raise ValueError(
      f"{type(schedule).__name__}.end must be at most the peak"
      f" ({schedule.peak}), got {schedule.end}."
    )


def _check_table(
  schedule: object,
  field: str,
  steps: Sequence[int],
  values: Sequence[float],
) -> None:
  name = type(schedule).__name__
  if not all(a < b for a, b in itertools.pairwise(steps)):
    raise ValueError(f"{name}.{field} must increase, got {tuple(steps)}.")
  if any(step < 0 for step in steps):
    raise ValueError(
      f"{name}.{field} must not be negative, got {tuple(steps)}."
    )
  if not all(value >= 0 and np.isfinite(value) for value in values):
    raise ValueError(
      f"{name}.values must not be negative, got {tuple(values)}."
    )
