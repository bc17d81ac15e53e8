"""Quantized arrays: low-precision values with scales.

  quantize(x, recipe)       x ~ values * scale
  zero_points.quantize      x ~ (values - zero) * scale

A scale is a scalar, or has the rank of the values, with size 1 or the number of
tiles in the dimensions of a group of values with the same scale.
"""

from collections.abc import Callable
import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import number_formats, scaling
from paxon.quantization import recipe as recipe_lib

# An array; in trees of the same structure also a shape or a sharding.
_Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
  """Values of a number format and their scales. A pytree.

  Attributes:
    values: Array of the format's dtype; int8 with the bits of two values per
      byte if packed.
    scale: float32; a scalar, or of the rank of `values`, with sizes that divide
      those of the (unpacked) values.
    zero: Zero points, of the shape of `scale`; `None` is 0.
    format: The number format.
    power_of_two: Whether all scales are powers of two.
    packed_axis: Negative axis along which two values share a byte; `None` if
      not packed.
  """

  values: _Leaf
  scale: _Leaf
  zero: _Leaf = None
  format: number_formats.NumberFormat = dataclasses.field(
    metadata={"static": True}, kw_only=True
  )
  power_of_two: bool = dataclasses.field(
    default=False, metadata={"static": True}, kw_only=True
  )
  packed_axis: int | None = dataclasses.field(
    default=None, metadata={"static": True}, kw_only=True
  )

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the unpacked values."""
    shape = list(self.values.shape)
    if self.packed_axis is not None:
      shape[self.packed_axis] *= 2
    return tuple(shape)

  @property
  def ndim(self) -> int:
    """Number of dimensions."""
    return self.values.ndim

  @property
  def nbytes(self) -> int:
    """Bytes of values, scales and zero points."""
    return sum(
      math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self)
    )

  def pack(self, axis: int = -1) -> "QuantizedArray":
    """Returns the same array with two 4-bit values per byte."""
    if self.format.bits != 4 or self.packed_axis is not None:
      raise ValueError(
        "QuantizedArray.packed needs values of four bits that are not packed "
        f"yet, got {self.format.name} with packed_axis={self.packed_axis}."
      )
    return dataclasses.replace(
      self,
      values=number_formats.pack(
        number_formats.encode(self.values, self.format), axis=axis
      ),
      packed_axis=axis if axis < 0 else axis - self.ndim,
    )

  def unpack(self) -> "QuantizedArray":
    """Returns the same array with one byte per value."""
    if self.packed_axis is None:
      return self
    codes = number_formats.unpack(self.values, axis=self.packed_axis)
    return dataclasses.replace(
      self,
      values=number_formats.decode(codes, self.format),
      packed_axis=None,
    )

  def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the numbers, computed in float32 and cast to `dtype`."""
    values = self.unpack().values.astype(jnp.float32)
    if self.zero is not None:
      values = apply_by_group(operator.sub, values, self.zero)
    return apply_by_group(operator.mul, values, self.scale).astype(dtype)


def quantize(
  x: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe,
  *,
  contracted: tuple[int, ...] = (),
  amax: jax.Array | None = None,
  history: jax.Array | None = None,
  key: jax.Array | None = None,
) -> QuantizedArray:
  """Quantizes an array.

  Args:
    x: Values of a floating-point dtype.
    tensor_recipe: The recipe. Delayed scaling without a history becomes current
      scaling.
    contracted: Dimensions of `x` that the matmul contracts. Groups of `CHANNEL`
      cover all of them, tiles of `BLOCK` only the last.
    amax: Largest magnitude of each group that does not saturate; computed from
      `x` by default.
    history: float32 [H], history of delayed scaling.
    key: Random key for stochastic rounding.

  Raises:
    ValueError: The recipe has zero points (see `zero_points.quantize`).
  """
  if tensor_recipe.zero_point:
    raise ValueError(
      "TensorRecipe.zero_point must be False: only stored weights have zero"
      " points (zero_points.quantize)."
    )
  number_format = tensor_recipe.format
  if history is not None and tensor_recipe.is_delayed:
    scale = scaling.make_scale(jnp.max(history), tensor_recipe)
    if number_format.is_integer:
      # Integers have no NaN, so the scale must be NaN.
      amax = scaling.find_amax(x) if amax is None else amax
      scale = jnp.where(jnp.isfinite(amax), scale, jnp.nan)
  else:
    if amax is None:
      amax = reduce_groups(scaling.find_amax, x, tensor_recipe, contracted)
    scale = scaling.make_scale(amax, tensor_recipe)
  scaled = apply_by_group(operator.mul, x.astype(jnp.float32), 1 / scale)
  values = to_format(
    scaled, number_format, rounding=tensor_recipe.rounding, key=key
  )
  return QuantizedArray(
    values,
    scale,
    format=number_format,
    power_of_two=tensor_recipe.has_power_of_two_scales,
  )


