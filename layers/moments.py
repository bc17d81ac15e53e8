"""Mean and variance of the values that a mask keeps.

  mean     = sum(mask * x) / count,            count = max(sum(mask), 1)
  variance = sum(mask * (x - mean) ** 2) / count

over the given axes. With `cumulative_axis` every sum runs from the first to the
present entry of that axis, so no entry depends on a later one; the variance
then adds up how far each value was from the mean that was known at its time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paxon.layers import precision


class Moments(NamedTuple):
  """Statistics in at least float32, with reduced axes of size one.

  Attributes:
    mean: Zero where nothing was kept.
    variance: Of the population (not the sample); zero where nothing was kept.
  """

  mean: jax.Array
  variance: jax.Array


def moments(
  x: Float[Array, "*shape"],
  mask: Bool[Array, "*broadcast"] | None = None,
  *,
  axes: Sequence[int],
  cumulative_axis: int | None = None,
) -> Moments:
  """Returns the moments of what is kept.

  A sum over an axis that is split over devices is one over all devices.

  Args:
    x: Values.
    mask: What to keep, of the rank of `x`; `None` keeps everything.
    axes: To sum over.
    cumulative_axis: To sum along, none of `axes`.

  Raises:
    ValueError: The mask has another rank, or an axis is in both.
  """
  if mask is not None and mask.ndim != x.ndim:
    raise ValueError(
      f"A mask of values with shape {x.shape} must have rank {x.ndim}, got the "
      f"shape {mask.shape}."
    )
  axes = tuple(axes)
  if cumulative_axis in axes:
    raise ValueError(
      f"The cumulative axis {cumulative_axis} must not be one of the axes "
      f"that are summed over, {axes}."
    )
  x = precision.widened(x)
  kept = jnp.ones((1,) * x.ndim, bool) if mask is None else mask
  kept = jnp.broadcast_to(kept, x.shape)

  def total(values: jax.Array) -> jax.Array:
    # Chosen, not multiplied: padding may hold anything, also NaN.
    values = jnp.sum(jnp.where(kept, values, 0), axis=axes, keepdims=True)
    if cumulative_axis is None:
      return values
    return jnp.cumsum(values, axis=cumulative_axis)

  count = jnp.maximum(total(jnp.ones_like(x)), 1)
  mean = total(x) / count
  # Not the mean of squares less the square of the mean, which cancels where
  # the mean is large.
  centred = jnp.where(kept, x, 0) - mean
  return Moments(mean, total(centred * centred) / count)
