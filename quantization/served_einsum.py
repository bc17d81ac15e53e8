"""Einsum with weights stored in low precision, for serving.

`ServedEinsum(recipe)` replaces `jnp.einsum` in the field `einsum` of a layer.
If the right operand of a matmul is the layer's parameter of the same name, it
is stored quantized, with a scale per output:

  served/<path of the layer>/einsum/<matmul>/values    int8, fp8; int4 packed
  served/<path of the layer>/einsum/<matmul>/scale     float32; uint8 of MX
                                                       (E8M0), e4m3 of NVFP4
  served/<path of the layer>/einsum/<matmul>/tensor_scale  float32, of NVFP4
  served/<path of the layer>/einsum/<matmul>/zero      float32; zero points
  served/<path of the layer>/einsum/<matmul>/input_range  float32; the largest
                                                       activation, if static
  served/<path of the layer>/einsum/<matmul>/inputs    float32; factors of the
                                                       left operand, of AWQ and
                                                       SmoothQuant

The right operand is then not read: the server removes the parameter
(`stored_parameter`) and passes any array of its shape. Activations are
quantized if the recipe has `lhs`, with current scaling or that of a stored
range; otherwise the weights are cast to the dtype of the layer before the
matmul.

The variables are created when the collection is mutable: by an initialization,
or by `apply(..., mutable=["served"])`, which converts a float checkpoint. A
recipe with `calibration` then reads statistics, which
`apply(..., mutable=["calibration"])` sums. Without these variables a matmul is
not quantized. Matmuls without such a parameter, such as those of two
activations, are recorded in the collection `not_served`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import (
  calibration,
  equations,
  learned_range,
  matmuls,
  number_formats,
  quantized_array,
  quantized_matmul,
  scaling,
  zero_points,
)
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import variables

COLLECTION = "served"
# Collection that records matmuls without stored weights, for conversions.
NOT_SERVED = "not_served"
_VALUES, _SCALE, _INPUTS = "values", "scale", "inputs"
_TENSOR_SCALE, _ZERO = "tensor_scale", "zero"
_INPUT_RANGE = "input_range"
_PARAMS = "params"
_STATISTICS = "inputs"


def serving_recipe(recipe: recipe_lib.Recipe) -> recipe_lib.Recipe:
  """Returns the serving recipe for a training recipe.

  Both operands keep their formats. Weights have a scale per output, or per
  block of integers or of a table; quantized activations have a scale per token,
  or one if it is calibrated.
  """
  rhs = recipe.rhs
  is_float = recipe_lib.ScaleFormat.FLOAT32
  if rhs is not None and (
    rhs.block is None
    or (
      rhs.scale_format is is_float
      and not (rhs.format.is_integer or rhs.format.table)
    )
  ):
    rhs = _per_channel(rhs.format)
    if recipe.has_zero_points:
      rhs = dataclasses.replace(rhs, zero_point=True)
  lhs = None
  if recipe.lhs is not None:
    lhs = _per_channel(recipe.lhs.format)
    if isinstance(recipe.calibration, recipe_lib.StaticRange):
      lhs = recipe_lib.TensorRecipe(recipe.lhs.format)
  return recipe_lib.Recipe(
    lhs,
    rhs,
    None,
    search_range=recipe.search_range,
    learned_range=recipe.learned_range,
    calibration=recipe.calibration,
  )


def stored_parameter(name: str) -> str | None:
  """Returns the name of the parameter that a served variable replaces.

  Args:
    name: Logical name of a variable, such as `served/a/einsum/gate/values`.

  Returns:
    A name such as `params/a/gate`; `None` if the variable is not the values of
    weights.
  """
  collection, *path = name.split("/")
  if collection != COLLECTION or path[-1] != _VALUES:
    return None
  *layer, _, product, _ = path
  return "/".join((_PARAMS, *layer, product))


def get_format(spec: variables.VariableSpec) -> number_formats.NumberFormat:
  """Returns the format of stored values by their spec."""
  assert isinstance(spec.initializer, _Zeros), spec.name
  return spec.initializer.format


class ServedEinsum(matmuls.Provider):
  """Computes the matmuls of a layer from quantized stored weights.

  Attributes:
    recipe: How operands are quantized, from `serving_recipe`.
  """

  recipe: recipe_lib.Recipe

  def make_matmul(self, name: str) -> nn.Module:
    """Returns the matmul of this name."""
    return _Matmul(self.recipe, name=name)

  @nn.compact
  def make_grouped(
    self, equation: str, kernel: jax.Array, *, matmul: str
  ) -> matmuls.GroupedKernel:
    """Returns kernels of experts, which other code multiplies.

    Args:
      equation: Equation of `jnp.einsum`, without an ellipsis.
      kernel: Read only when it is converted.
      matmul: Name of the matmul and of its parameter.

    Raises:
      ValueError: The recipe has a calibration, which needs the left operand.
    """
    if self.recipe.calibration is not None:
      raise ValueError(
        f"{type(self.recipe.calibration).__name__} cannot quantize the kernel"
        f" {matmul!r}: its layer multiplies it without this einsum, so its"
        " inputs are not measured; exempt the layer or use a recipe without"
        " calibration."
      )
    operands = equation.partition("->")[0].split(",")
    parsed = equations.parse(equation, len(operands[0]), len(operands[1]))
    found = _Matmul(self.recipe, name=matmul).find_weights(parsed, kernel)
    if found is None:
      return matmuls.GroupedKernel(kernel=kernel)
    is_plain = found.zero is None and not found.format.table
    if not is_plain or found.scale.shape[1] != 1:
      return matmuls.GroupedKernel(kernel=found)
    # One scale for each output, by which the output can be multiplied.
    return matmuls.GroupedKernel(
      kernel=found.unpack().values, factor=found.scale
    )

  @nn.compact
  def find_kernel(
    self, equation: str, kernel: jax.Array, *, matmul: str
  ) -> jax.Array:
    """Returns a stored kernel, dequantized, for layers with another matmul.

    The arguments are those of `make_grouped`.
    """
    operands = equation.partition("->")[0].split(",")
    parsed = equations.parse(equation, len(operands[0]), len(operands[1]))
    return _Matmul(self.recipe, name=matmul).find_kernel(parsed, kernel)


@dataclasses.dataclass(frozen=True)
class _Zeros:
  """The initializer of stored values, which knows their format."""

  format: number_formats.NumberFormat

  def __call__(
    self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
  ) -> jax.Array:
    del key
    return jnp.zeros(shape, dtype)


class _Matmul(nn.Module):
  """One matmul of a layer."""

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
    self._measure(parsed, lhs, rhs)
    weights = self.find_weights(parsed, rhs)
    if weights is None:
      return jnp.einsum(
        equation, lhs, rhs, preferred_element_type=preferred_element_type
      )
    if self.has_variable(COLLECTION, _INPUTS):
      factors = variables.unbox(self.get_variable(COLLECTION, _INPUTS))
      factors = equations.like_output(factors, parsed.rhs, parsed.lhs)
      lhs = (lhs * factors.astype(lhs.dtype)).astype(lhs.dtype)
    left = lhs
    if self.recipe.lhs is not None:
      fixed = None
      if self.has_variable(COLLECTION, _INPUT_RANGE):
        fixed = variables.unbox(self.get_variable(COLLECTION, _INPUT_RANGE))
      left = quantized_array.quantize(
        lhs,
        self.recipe.lhs,
        contracted=parsed.contracted_axes(parsed.lhs),
        amax=fixed,
      )
    return quantized_matmul.multiply(
      parsed,
      left,
      weights,
      layer_dtype=lhs.dtype,
      out_dtype=jnp.dtype(preferred_element_type or lhs.dtype),
    )

  @nn.compact
  def find_kernel(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> jax.Array:
    """Returns the stored right operand, dequantized; `rhs` without one."""
    weights = self.find_weights(equation, rhs)
    if weights is None:
      return rhs
    whole = weights.dequantize()
    if self.has_variable(COLLECTION, _INPUTS):
      whole *= variables.unbox(self.get_variable(COLLECTION, _INPUTS))
    return whole.astype(rhs.dtype)

  def find_weights(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> quantized_array.QuantizedArray | None:
    """Returns the stored right operand; None if it is not stored."""
    recipe = self.recipe.rhs
    if recipe is None:
      return None
    if not self.has_variable(COLLECTION, _VALUES):
      names = matmuls.parameter_axes(self, rhs.shape)
      # Not during initialization: the record is not a model variable.
      if names is None and not self.is_initializing():
        self.sow(NOT_SERVED, "product", jnp.zeros(()))
      if names is None or not self.is_mutable_collection(COLLECTION):
        return None
      made = self._quantize(equation, rhs, recipe, names)
      axis = packed_axis(recipe.format, rhs.shape)
      made = made if axis is None else made.pack(axis)
      self._keep(_VALUES, made.values, names, _Zeros(recipe.format))
      for name, value in _store_scale(made.scale, recipe).items():
        self._keep(name, value, names)
      if made.zero is not None:
        self._keep(_ZERO, made.zero, names)
    fields = {
      name: variables.unbox(self.get_variable(COLLECTION, name))
      for name in (_VALUES, _SCALE, _TENSOR_SCALE, _ZERO)
      if self.has_variable(COLLECTION, name)
    }
    return quantized_array.QuantizedArray(
      fields[_VALUES],
      load_scale(fields),
      fields.get(_ZERO),
      format=recipe.format,
      power_of_two=recipe.has_power_of_two_scales,
      packed_axis=packed_axis(recipe.format, rhs.shape),
    )

  def _quantize(
    self,
    equation: equations.Equation,
    rhs: jax.Array,
    recipe: recipe_lib.TensorRecipe,
    names: tuple[str | None, ...],
  ) -> quantized_array.QuantizedArray:
    """Returns the quantized right operand; stores what scales the left one."""
    is_searched = self.recipe.search_range
    contracted = equation.contracted_axes(equation.rhs)
    if self.recipe.learned_range:
      ranges = learned_range.find(
        self, rhs, recipe, contracted=contracted, names=names
      )
      return quantized_array.quantize(
        rhs, recipe, contracted=contracted, amax=ranges
      )
    if recipe.zero_point:
      round_ = functools.partial(
        zero_points.quantize, half_quadratic=is_searched
      )
    else:
      round_ = search_scale if is_searched else quantized_array.quantize
    nearest = functools.partial(
      round_,
      tensor_recipe=recipe,
      contracted=contracted,
    )
    method = self.recipe.calibration
    if method is None:
      return nearest(rhs)
    statistics = self.get_variable(calibration.COLLECTION, _STATISTICS)
    if statistics is None:
      if not self.is_initializing():
        raise ValueError(
          f"{type(method).__name__} needs the statistics of the matmul"
          f" {self.name!r} in the collection {calibration.COLLECTION!r}: apply"
          " the model to batches with this collection mutable first."
        )
      # An initialization uses only the shapes.
      sizes = dict(zip(equation.rhs, rhs.shape, strict=True))
      lhs = jnp.ones([sizes.get(c, 1) for c in equation.lhs], jnp.float32)
      statistics = calibration.measure(equation, lhs, method)
    if isinstance(method, recipe_lib.StaticRange):
      self._keep(_INPUT_RANGE, statistics[calibration.LARGEST], ())
      return nearest(rhs)
    made, inputs = calibration.quantize(
      equation, rhs, statistics, method, nearest
    )
    if inputs is not None:
      self._keep(_INPUTS, inputs, names)
    return made

  def _measure(
    self, equation: equations.Equation, lhs: jax.Array, rhs: jax.Array
  ) -> None:
    """Adds the statistics of the left operand of stored weights."""
    method, name = self.recipe.calibration, calibration.COLLECTION
    if (
      method is None
      or self.is_initializing()
      or not self.is_mutable_collection(name)
      or matmuls.parameter_axes(self, rhs.shape) is None
    ):
      return
    found = calibration.measure(equation, lhs, method)
    if self.has_variable(name, _STATISTICS):
      before = self.get_variable(name, _STATISTICS)
      found = calibration.combine(before, found)
    self.put_variable(name, _STATISTICS, found)

  def _keep(
    self,
    name: str,
    value: jax.Array,
    names: tuple[str | None, ...],
    init: nn.initializers.Initializer = nn.initializers.zeros,
  ) -> None:
    """Creates a variable."""
    axes = (
      n if size > 1 else None
      for n, size in zip(names, value.shape, strict=True)
    )
    box = variables.make_boxed_init(
      init, tuple(axes), shape=value.shape, dtype=value.dtype
    )
    self.put_variable(COLLECTION, name, box().replace(value=value))


def packed_axis(
  number_format: number_formats.NumberFormat, shape: tuple[int, ...]
) -> int | None:
  """Returns the axis along which 4-bit weights are packed.

  Returns:
    The last axis of even size, as a negative number; `None` if no size is even
    or values have 8 bits.
  """
  if number_format.bits != 4:
    return None
  even = [i for i, size in enumerate(shape) if size % 2 == 0]
  return even[-1] - len(shape) if even else None


def _store_scale(
  scale: jax.Array, tensor_recipe: recipe_lib.TensorRecipe
) -> dict[str, jax.Array]:
  """Returns the stored fields of float32 scales."""
  match tensor_recipe.scale_format:
    case recipe_lib.ScaleFormat.E8M0:
      bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
      # NaN has the largest exponent in both formats.
      return {_SCALE: (bits >> 23).astype(jnp.uint8)}
    case recipe_lib.ScaleFormat.E4M3:
      e4m3 = number_formats.FP8_E4M3
      # The largest of the tensor is 448.
      whole = jnp.max(scale, keepdims=True) / e4m3.largest
      blocks = number_formats.saturating_cast(scale / whole, e4m3)
      return {_SCALE: blocks, _TENSOR_SCALE: whole}
  return {_SCALE: scale}


def load_scale(fields: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the float32 scales of stored weights.

  Args:
    fields: `scale`, and `tensor_scale` if it is stored.
  """
  scale = fields[_SCALE]
  if scale.dtype == jnp.uint8:
    bits = scale.astype(jnp.int32) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
  if _TENSOR_SCALE in fields:
    return scale.astype(jnp.float32) * fields[_TENSOR_SCALE]
  return scale


