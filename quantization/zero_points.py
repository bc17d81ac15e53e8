"""Integers with a zero point for each group: x ~ (values - zero) * scale.

A group then covers [min, max] instead of [-largest, largest], which helps where
weights are not centered. `quantize` has two choices of the zero point:

  range           scale = (max - min) / (levels - 1)
                  zero = smallest level - min / scale
  half quadratic  the same scale, and the zero of HQQ (Badri and Shaji 2023,
                  https://mobiusml.github.io/hqq_blog). It minimizes the sum of
                  |x - (values - zero) * scale|**0.7, a norm in which few large
                  errors count little, in alternating steps:

    error  = shrink(x - (values - zero) * scale)
    zero   = mean of values - (x - error) / scale
    values = round(x / scale + zero)

  with shrink(e) = sign(e) * max(|e| - |e|**(0.7 - 1) / beta, 0), and beta = 10,
  1.01 times larger in each step. No inputs are needed.

Zero points of the range are integers, so that the value 0 is exact if its group
has it; those of HQQ are not.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxon.quantization import quantized_array
from paxon.quantization import recipe as recipe_lib

NORM = 0.7
STEPS = 20
_BETA, _GROWTH = 10.0, 1.01
# The smallest normal float32: its inverse is finite.
_SMALLEST = 2.0**-126


def quantize(
  x: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe,
  *,
  contracted: tuple[int, ...],
  half_quadratic: bool,
) -> quantized_array.QuantizedArray:
  """Quantizes weights to integers with zero points.

  Args:
    x: Weights, finite, of a floating-point dtype.
    tensor_recipe: A recipe with `zero_point`.
    contracted: Contracted dimensions, as in `quantized_array.quantize`.
    half_quadratic: Whether to choose zero points by HQQ. Each group keeps the
      best of its steps, so groups do not depend on each other.
  """
  wide = x.astype(jnp.float32)
  top = tensor_recipe.format.largest
  bottom = -top - 1

  def reduce(of: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
    return quantized_array.reduce_groups(of, values, tensor_recipe, contracted)

  low, high = reduce(jnp.min, wide), reduce(jnp.max, wide)
  span = (high - low) / (top - bottom)
  # A group of one number c has the scale c: its value is exact.
  span = jnp.where(high == low, jnp.abs(high), span)
  scale = jnp.where(span < _SMALLEST, 1.0, span)
  start = jnp.round(jnp.clip(bottom - low / scale, -(2.0**22), 2.0**22))

  def round_zero(zero: jax.Array) -> jax.Array:
    scaled = quantized_array.apply_by_group(jnp.divide, wide, scale)
    moved = quantized_array.apply_by_group(jnp.add, scaled, zero)
    return jnp.clip(jnp.round(moved), bottom, top)

  def restore(values: jax.Array, zero: jax.Array) -> jax.Array:
    moved = quantized_array.apply_by_group(jnp.subtract, values, zero)
    return quantized_array.apply_by_group(jnp.multiply, moved, scale)

  def step(
    number: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    zero, best, least = carry
    values = round_zero(zero)
    off = wide - restore(values, zero)
    size = jnp.abs(off)
    loss = reduce(jnp.sum, size**NORM)
    is_better = loss < least
    best, least = jnp.where(is_better, zero, best), jnp.minimum(loss, least)
    beta = _BETA * _GROWTH ** number.astype(jnp.float32)
    # The power of an error of 0 is infinite, and 0 remains.
    error = jnp.maximum(size - size ** (NORM - 1) / beta, 0.0)
    error = jnp.copysign(error, off)
    kept = quantized_array.apply_by_group(jnp.divide, wide - error, scale)
    return reduce(jnp.mean, values - kept), best, least

  zero = start
  if half_quadratic:
    most = jnp.full(start.shape, jnp.inf)
    # The zero points of the last step are not tried.
    _, zero, _ = jax.lax.fori_loop(0, STEPS + 1, step, (start, start, most))
  finite = jnp.isfinite(low + high)
  return quantized_array.QuantizedArray(
    round_zero(zero).astype(tensor_recipe.format.dtype),
    jnp.where(finite, scale, jnp.nan),
    zero,
    format=tensor_recipe.format,
  )
