"""Learning rates given by a table: steps, and the rates at or between them."""

from collections.abc import Sequence
import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecewiseConstant:
  """A schedule that jumps: `values[i]` from step `boundaries[i - 1]` on.

  Attributes:
    boundaries: Steps at which the rate changes, increasing.
    values: One learning rate more than there are boundaries.
  """

  boundaries: Sequence[int]
  values: Sequence[float]

  def __post_init__(self) -> None:
    if len(self.values) != len(self.boundaries) + 1:
      raise ValueError(
        "PiecewiseConstant.values must be one more than boundaries"
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
  """A schedule on straight lines through `(steps[i], values[i])`.

  Before the first and after the last of these steps the rate is constant.

  Attributes:
    steps: Increasing.
    values: As many learning rates.
  """

  steps: Sequence[int]
  values: Sequence[float]

  def __post_init__(self) -> None:
    if not self.steps or len(self.values) != len(self.steps):
      raise ValueError(
        "PiecewiseLinear.values must be as many as steps"
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
