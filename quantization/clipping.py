"""Clipping of weights: a smaller range for a finer grid.

With few bits, the largest weight of a group decides how coarse all others
become. `best` tries ranges below the largest magnitude, and takes for each
group the one whose quantization is nearest in the mean, by `|error|^power`. It
is for weights that are quantized once, as `served_einsum` stores them; values
beyond the range saturate.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from paxon.quantization import quantized_array, scaling
from paxon.quantization import recipe as recipe_lib

# Down to half of the largest magnitude, in steps of a twentieth.
FACTORS = tuple(1 - i / 20 for i in range(11))


def best(
  x: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe,
  *,
  contracted: tuple[int, ...] = (),
  factors: Sequence[float] = FACTORS,
  power: float = 2.0,
) -> quantized_array.QuantizedArray:
  """Returns `x` quantized with the best range of each group.

  Args:
    x: Values of a floating-point dtype.
    tensor_recipe: How they are quantized, with current scaling and rounding to
      the nearest value.
    contracted: As of `quantized_array.quantize`.
    factors: Ranges that are tried, as parts of the largest magnitude; of
      equally good ones the first is taken.
    power: Of the error whose mean is to be small.

  Raises:
    ValueError: There is nothing to try, or the recipe has no largest magnitude
      of its own.
  """
  if not factors or min(factors) <= 0:
    raise ValueError(
      f"best needs positive factors, and at least one, got {tuple(factors)}."
    )
  if tensor_recipe.is_delayed:
    raise ValueError(
      "best needs TensorRecipe.scaling to be Current(): weights that are "
      "quantized once have no history."
    )
  wide = x.astype(jnp.float32)
  amax = quantized_array.reduce_groups(
    scaling.amax_of, wide, tensor_recipe, contracted
  )

  def quantized(range_: jax.Array) -> quantized_array.QuantizedArray:
    return quantized_array.quantize(
      wide, tensor_recipe, contracted=contracted, amax=range_
    )

  def error(factor: jax.Array) -> jax.Array:
    off = jnp.abs(quantized(factor * amax).dequantize() - wide) ** power
    return quantized_array.reduce_groups(
      jnp.sum, off, tensor_recipe, contracted
    )

  tried = jnp.asarray(factors, jnp.float32)
  # One after the other: a copy of the weights for each would not fit.
  errors = jax.lax.map(error, tried)
  return quantized(tried[jnp.argmin(errors, axis=0)] * amax)