def dequantize(
  values: jax.Array,
  scale: jax.Array,
  zero: jax.Array | None = None,
  *,
  number_format: number_formats.NumberFormat,
  layer_shape: tuple[int, ...],
) -> jax.Array:
  """Returns the dequantized float32 weights.

  Args:
    values: Stored values, possibly with leading axes of stacks.
    scale: Stored scales.
    zero: Stored zero points; `None` is 0.
    number_format: Format of the values.
    layer_shape: Shape of the weights of one layer.
  """
  stored = quantized_array.QuantizedArray(
    values,
    scale,
    zero,
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


# From 1 to 0.5 times the largest magnitude, in steps of 0.05.
FACTORS = tuple(1 - i / 20 for i in range(11))


def search_scale(
  x: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe,
  *,
  contracted: tuple[int, ...] = (),
  factors: Sequence[float] = FACTORS,
  power: float = 2.0,
) -> quantized_array.QuantizedArray:
  """Quantizes `x` with the range of smallest error for each group.

  Args:
    x: Values of a floating-point dtype.
    tensor_recipe: A recipe with current scaling and rounding to nearest.
    contracted: Contracted dimensions, as in `quantized_array.quantize`.
    factors: Candidate ranges, relative to the largest magnitude; the first of
      the best is used.
    power: Exponent of the absolute error that is minimized.

  Raises:
    ValueError: `factors` is empty or not positive, or scaling is delayed.
  """
  if not factors or min(factors) <= 0:
    raise ValueError(
      "search_scale needs positive factors, and at least one, got"
      f" {tuple(factors)}."
    )
  if tensor_recipe.is_delayed:
    raise ValueError(
      "search_scale needs TensorRecipe.scaling to be Current(): weights that"
      " are quantized once have no history."
    )
  wide = x.astype(jnp.float32)
  amax = quantized_array.reduce_groups(
    scaling.find_amax, wide, tensor_recipe, contracted
  )

  def quantize(range_: jax.Array) -> quantized_array.QuantizedArray:
    return quantized_array.quantize(
      wide, tensor_recipe, contracted=contracted, amax=range_
    )

  def error(factor: jax.Array) -> jax.Array:
    off = jnp.abs(quantize(factor * amax).dequantize() - wide) ** power
    return quantized_array.reduce_groups(
      jnp.sum, off, tensor_recipe, contracted
    )

  tried = jnp.asarray(factors, jnp.float32)
  # Sequentially, because a copy of the weights per factor may not fit.
  errors = jax.lax.map(error, tried)
  return quantize(tried[jnp.argmin(errors, axis=0)] * amax)
