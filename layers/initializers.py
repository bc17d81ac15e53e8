"""Initializers that are values: equal settings are equal, and fans are exact.

A stack compares the initializers of its layers, and a configuration shows them,
so they are frozen dataclasses `(key, shape, dtype) -> array` instead of the
closures of `jax.nn.initializers`, which serve as well where they are made once.

A kernel of more than two axes says which of them are summed over (`in_axes`)
and which are made (`out_axes`): [D, N, H] of a projection to heads has
`in_axes=(0,), out_axes=(1, 2)`, and [N, H, D] of the way back `(0, 1), (2,)`.
The others, such as experts, count for nothing. Without them the last two axes
are in and out, and all before are a receptive field, as in a convolution, which
multiplies both fans.

  Pax's WeightInit              here
  Gaussian, Uniform             Normal(scale), Uniform(scale)
  TruncatedGaussian             TruncatedNormal(scale)
  Constant                      Constant(value)
  Xavier, UniformSqrtFanAvg     xavier(scale)
  XavierWithFixupParams         fixup(num_layers, layers_per_block, scale)
  GaussianSqrtFanIn             FanScaled(scale)
  GaussianSqrtFanOut, FanAvg    FanScaled(scale, Fan.OUT), (..., Fan.AVERAGE)
  TruncatedGaussianSqrtFanIn    FanScaled(scale, Fan.IN, TRUNCATED_NORMAL)
  GaussianSqrtDim               FanScaled(scale, Fan.FIRST)
  UniformSqrtDim                FanScaled(scale * 3**-0.5, Fan.FIRST, UNIFORM)
  UniformUnitScaling            FanScaled(scale, Fan.IN, UNIFORM)
  ScaledDeltaOrthogonal         Orthogonal()
"""

import dataclasses
import enum
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

# Standard deviation of a unit normal cut off at two.
_TRUNCATED_DEVIATION = 0.87962566103423978


class Fan(enum.Enum):
  """Which number of a kernel's shape the variance is divided by."""

  IN = "in"
  OUT = "out"
  # The mean of both.
  AVERAGE = "average"
  # The first dimension, whatever it is.
  FIRST = "first"


class Distribution(enum.Enum):
  """What values are drawn from."""

  NORMAL = "normal"
  # A normal cut off at two of its standard deviations, which makes its own
  # standard deviation 0.88 of what it was. It is not scaled up for that.
  TRUNCATED_NORMAL = "truncated_normal"
  UNIFORM = "uniform"


