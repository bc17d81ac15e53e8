"""Masked mean and variance, optionally cumulative.

  mean     = sum(mask * x) / count,            count = max(sum(mask), 1)
  variance = sum(mask * (x - mean) ** 2) / count

over the given axes. With `cumulative_axis` sums run up to the current entry of
that axis, so no entry depends on a later one; the variance then sums squared
differences from the mean up to each value.
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
    mean: Mean; zero if all values are masked.
    variance: Population variance; zero if all values are masked.
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
  """Returns the moments of unmasked values over `axes`.

  The mask is true to keep, and has the rank of `x`.

  Raises:
    ValueError: The mask has another rank, or an axis is in both.
  """
  if mask is not None and mask.ndim != x.ndim:
    raise ValueError(
      f"mask must have rank {x.ndim} for values of shape {x.shape}, got shape"
      f" {mask.shape}."
    )
  axes = tuple(axes)
  if cumulative_axis in axes:
    raise ValueError(
      f"cumulative_axis ({cumulative_axis}) must not be one of the summed axes "
      f"{axes}."
    )
  x = precision.widen(x)
  kept = jnp.ones((1,) * x.ndim, bool) if mask is None else mask
  kept = jnp.broadcast_to(kept, x.shape)

  def total(values: jax.Array) -> jax.Array:
    # Not multiplied by the mask: padding may be NaN.
    values = jnp.sum(jnp.where(kept, values, 0), axis=axes, keepdims=True)
    if cumulative_axis is None:
      return values
    return jnp.cumsum(values, axis=cumulative_axis)

  count = jnp.maximum(total(jnp.ones_like(x)), 1)
  mean = total(x) / count
  # Not mean(x**2) - mean(x)**2, which cancels if the mean is large.
  centred = jnp.where(kept, x, 0) - mean
  return Moments(mean, total(centred * centred) / count)
