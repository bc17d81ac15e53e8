"""Ranges of weights that training learns, for quantization-aware training.

For each group of weights w that share a scale (learned weight clipping of
OmniQuant, Shao et al. 2023, https://arxiv.org/abs/2308.13137):

  range  = sigmoid(p) * max |w|
  scale  = range / largest value of the format
  values = round(clip(w / scale, -largest, largest))

p is a parameter, initially 4 (a range of 98 %). The gradient of the rounding is
that of its argument (straight-through), so with q = w / scale

  d (values * scale) / d w     = 1 where |q| <= largest, else 0
  d (values * scale) / d scale = values - q there, else the value

which is the gradient of LSQ (Esser et al. 2019, arXiv 1902.08153). The largest
magnitude gets no gradient. Weight decay leaves p alone.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.quantization import quantized_array, scaling
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import logical

PARAMETER = "range"
_INITIAL = 4.0


def find(
  module: nn.Module,
  weights: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe,
  *,
  contracted: tuple[int, ...],
  names: Sequence[str | None],
) -> jax.Array:
  """Returns the ranges of a matmul's weights, and creates their parameter.

  Args:
    module: The matmul, which owns the parameter; in a compact method.
    weights: The weights.
    tensor_recipe: How they are quantized.
    contracted: Contracted dimensions, as in `quantized_array.quantize`.
    names: Logical axes of the weights.

  Returns:
    float32, of the shape of scales.
  """
  largest = quantized_array.reduce_groups(
    scaling.find_amax, jax.lax.stop_gradient(weights), tensor_recipe, contracted
  )
  axes = [
    name if size > 1 else None
    for name, size in zip(names, largest.shape, strict=True)
  ]
  init = nn.initializers.constant(_INITIAL)
  learned = module.param(
    PARAMETER,
    logical.partitioned(init, axes, regularized=False),
    largest.shape,
    jnp.float32,
  )
  return jax.nn.sigmoid(learned) * largest


def quantize(
  weights: jax.Array,
  ranges: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe,
) -> jax.Array:
  """Returns weights, rounded within their ranges, in their dtype.

  Differentiable in both.
  """
  top = tensor_recipe.format.largest
  scale = scaling.make_scale(ranges, tensor_recipe)
  wide = weights.astype(jnp.float32)
  clipped = jnp.clip(
    quantized_array.apply_by_group(jnp.divide, wide, scale), -top, top
  )
  values = clipped + jax.lax.stop_gradient(jnp.round(clipped) - clipped)
  made = quantized_array.apply_by_group(jnp.multiply, values, scale)
  return made.astype(weights.dtype)
