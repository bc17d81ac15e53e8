"""Pooling over windows of one, two or three axes, and over whole axes.

The mean of a window divides by the positions that it has inside of the input,
so zeros around the input never count. With a mask of the first axis (time)
masked positions do not count either.
"""

from collections.abc import Sequence
import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from paxon.layers import maximum, precision


class Reduction(enum.Enum):
  """The value of a window."""

  MAX = "max"
  MEAN = "mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pooling:
  """Reduces windows; there is nothing to learn.

  Attributes:
    window: Size of the windows for each axis, time first; 1 to 3 axes.
    strides: Distance of the windows for each axis; `None` is `window`.
    reduction: The value of a window.
    same: Whether windows reach beyond the input (XLA's SAME, the output has
      ceil(size / stride) positions) or not (VALID).
  """

  window: tuple[int, ...]
  strides: tuple[int, ...] | None = None
  reduction: Reduction = Reduction.MAX
  same: bool = True

  def __post_init__(self) -> None:
    for name, value in (("window", self.window), ("strides", self.strides)):
      if value is None:
        continue
      value = tuple(value)
      object.__setattr__(self, name, value)
      if len(value) != len(self.window) or not value or min(value) <= 0:
        raise ValueError(
          f"Pooling.{name} must have positive entries, one for each axis, got"
          f" {value}."
        )

  def __call__(
    self,
    x: Float[Array, "batch *space channels"],
    mask: Bool[Array, "batch time"] | None = None,
  ) -> Float[Array, "batch *out channels"]:
    """Returns the pooled input, zero where `output_mask(mask)` is False.

    Raises:
      ValueError: The rank of `x` does not match `window`.
    """
    if x.ndim != len(self.window) + 2:
      raise ValueError(
        f"Pooling.window {self.window} needs an input of rank"
        f" {len(self.window) + 2}, got the shape {x.shape}."
      )
    is_real = jnp.ones(x.shape[1:-1], bool)[None, ..., None]
    if mask is not None:
      spread = mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
      is_real = jnp.broadcast_to(spread, (*x.shape[:-1], 1))
    if self.reduction is Reduction.MAX:
      y = self._reduce(jnp.where(is_real, x, -jnp.inf), -jnp.inf, jax.lax.max)
    else:
      wide = precision.widen(x)
      total = self._reduce(jnp.where(is_real, wide, 0), 0.0, jax.lax.add)
      count = self._reduce(is_real.astype(wide.dtype), 0.0, jax.lax.add)
      y = (total / jnp.maximum(count, 1)).astype(x.dtype)
    if mask is None:
      return y
    kept = self.output_mask(mask)
    return jnp.where(kept.reshape(*kept.shape, *(1,) * (y.ndim - 2)), y, 0)

  def output_mask(
    self, mask: Bool[Array, "batch time"]
  ) -> Bool[Array, "batch out"]:
    """Returns the mask of the output.

    With `same` it is that of every stride-th position, as for a shorter
    sequence; otherwise it is True for windows with a real position.
    """
    strides = self.window if self.strides is None else self.strides
    if self.same:
      return mask[:, :: strides[0]]
    return jax.lax.reduce_window(
      mask,
      False,
      jax.lax.bitwise_or,
      (1, self.window[0]),
      (1, strides[0]),
      "VALID",
    )

  def _reduce(self, x: jax.Array, init: float, combine: Any) -> jax.Array:
    strides = self.window if self.strides is None else self.strides
    return jax.lax.reduce_window(
      x,
      np.asarray(init, x.dtype),
      combine,
      (1, *self.window, 1),
      (1, *strides, 1),
      "SAME" if self.same else "VALID",
    )


def pool_all(
  x: Float[Array, "*shape"],
  mask: Bool[Array, "*broadcast"] | None = None,
  *,
  axes: Sequence[int],
  reduction: Reduction = Reduction.MEAN,
) -> Float[Array, "*rest"]:
  """Returns the maximum or mean over `axes`, without masked values.

  The mask has the rank of `x`. Where all values are masked the result is zero.
  The gradient of a maximum goes to the first of equal values, as in windows.
  """
  axes = tuple(axes)
  kept = jnp.ones((1,) * x.ndim, bool) if mask is None else mask
  kept = jnp.broadcast_to(kept, x.shape)
  if reduction is Reduction.MAX:
    y = maximum.take_max(jnp.where(kept, x, -jnp.inf), axes=axes)
    return jnp.where(jnp.any(kept, axis=axes), y, 0)
  if mask is None:
    count = math.prod(x.shape[axis] for axis in axes)
    return (jnp.sum(precision.widen(x), axis=axes) / count).astype(x.dtype)
  wide = precision.widen(x)
  count = jnp.sum(kept.astype(wide.dtype), axis=axes)
  total = jnp.sum(jnp.where(kept, wide, 0), axis=axes)
  return (total / jnp.maximum(count, 1)).astype(x.dtype)
