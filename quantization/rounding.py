"""Rounding to a number format: to the nearest value, or at random.

Stochastic rounding of a value between two neighbours `low < x < high` of the
format gives `high` with probability `(x - low) / (high - low)`. Its mean is
`x`, so sums of many rounded values, such as gradients, keep no bias.
"""

import jax
import jax.numpy as jnp

from paxon.quantization import number_formats
from paxon.quantization import recipe as recipe_lib


def to_format(
  x: jax.Array,
  number_format: number_formats.NumberFormat,
  *,
  rounding: recipe_lib.Rounding = recipe_lib.Rounding.NEAREST,
  key: jax.Array | None = None,
) -> jax.Array:
  """Returns `x` in a format, saturated.

  Args:
    x: float32 values, scaled to the range of the format.
    number_format: The format.
    rounding: How values between two of the format are rounded.
    key: Random key; needed by stochastic rounding only.

  Raises:
    ValueError: Rounding is stochastic, and there is no key.
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
  """Rounds to multiples of the distance between neighbours, in float32."""
  step = _step(x, number_format)
  # Exact: steps are powers of two, and so is the difference to the floor.
  scaled = x / step
  low = jnp.floor(scaled)
  up = jax.random.uniform(key, x.shape, x.dtype) < scaled - low
  return (low + up.astype(x.dtype)) * step


def _step(
  x: jax.Array, number_format: number_formats.NumberFormat
) -> jax.Array:
  """Returns the distance of the format's values around `x`."""
  if number_format.is_integer:
    return jnp.ones((), x.dtype)
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  exponent = ((bits >> 23) & 0xFF) - 127
  exponent = jnp.clip(exponent, number_format.smallest_exponent, 126)
  step_bits = (exponent - number_format.mantissa_bits + 127) << 23
  return jax.lax.bitcast_convert_type(step_bits, jnp.float32)
