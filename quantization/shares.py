"""How much of a tensor a quantization lost: what was clipped, flushed, bad.

For monitors: a share is the mean of a condition over all values, float32 [].
They are computed from the values before and after, with no product.
"""

from collections.abc import Mapping
import dataclasses
import operator

import jax
import jax.numpy as jnp

from paxon.quantization import equations, quantized_array, quantized_einsum
from paxon.quantization import recipe as recipe_lib

# By more than what rounding does to a scale and its product.
_ROUNDED = 1 + 2.0**-20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shares:
  """Shares of the values of a tensor, each float32 [] from 0 to 1.

  Attributes:
    clipped: Finite ones larger than the largest value of the format.
    flushed: Those other than 0 that became 0.
    not_finite: Those that were infinite or NaN before.
  """

  clipped: jax.Array
  flushed: jax.Array
  not_finite: jax.Array


def of(x: jax.Array, quantized: quantized_array.QuantizedArray) -> Shares:
  """Returns what a quantization lost.

  Args:
    x: Values as they were.
    quantized: What they were quantized to.
  """
  x = x.astype(jnp.float32)
  # A scale is rounded: the value that it was made of is not beyond.
  limit = quantized.format.largest * quantized.scale * _ROUNDED
  beyond = quantized_array.by_group(operator.gt, jnp.abs(x), limit)
  finite = jnp.isfinite(x)
  values = quantized.values.astype(jnp.float32)
  return Shares(
    clipped=jnp.mean(beyond & finite, dtype=jnp.float32),
    flushed=jnp.mean((x != 0) & finite & (values == 0), dtype=jnp.float32),
    not_finite=jnp.mean(~finite, dtype=jnp.float32),
  )


def of_operands(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  recipe: recipe_lib.Recipe,
  state: quantized_einsum.State | None = None,
) -> Mapping[str, Shares]:
  """Returns the shares of the operands of a forward product, by `lhs`, `rhs`.

  With the arguments of `quantized_einsum`; values are rounded to the nearest.
  What both compute alike, a compiler computes once.
  """
  parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
  result = {}
  for name, x, letters, tensor_recipe in (
    ("lhs", lhs, parsed.lhs, recipe.lhs),
    ("rhs", rhs, parsed.rhs, recipe.rhs),
  ):
    if tensor_recipe is not None:
      quantized = quantized_array.quantize(
        x,
        dataclasses.replace(
          tensor_recipe, rounding=recipe_lib.Rounding.NEAREST
        ),
        contracted=parsed.contracted_axes(letters),
        history=(state or {}).get(quantized_einsum.history_name(name)),
      )
      result[name] = of(x, quantized)
  return result