@dataclasses.dataclass(frozen=True)
class Normal:
  """Normal values.

  Attributes:
    scale: Their standard deviation.
  """

  scale: float = 1.0

  def __call__(self, key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Returns the values."""
    return _draw(Distribution.NORMAL, self.scale, key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class TruncatedNormal:
  """Normal values, none beyond two standard deviations.

  Attributes:
    scale: Standard deviation before the cut; 1.14 times that after it.
  """

  scale: float = 1.0

  def __call__(self, key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Returns the values."""
    return _draw(Distribution.TRUNCATED_NORMAL, self.scale, key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Uniform:
  """Values between `-scale` and `scale`.

  Attributes:
    scale: The bound.
  """

  scale: float = 1.0

  def __call__(self, key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Returns the values."""
    deviation = self.scale * 3**-0.5
    return _draw(Distribution.UNIFORM, deviation, key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Constant:
  """One value everywhere.

  Attributes:
    value: An integer for variables of integers.
  """

  value: float | int

  def __call__(self, key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Returns the value, `shape` times."""
    del key
    integers = not jnp.issubdtype(dtype, jnp.inexact)
    if integers and self.value != int(self.value):
      raise ValueError(
        f"Constant.value must be an integer for {jnp.dtype(dtype)}, got "
        f"{self.value}."
      )
    return jnp.full(shape, self.value, dtype)


@dataclasses.dataclass(frozen=True)
class FanScaled:
  """Values with standard deviation `scale / sqrt(fan)`.

  Attributes:
    scale: Of the standard deviation; of a normal before it is cut.
    fan: What the variance is divided by.
    distribution: What values are drawn from.
    in_axes: The axes of a kernel that are summed over.
    out_axes: The axes that are made.
  """

  scale: float = 1.0
  fan: Fan = Fan.IN
  distribution: Distribution = Distribution.NORMAL
  in_axes: tuple[int, ...] | None = None
  out_axes: tuple[int, ...] | None = None

  def __post_init__(self) -> None:
    if (self.in_axes is None) != (self.out_axes is None):
      raise ValueError(
        "FanScaled.in_axes and FanScaled.out_axes must be given together, got "
        f"{self.in_axes} and {self.out_axes}."
      )

  def __call__(self, key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Returns the values."""
    deviation = self.scale / math.sqrt(self._fan(tuple(shape)))
    return _draw(self.distribution, deviation, key, shape, dtype)

  def _fan(self, shape: tuple[int, ...]) -> int | float:
    fan_in, fan_out = fans(shape, self.in_axes, self.out_axes)
    match self.fan:
      case Fan.IN:
        return fan_in
      case Fan.OUT:
        return fan_out
      case Fan.AVERAGE:
        return (fan_in + fan_out) / 2
      case Fan.FIRST:
        return shape[0] if shape else 1


@dataclasses.dataclass(frozen=True)
class Orthogonal:
  """Kernels that keep lengths (Xiao et al. 2018, arXiv:1806.05393).

  A matrix [in, out] has orthogonal rows or columns, times `sqrt(in / out)`
  where that exceeds one. A convolution has such a matrix in its middle, and
  zeros around it. Vectors are normal.
  """

  def __call__(self, key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    """Returns the values."""
    if len(shape) < 2:
      return Normal()(key, shape, dtype)
    scale = max(math.sqrt(shape[-2] / shape[-1]), 1.0)
    matrix = nn.initializers.orthogonal(scale)(key, tuple(shape[-2:]), dtype)
    middle = tuple((size - 1) // 2 for size in shape[:-2])
    return jnp.zeros(shape, dtype).at[middle].set(matrix)


def xavier(
  scale: float = 1.0,
  *,
  in_axes: tuple[int, ...] | None = None,
  out_axes: tuple[int, ...] | None = None,
) -> FanScaled:
  """Returns Glorot's uniform values within `sqrt(6 / (in + out))`.

  Glorot and Bengio 2010, section 4.2.1; `scale` multiplies the bound.
  """
  return FanScaled(scale, Fan.AVERAGE, Distribution.UNIFORM, in_axes, out_axes)


def fixup(
  num_layers: int, layers_per_block: int, scale: float = 1.0
) -> FanScaled:
  """Returns `xavier` made smaller for a deep stack of residual blocks.

  Fixup (Zhang et al. 2019, https://arxiv.org/abs/1901.09321): times
  `num_layers ** (-1 / (2 * layers_per_block))`.

  Args:
    num_layers: Number of residual blocks of the model.
    layers_per_block: Number of linear layers in each.
    scale: Multiplies the bound.
  """
  return xavier(scale * num_layers ** (-1 / (2 * layers_per_block)))


def lecun(*, in_axes: tuple[int, ...], out_axes: tuple[int, ...]) -> FanScaled:
  """Returns cut normal values with standard deviation `1 / sqrt(fan_in)`.

  What the kernels of this library start with by default.
  """
  return FanScaled(
    1 / _TRUNCATED_DEVIATION,
    Fan.IN,
    Distribution.TRUNCATED_NORMAL,
    in_axes,
    out_axes,
  )


def fans(
  shape: tuple[int, ...],
  in_axes: tuple[int, ...] | None = None,
  out_axes: tuple[int, ...] | None = None,
) -> tuple[int, int]:
  """Returns how many numbers enter a sum, and how many sums a number enters.

  Args:
    shape: Of the parameter of one layer.
    in_axes: Axes that are summed over.
    out_axes: Axes that are made.
  """
  if in_axes is not None and out_axes is not None:
    sizes = (math.prod(shape[a] for a in axes) for axes in (in_axes, out_axes))
    return next(sizes), next(sizes)
  if len(shape) < 2:
    return math.prod(shape), math.prod(shape)
  field = math.prod(shape[:-2])
  return field * shape[-2], field * shape[-1]


def _draw(
  distribution: Distribution,
  deviation: float,
  key: jax.Array,
  shape: Any,
  dtype: Any,
) -> jax.Array:
  """Returns values whose standard deviation is `deviation` before any cut."""
  shape = tuple(shape)
  match distribution:
    case Distribution.NORMAL:
      values = jax.random.normal(key, shape, dtype)
    case Distribution.TRUNCATED_NORMAL:
      values = jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)
    case Distribution.UNIFORM:
      values = jax.random.uniform(key, shape, dtype, minval=-1.0, maxval=1.0)
      deviation *= 3**0.5
  return values * jnp.asarray(deviation, dtype)