def apply_by_group(
  operation: Callable[[jax.Array, jax.Array], jax.Array],
  x: jax.Array,
  groups: jax.Array,
) -> jax.Array:
  """Returns an operation on values and the entry of their group.

  Args:
    operation: Elementwise operation, such as `operator.mul`.
    x: Values.
    groups: A scalar, or of the rank of `x` with sizes that divide those of `x`.
  """
  if all(s in (1, n) for s, n in zip(groups.shape, x.shape, strict=False)):
    return operation(x, groups)
  tiled, per_tile = [], []
  for size, count in zip(x.shape, groups.shape, strict=True):
    tiled += [count, size // count]
    per_tile += [count, 1]
  result = operation(x.reshape(tiled), groups.reshape(per_tile))
  return result.reshape(x.shape)


def reduce_groups(
  reduction: Callable[..., jax.Array],
  x: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe,
  contracted: tuple[int, ...],
) -> jax.Array:
  """Reduces each group of values that share a scale.

  Args:
    reduction: `(x, axis=, keepdims=)`, such as `jnp.sum`.
    x: Values.
    tensor_recipe: Defines the groups.
    contracted: Contracted dimensions, as in `quantize`.

  Returns:
    One entry per group, with the shape of scales.
  """
  match tensor_recipe.granularity:
    case recipe_lib.Granularity.TENSOR:
      return reduction(x, axis=None, keepdims=False)
    case recipe_lib.Granularity.CHANNEL:
      return reduction(x, axis=contracted, keepdims=True)
    case recipe_lib.Granularity.BLOCK:
      assert tensor_recipe.block is not None
      tiled = _tiled_shape(x.shape, tensor_recipe.block, contracted)
      inner = tuple(range(1, 2 * x.ndim, 2))
      return reduction(x.reshape(tiled), axis=inner, keepdims=False)


def _tiled_shape(
  shape: tuple[int, ...], block: tuple[int, int], contracted: tuple[int, ...]
) -> list[int]:
  """Returns the number and the size of tiles of each dimension, alternating."""
  sizes = [1] * len(shape)
  free = [i for i in range(len(shape)) if i not in contracted]
  for axes, size in ((contracted, block[0]), (free, block[1])):
    if axes:
      sizes[axes[-1]] = min(size, shape[axes[-1]])
  tiled = []
  for axis, size in enumerate(sizes):
    if shape[axis] % size:
      raise ValueError(
        f"TensorRecipe.block {block} must divide the dimensions of an operand, "
        f"or be larger; dimension {axis} of {shape} has tiles of {size}."
      )
    tiled += [shape[axis] // size, size]
  return tiled


def to_format(
  x: jax.Array,
  number_format: number_formats.NumberFormat,
  *,
  rounding: recipe_lib.Rounding = recipe_lib.Rounding.NEAREST,
  key: jax.Array | None = None,
) -> jax.Array:
  """Rounds and casts values to a format, with saturation.

  Args:
    x: float32 values, scaled to the range of the format.
    number_format: The format.
    rounding: Rounding of values between two neighbours of the format.
    key: Random key, only for stochastic rounding.

  Raises:
    ValueError: Rounding is stochastic and `key` is None.
  """
  if rounding is recipe_lib.Rounding.STOCHASTIC:
    if key is None:
      raise ValueError(
        "Rounding.STOCHASTIC needs a random key, got None; give "
        "quantized_einsum its argument key."
      )
    x = _at_random(x, number_format, key)
  return number_formats.saturating_cast(x, number_format)


def _at_random(
  x: jax.Array, number_format: number_formats.NumberFormat, key: jax.Array
) -> jax.Array:
  """Rounds stochastically to neighbours in the format, in float32."""
  step = number_formats.find_step(x, number_format)
  # Exact: steps are powers of two, and the difference to the floor is exact.
  scaled = x / step
  low = jnp.floor(scaled)
  up = jax.random.uniform(key, x.shape, x.dtype) < scaled - low
  return (low + up.astype(x.dtype)) * step
