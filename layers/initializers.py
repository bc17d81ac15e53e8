"""Initializers that compare by value, with exact fans.

Unlike the closures of `jax.nn.initializers` these are frozen dataclasses
`(key, shape, dtype) -> array`, so a stack can compare the initializers of its
layers, and a configuration can show them.

Kernels with more than two axes need input axes (`in_axes`) and output axes
(`out_axes`): [D, N, H] of a projection to heads has `in_axes=(0,), out_axes=(1,
2)`, and [N, H, D] of the output projection `(0, 1), (2,)`. Other axes, such as
experts, are ignored. By default the last two axes are input and output, and all
others a receptive field, as in a convolution, which multiplies both fans.

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

from collections.abc import Sequence
import dataclasses
import enum
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Standard deviation of a unit normal truncated at two.
_TRUNCATED_DEVIATION = 0.87962566103423978


class Fan(enum.Enum):
  """The divisor of the variance."""

  IN = "in"
  OUT = "out"
  # The mean of both.
  AVERAGE = "average"
  # The first dimension, whatever it is.
  FIRST = "first"


class Distribution(enum.Enum):
  """Distribution of the values."""

  NORMAL = "normal"
  # Truncated at two standard deviations, which reduces the standard deviation
  # to 0.88 of the nominal one, without compensation.
  TRUNCATED_NORMAL = "truncated_normal"
  UNIFORM = "uniform"


@dataclasses.dataclass(frozen=True)
class Normal:
  """Normal values.

  Attributes:
    scale: Their standard deviation.
  """

  scale: float = 1.0

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values."""
    return _draw(Distribution.NORMAL, self.scale, key, shape, dtype)

  def deviation(self, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation of the values."""
    del shape
    return self.scale


@dataclasses.dataclass(frozen=True)
class TruncatedNormal:
  """Normal values truncated at two standard deviations.

  Attributes:
    scale: Standard deviation before truncation.
  """

  scale: float = 1.0

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values."""
    return _draw(Distribution.TRUNCATED_NORMAL, self.scale, key, shape, dtype)

  def deviation(self, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation before truncation."""
    del shape
    return self.scale


@dataclasses.dataclass(frozen=True)
class Uniform:
  """Values between `-scale` and `scale`."""

  scale: float = 1.0

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values."""
    deviation = self.deviation(tuple(shape))
    return _draw(Distribution.UNIFORM, deviation, key, shape, dtype)

  def deviation(self, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation of the values."""
    del shape
    return self.scale * 3**-0.5


@dataclasses.dataclass(frozen=True)
class Constant:
  """A constant.

  Attributes:
    value: The value; an integer for integer variables.
  """

  value: float | int

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values."""
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
    scale: Factor of the standard deviation, before truncation.
    fan: Divisor of the variance.
    distribution: Distribution of the values.
    in_axes: Input axes of a kernel, over which a matmul sums.
    out_axes: Output axes of a kernel.
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

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values."""
    deviation = self.deviation(tuple(shape))
    return _draw(self.distribution, deviation, key, shape, dtype)

  def deviation(self, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation before truncation."""
    fan_in, fan_out = fans(shape, self.in_axes, self.out_axes)
    fan = {
      Fan.IN: fan_in,
      Fan.OUT: fan_out,
      Fan.AVERAGE: (fan_in + fan_out) / 2,
      Fan.FIRST: shape[0] if shape else 1,
    }[self.fan]
    return self.scale / math.sqrt(fan)


@dataclasses.dataclass(frozen=True)
class Orthogonal:
  """Norm-preserving kernels (Xiao et al. 2018, arXiv:1806.05393).

  A matrix [in, out] is orthogonal, times `max(sqrt(in / out), 1)`. A
  convolution has such a matrix at its center and zeros elsewhere. Vectors are
  normal.
  """

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
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
  """Returns Glorot's uniform initializer with bound `sqrt(6 / (in + out))`.

  Glorot and Bengio 2010, section 4.2.1; `scale` multiplies the bound.
  """
  return FanScaled(scale, Fan.AVERAGE, Distribution.UNIFORM, in_axes, out_axes)


def fixup(
  num_layers: int, layers_per_block: int, scale: float = 1.0
) -> FanScaled:
  """Returns Fixup: `xavier` scaled down for deep residual networks.

  Zhang et al. 2019, https://arxiv.org/abs/1901.09321: times `num_layers ** (-1
  / (2 * layers_per_block))`, for `num_layers` residual blocks of
  `layers_per_block` linear layers.
  """
  return xavier(scale * num_layers ** (-1 / (2 * layers_per_block)))


def lecun(*, in_axes: tuple[int, ...], out_axes: tuple[int, ...]) -> FanScaled:
  """Returns a truncated normal with standard deviation `1 / sqrt(fan_in)`.

  The default of kernels in this library.
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
  """Returns fan-in and fan-out of the shape of a parameter in one layer."""
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
  """Returns values with a standard deviation, before truncation."""
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
