"""Einsum with weights stored in low precision, for serving.

`ServedEinsum(recipe)` goes into a layer's field `einsum` in place of
`jnp.einsum`. Where the right operand of a product is the layer's parameter of
the product's name, it is stored quantized, once, with a scale for each output:

  served/<path of the layer>/einsum/<product>/values    int8, fp8; int4 packed
  served/<path of the layer>/einsum/<product>/scale     float32

and the right operand that the layer gives is not read: whoever serves leaves
that parameter out (`stored_parameter`), and hands in anything of its shape.
Activations are quantized as they come, by their own largest values, where the
recipe has something for `lhs`; otherwise the weights become numbers of the
layer's dtype just before the product.

The variables are made where the collection may change: by an initialization,
or by `apply(..., mutable=["served"])` with a float checkpoint, which converts
it. Where there are none, and none may be made, a product is computed as it
stands; so are products without such a parameter, of two activations for one,
which are told to the collection `not_served`.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import (
  equations,
  narrow_products,
  number_formats,
  products,
  quantized_array,
  scaling,
)
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import variables

COLLECTION = "served"
# Where conversions may look for the products that have no stored weights.
NOT_SERVED = "not_served"
_VALUES, _SCALE = "values", "scale"
_PARAMS = "params"


def serving_recipe(recipe: recipe_lib.Recipe) -> recipe_lib.Recipe:
  """Returns the recipe by which a product of a recipe of training is served.

  Both operands keep the formats of training. Weights get a scale for each
  output, activations that are quantized one for each row. The range of weights
  is searched for where the recipe says so.

  Args:
    recipe: How the product is quantized in training.
  """
  rhs = recipe.rhs and _per_channel(recipe.rhs.format)
  lhs = None
  if recipe.lhs is not None:
    lhs = _per_channel(recipe.lhs.format)
  return recipe_lib.Recipe(lhs, rhs, None, search_range=recipe.search_range)


def stored_parameter(name: str) -> str | None:
  """Returns the name of the parameter that a variable takes the place of.

  Args:
    name: Logical name of a variable, as `served/a/einsum/gate/values`.

  Returns:
    As `params/a/gate`; `None` for variables that are not the values of weights.
  """
  collection, *path = name.split("/")
  if collection != COLLECTION or path[-1] != _VALUES:
    return None
  *layer, _, product, _ = path
  return "/".join((_PARAMS, *layer, product))


class ServedEinsum(products.Provider):
  """Computes the products of a layer from weights of few bits.

  Attributes:
    recipe: How operands are quantized, with a scale for each row or output, the
      current ones; see `serving_recipe`.
  """

  recipe: recipe_lib.Recipe

  def part(self, product: str) -> nn.Module:
    """Returns the product of this name."""
    return _Product(self.recipe, name=product)


class _Product(nn.Module):
  """One product of a layer."""

  recipe: recipe_lib.Recipe

  @nn.compact
  def __call__(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    preferred_element_type: DTypeLike | None,
  ) -> jax.Array:
    parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
    weights = self._weights(parsed, rhs)
    if weights is None:
      return jnp.einsum(
        equation, lhs, rhs, preferred_element_type=preferred_element_type
      )
    left = lhs
    if self.recipe.lhs is not None:
      left = quantized_array.quantize(
        lhs,
        self.recipe.lhs,
        contracted=parsed.contracted_axes(parsed.lhs),
      )
    return narrow_products.multiply(
      parsed,
      left,
      weights,
      layer_dtype=lhs.dtype,
      out_dtype=jnp.dtype(preferred_element_type or lhs.dtype),
    )

  def _weights(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> quantized_array.QuantizedArray | None:
    """Returns the stored right operand; None if it is not stored."""
    recipe = self.recipe.rhs
    if recipe is None:
      return None
    if not self.has_variable(COLLECTION, _VALUES):
      names = self._parameter_axes(rhs.shape)
      # What is told is no variable of the model.
      if names is None and not self.is_initializing():
        self.sow(NOT_SERVED, "product", jnp.zeros(()))
      if names is None or not self.is_mutable_collection(COLLECTION):
        return None
      is_searched = self.recipe.search_range
      quantize = best if is_searched else quantized_array.quantize
      contracted = equation.contracted_axes(equation.rhs)
      made = quantize(rhs, recipe, contracted=contracted)
      axis = packed_axis(recipe.format, rhs.shape)
      made = made if axis is None else made.packed(axis)
      self._keep(_VALUES, made.values, names)
      self._keep(_SCALE, made.scale, names)
    values, scale = (
      variables.unbox(self.get_variable(COLLECTION, name))
      for name in (_VALUES, _SCALE)
    )
    return quantized_array.QuantizedArray(
      values,
      scale,
      format=recipe.format,
      power_of_two=recipe.has_power_of_two_scales,
      packed_axis=packed_axis(recipe.format, rhs.shape),
    )

  def _parameter_axes(
    self, shape: tuple[int, ...]
  ) -> tuple[str | None, ...] | None:
    """Returns the logical axes of the layer's parameter of this name.

    `None` if there is no such parameter of this shape. Axes are known only
    while variables are initialized.
    """
    # By scopes: inside of lifted transforms a module does not know its parent.
    einsum = self.scope.parent if self.scope is not None else None
    layer = einsum.parent if einsum is not None else None
    if layer is None or self.name is None:
      return None
    parameter = layer.get_variable(_PARAMS, self.name)
    names = getattr(parameter, "names", (None,) * len(shape))
    if getattr(variables.unbox(parameter), "shape", None) != shape:
      return None
    return tuple(names)

  def _keep(
    self, name: str, value: jax.Array, names: tuple[str | None, ...]
  ) -> None:
    """Makes a variable."""
    axes = (
      n if size > 1 else None
      for n, size in zip(names, value.shape, strict=True)
    )
    box = variables.boxed(
      nn.initializers.zeros, tuple(axes), shape=value.shape, dtype=value.dtype
    )
    self.put_variable(COLLECTION, name, box().replace(value=value))


def packed_axis(
  number_format: number_formats.NumberFormat, shape: tuple[int, ...]
) -> int | None:
  """Returns along which axis weights of four bits share bytes.

  Args:
    number_format: Of the weights.
    shape: Of the weights of one layer.

  Returns:
    The last one of an even size, counted from the last; `None` if there is
    none, or values have a byte each.
  """
  if number_format.bits != 4:
    return None
  even = [i for i, size in enumerate(shape) if size % 2 == 0]
  return even[-1] - len(shape) if even else None


def restored(
  values: jax.Array,
  scale: jax.Array,
  *,
  number_format: number_formats.NumberFormat,
  layer_shape: tuple[int, ...],
) -> jax.Array:
  """Returns the float32 weights that stored ones stand for.

  Args:
    values: As stored, with leading axes of stacks or without.
    scale: Theirs.
    number_format: Theirs.
    layer_shape: Of the weights of one layer.
  """
  stored = quantized_array.QuantizedArray(
    values,
    scale,
    format=number_format,
    packed_axis=packed_axis(number_format, layer_shape),
  )
  return stored.dequantize()


def _per_channel(
  number_format: number_formats.NumberFormat,
) -> recipe_lib.TensorRecipe:
  return recipe_lib.TensorRecipe(
    number_format, granularity=recipe_lib.Granularity.CHANNEL
  )


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
