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

From step N on, the rate is `end`. All other schedules have no such warmup.
`Polynomial`, `Exponential` and `Cosine` lead from a point (step, rate) to
another, `Joined` and `Cycle` compose schedules, and `RampHoldDecay` has the
phases of Pax, whose warmup begins with a rate of zero. Any optax schedule works
in their place.

Sources: cosine, Loshchilov & Hutter 2017 (https://arxiv.org/abs/1608.03983);
rsqrt, Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762, section 5.3);
stable decay, Hu et al. 2024 (https://arxiv.org/abs/2404.06395), with
`one_minus_sqrt` from Hagele et al. 2024 (https://arxiv.org/abs/2405.18392).
"""

import abc
from collections.abc import Callable, Sequence
import dataclasses
import enum
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Path(abc.ABC):
  """Base of schedules from one point (step, rate) to another.

  Attributes:
    start: First point; before its step, the rate is its rate.
    limit: Last point; from its step on, the rate is its rate.
  """

  start: tuple[int, float]
  limit: tuple[int, float]

  def __post_init__(self) -> None:
    name = type(self).__name__
    for field, point in (("start", self.start), ("limit", self.limit)):
      if len(point) != 2 or not all(0 <= x < math.inf for x in point):
        raise ValueError(
          f"{name}.{field} must be two numbers, not negative, got {point}."
        )
    if self.start[0] >= self.limit[0]:
      raise ValueError(
        f"{name}.limit must have a later step than start ({self.start[0]}), got"
        f" {self.limit[0]}."
      )

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    (begin, first), (end, last) = self.start, self.limit
    fraction = jnp.clip((step - begin) / (end - begin), 0, 1)
    rate = jnp.where(step <= begin, jnp.float32(first), self._rate(fraction))
    return jnp.where(step >= end, jnp.float32(last), rate)

  @abc.abstractmethod
  def _rate(self, fraction: jax.Array) -> jax.Array:
    """Returns the rate after this fraction of the steps, in [0, 1]."""


class Origin(enum.Enum):
  """Whether a polynomial is the power of the fraction f, or of 1 - f."""

  START = "start"
  LIMIT = "limit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polynomial(_Path):
  """A power of the fraction f of the steps; linear by default.

  The rate is first + (last - first) f^power, with the origin LIMIT it is
  last - (last - first) (1 - f)^power.

  Attributes:
    power: Exponent, positive.
    origin: START or LIMIT.
  """

  power: int | float = 1
  origin: Origin = Origin.START

  def __post_init__(self) -> None:
    checks.check_positive(self, "power")
    super().__post_init__()

  def _rate(self, fraction: jax.Array) -> jax.Array:
    (_, first), (_, last) = self.start, self.limit
    if self.origin is Origin.START:
      return first + (last - first) * fraction**self.power
    return last - (last - first) * (1 - fraction) ** self.power


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exponential(_Path):
  """Exponential interpolation between two points with positive rates."""

  def __post_init__(self) -> None:
    super().__post_init__()
    if not min(self.start[1], self.limit[1]) > 0:
      raise ValueError(
        "Exponential.start and limit must have positive rates, got"
        f" {self.start} and {self.limit}."
      )

  def _rate(self, fraction: jax.Array) -> jax.Array:
    (_, first), (_, last) = self.start, self.limit
    return first * jnp.exp(math.log(last / first) * fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(_Path):
  """Half a cosine between two points; with a later start, a delayed one."""

  def _rate(self, fraction: jax.Array) -> jax.Array:
    first, last = self.start[1], self.limit[1]
    # sin^2 of the half angle: 1 - cos loses small differences.
    return first + (last - first) * jnp.sin(jnp.pi / 2 * fraction) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rsqrt:
  """A constant rate, then a decay by the inverse square root of the step.

  The rate is `multiplier / sqrt(max(step - offset, decay_start))`.

  Attributes:
    multiplier: Rate times the square root of the step.
    decay_start: Step, after `offset`, up to which the rate is constant.
    offset: Subtracted from the step; it may be negative.
    decay_end: Step from which the rate is constant again; None is never.
  """

  multiplier: float = 1.0
  decay_start: int = 10_000
  offset: float = 0.0
  decay_end: int | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, "multiplier", "decay_start", "decay_end")
    checks.check_interval(self, "(-inf, inf)", "offset")

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    if self.decay_end is not None:
      step = jnp.minimum(step, self.decay_end)
    return self.multiplier / jnp.sqrt(
      jnp.maximum(step - self.offset, self.decay_start)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfLife:
  """A constant rate, then one that halves at regular intervals.

  Attributes:
    value: Rate up to `start_step`.
    start_step: Step at which the decay begins.
    half_life_steps: Number of steps in which the rate halves.
    min_ratio: Smallest rate, as a share of `value`.
  """

  value: float
  start_step: int = 400_000
  half_life_steps: int = 100_000
  min_ratio: float = 0.01

  def __post_init__(self) -> None:
    checks.check_positive(self, "value", "half_life_steps")
    checks.check_non_negative(self, "start_step")
    checks.check_interval(self, "(0, 1]", "min_ratio")

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step, jnp.float32)
    lives = jnp.maximum(step - self.start_step, 0) / self.half_life_steps
    return self.value * jnp.maximum(jnp.exp2(-lives), self.min_ratio)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
  """Schedules that follow each other, each with its own count of steps.

  Attributes:
    boundaries: Increasing steps at which the next schedule begins. It is called
      with the steps since then.
    schedules: Schedules, one more than boundaries.
  """

  boundaries: Sequence[int]
  schedules: Sequence[Callable[[ArrayLike], ArrayLike]]

  def __post_init__(self) -> None:
    if len(self.schedules) != len(self.boundaries) + 1:
      raise ValueError(
        "Joined.schedules must have one more entry than boundaries"
        f" ({len(self.boundaries)}), got {len(self.schedules)}."
      )
    _check_table(self, "boundaries", self.boundaries, ())

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step)
    rate = jnp.asarray(self.schedules[0](step), jnp.float32)
    for boundary, schedule in zip(
      self.boundaries, self.schedules[1:], strict=True
    ):
      # At least 0, because the rate before the boundary is not used.
      since = jnp.maximum(step, boundary) - boundary
      later = jnp.asarray(schedule(since), jnp.float32)
      rate = jnp.where(step >= boundary, later, rate)
    return rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycle:
  """Schedules that take turns; each is called with the step of the run.

  Attributes:
    schedules: Schedules, in the order of their turns.
    steps: Number of steps of each turn.
  """

  schedules: Sequence[Callable[[ArrayLike], ArrayLike]]
  steps: Sequence[int]

  def __post_init__(self) -> None:
    if not self.steps or len(self.schedules) != len(self.steps):
      raise ValueError(
        "Cycle.schedules must have as many entries as steps"
        f" ({len(self.steps)}) and at least one, got {len(self.schedules)}."
      )
    if not all(steps > 0 for steps in self.steps):
      raise ValueError(f"Cycle.steps must be positive, got {self.steps}.")

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    step = jnp.asarray(step)
    turn = step % sum(self.steps)
    rate = jnp.asarray(self.schedules[0](step), jnp.float32)
    begins = itertools.accumulate(self.steps[:-1])
    for begin, schedule in zip(begins, self.schedules[1:], strict=True):
      later = jnp.asarray(schedule(step), jnp.float32)
      rate = jnp.where(turn >= begin, later, rate)
    return rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class RampHoldDecay:
  """Linear ramp from zero, a constant rate, then a decay, as in Pax.

  Step 0 has the rate zero if there is a ramp.

  Attributes:
    peak: Highest rate, from step `warmup_steps` to step `decay_start`.
    warmup_steps: Number of steps of the ramp.
    decay_start: Step at which the decay begins.
    decay_end: Step from which the rate is `peak * min_ratio`.
    min_ratio: Final rate, as a share of the peak.
    decay: Makes the schedule of the decay from `start` to `limit`:
      `Polynomial`, `Cosine`, `Exponential`, or one with other arguments such as
      `functools.partial(Polynomial, power=2)`.
  """

  peak: float
  warmup_steps: int
  decay_start: int
  decay_end: int
  min_ratio: float = 0.01
  decay: Callable[..., Callable[[ArrayLike], jax.Array]] = Polynomial

  def __post_init__(self) -> None:
    checks.check_positive(self, "peak")
    checks.check_non_negative(self, "warmup_steps")
    checks.check_interval(self, "[0, 1]", "min_ratio")
    if self.decay_start < self.warmup_steps:
      raise ValueError(
        "RampHoldDecay.decay_start must be at least warmup_steps"
        f" ({self.warmup_steps}), got {self.decay_start}."
      )
    if self.decay_end <= self.decay_start:
      raise ValueError(
        "RampHoldDecay.decay_end must be more than decay_start"
        f" ({self.decay_start}), got {self.decay_end}."
      )
    self._decay()  # Checks its fields.

  def __call__(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    steps = jnp.asarray(step, jnp.float32)
    ramp = self.peak * steps / max(self.warmup_steps, 1)
    rate = jnp.where(steps < self.warmup_steps, ramp, jnp.float32(self.peak))
    return jnp.where(steps >= self.decay_start, self._decay()(step), rate)

  def _decay(self) -> Callable[[ArrayLike], jax.Array]:
    return self.decay(
      start=(self.decay_start, self.peak),
      limit=(self.decay_end, self.peak * self.min_ratio),
    )


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
