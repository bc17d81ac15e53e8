"""A linear warm-up before any decay to an end: what such schedules share.

With W warm-up steps, N steps in all and the step t counted from 0, the rate is
`peak (t + 1) / (W + 1)` while t <= W. The first update is not wasted on a rate
of zero, and step W has exactly the peak. From step N on it is `end`.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp


@runtime_checkable
class Warmed(Protocol):
  """A schedule with a warm-up."""

  @property
  def peak(self) -> float:
    """The highest learning rate, at step `warmup_steps`."""
    ...

  @property
  def warmup_steps(self) -> int:
    """How many steps lie before the peak."""
    ...


@runtime_checkable
class Ending(Warmed, Protocol):
  """A schedule with a warm-up and an end."""

  @property
  def total_steps(self) -> int:
    """The step from which the rate is `end`."""
    ...

  @property
  def end(self) -> float:
    """The last learning rate."""
    ...


def check(schedule: Ending) -> None:
  """Checks that a schedule warms up before it ends, and decays.

  Raises:
    ValueError: It does not.
  """
  name = type(schedule).__name__
  if schedule.end > schedule.peak:
    raise ValueError(
      f"{name}.end must be at most the peak ({schedule.peak}), got"
      f" {schedule.end}."
    )
  if not 0 <= schedule.warmup_steps <= schedule.total_steps:
    raise ValueError(
      f"{name}.warmup_steps must lie between 0 and total_steps"
      f" ({schedule.total_steps}), got {schedule.warmup_steps}."
    )


def rate(schedule: Warmed, step: jax.Array) -> jax.Array:
  """Returns the rate of a step before the peak."""
  return schedule.peak * (step + 1) / (schedule.warmup_steps + 1)


def fraction(schedule: Ending, step: jax.Array) -> jax.Array:
  """Returns how much of the decay is done at a step, from 0 to 1."""
  steps = max(schedule.total_steps - schedule.warmup_steps, 1)
  return jnp.clip((step - schedule.warmup_steps) / steps, 0, 1)


def joined(schedule: Ending, step: jax.Array, decayed: jax.Array) -> jax.Array:
  """Returns the rate at a step.

  Args:
    schedule: The schedule.
    step: Which step.
    decayed: The rate by the decay alone; before the peak and from the end on
      it does not matter.
  """
  warming = step < schedule.warmup_steps
  result = jnp.where(warming, rate(schedule, step), decayed)
  # Exactly `end`: float32 arithmetic need not get there.
  return jnp.where(
    step >= schedule.total_steps, jnp.float32(schedule.end), result
  )
