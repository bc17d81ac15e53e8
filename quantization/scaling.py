"""Scales of quantized tensors, and histories of largest magnitudes.

  scale = largest value * 2^margin / largest value of the format
  values = round(x / scale),  x ~ values * scale

A scale is a positive float32 number whose inverse is finite. The scale of zeros
is 1. If any value is not finite, the scale is NaN, and so are the results.
"""

import math

import jax
import jax.numpy as jnp

from paxon.quantization import number_formats
from paxon.quantization import recipe as recipe_lib

# The smallest normal float32: its inverse is finite.
_SMALLEST = 2.0**-126


def find_amax(
  x: jax.Array,
  axis: tuple[int, ...] | None = None,
  *,
  keepdims: bool = False,
) -> jax.Array:
  """Returns the largest magnitude as float32; NaN if there is a NaN."""
  largest = jnp.max(jnp.abs(x), axis=axis, keepdims=keepdims, initial=0)
  return largest.astype(jnp.float32)


def make_scale(
  amax: jax.Array, tensor_recipe: recipe_lib.TensorRecipe
) -> jax.Array:
  """Returns the scales of tensors with these largest magnitudes.

  Args:
    amax: float32, of any shape.
    tensor_recipe: Defines format and margin, and the scale for an `amax` of 0:
      `initial_scale` for delayed scaling, else 1.
  """
  match tensor_recipe.scale_format:
    case recipe_lib.ScaleFormat.E8M0:
      return _exponent_scale(amax, tensor_recipe.format)
    case recipe_lib.ScaleFormat.E4M3:
      return _two_level_scale(amax, tensor_recipe.format)
  scaling = tensor_recipe.scaling
  factor = 2.0**scaling.margin / tensor_recipe.format.largest
  scale = jnp.maximum(amax * factor, _SMALLEST)
  if tensor_recipe.has_power_of_two_scales:
    scale = _next_power_of_two(scale)
  start = 1.0
  if isinstance(scaling, recipe_lib.Delayed):
    start = scaling.initial_scale
  scale = jnp.where(amax == 0, start, scale)
  return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def _exponent_scale(
  amax: jax.Array, number_format: number_formats.NumberFormat
) -> jax.Array:
  """Returns the scales of `ScaleFormat.E8M0`."""
  largest = math.floor(math.log2(number_format.largest))
  bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
  # Of the exponent alone; the smallest scale has a finite inverse.
  exponent = jnp.maximum((bits >> 23) - largest, 1)
  scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
  scale = jnp.where(amax == 0, 1.0, scale)
  return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def _two_level_scale(
  amax: jax.Array, number_format: number_formats.NumberFormat
) -> jax.Array:
  """Returns the scales of `ScaleFormat.E4M3`."""
  e4m3 = number_formats.FP8_E4M3
  top = jnp.max(amax)
  whole = jnp.maximum(top / (e4m3.largest * number_format.largest), _SMALLEST)
  block = number_formats.saturating_cast(
    amax / number_format.largest / whole, e4m3
  ).astype(jnp.float32)
  # The smallest positive value: zero has no inverse.
  scale = jnp.maximum(block, 2.0**-9) * whole
  scale = jnp.where(top == 0, 1.0, scale)
  return jnp.where(jnp.isfinite(top), scale, jnp.nan)


def next_history(history: jax.Array, amax: jax.Array) -> jax.Array:
  """Returns the history after a step, without its oldest entry.

  A non-finite magnitude is stored as 0, so that one bad step does not affect
  later scales.

  Args:
    history: float32 [H], newest first.
    amax: float32 [], largest magnitude of this step.
  """
  newest = jnp.where(jnp.isfinite(amax), amax, 0.0)
  return jnp.concatenate([newest[None], history[:-1]])


def _next_power_of_two(x: jax.Array) -> jax.Array:
  """Rounds positive normal float32 numbers up to powers of two."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  rounded = (bits + 0x7FFFFF) & 0x7F800000
  return jax.lax.bitcast_convert_type(rounded, jnp.float32)
