"""Differentiable einsum with quantized operands and gradients.

With `Q` for "quantize, then dequantize" and E for the equation:

  out        = E(Q(lhs), Q(rhs))
  d loss/lhs = E'(Q(g), Q(rhs)),  d loss/rhs = E''(Q(lhs), Q(g))

`g` is the gradient of the output, and E', E'' are the equations that the
unquantized product would have. So gradients are straight-through: rounding and
saturation have the derivative 1.

**What is multiplied.** If both operands are fp8, or both integers, the product
is one `lax.dot_general` of the narrow values, with sums in float32 (int32), and
scales multiply its result. That needs scales which do not change along the
contracted dimensions: those of `TENSOR` and `CHANNEL`. Otherwise (one operand
not quantized, one fp8 and one an integer, tiles) the narrow values become
numbers of the layer's dtype, and are multiplied in it. Integers of four bits
are multiplied as int8.

**Scales of the backward products.** Per tensor, an operand is quantized once
and used in both products that it takes part in; in between it is kept in its
narrow values. Finer scales belong to a product: they are constant along the
dimensions that it contracts, other ones in each of the three products, so
operands are quantized anew from the values as they were.

**Delayed scaling.** For each operand that has it, `state` holds the history of
the largest magnitudes of the last steps, newest first. One step, in order
(Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; as Transformer
Engine and flax have it):

  1. scale = max(history) * 2^margin / largest value of the format
     (`initial_scale`, where the history is zeros)
  2. values = round(x / scale), saturated
  3. history = [max |x|, *history[:-1]]

The new history is the "gradient" of the old one: a learner overwrites the
state with it. It has no scale, so where a step consists of several calls
(microbatches, replicas) the elementwise maximum of their histories is that of
one call on all. If the gradient of the output is zeros, the loss does not
depend on this call, and the gradient of the state is exactly 0.

**What is not finite** stays visible: the outputs that it reaches are NaN, and
with scales that are current, all those that share them. Finite values beyond
a delayed scale saturate; `shares` counts them.
"""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import (
  equations,
  narrow_products,
  products,
  quantized_array,
  scaling,
)
from paxon.quantization import recipe as recipe_lib

State = Mapping[str, jax.Array]

_LHS, _RHS, _GRADIENT = "lhs", "rhs", "gradient"
# As the left operand of the product that gives the gradient of `rhs` ...
_LHS_AGAIN = "lhs_again"
# ... and as right operands of backward products.
_RHS_AGAIN, _GRADIENT_AGAIN = "rhs_again", "gradient_again"
# Their places are folded into random keys: no two roundings share theirs.
_PARTS = (_LHS, _RHS, _GRADIENT, _LHS_AGAIN, _RHS_AGAIN, _GRADIENT_AGAIN)


def history_name(operand: str) -> str:
  """Returns the name of an operand's history in the state.

  Args:
    operand: `lhs`, `rhs` or `gradient`.
  """
  return f"{operand}_amax_history"


def initial_state(recipe: recipe_lib.Recipe) -> dict[str, jax.Array] | None:
  """Returns the state before the first step; `None` if a recipe needs none.

  It has a history, float32 zeros [H], for each operand with delayed scaling.
  """
  state = {
    history_name(name): jnp.zeros(tensor.scaling.history_length, jnp.float32)
    for name, tensor in _tensor_recipes(recipe).items()
    if tensor is not None and isinstance(tensor.scaling, recipe_lib.Delayed)
  }
  return state or None


def quantized_einsum(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  recipe: recipe_lib.Recipe,
  state: State | None = None,
  key: jax.Array | None = None,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Returns the product of two operands quantized by a recipe.

  Differentiable in `lhs`, `rhs`, and `state`, whose gradient is its next value.

  Args:
    equation: `"lhs,rhs->out"`, as of `jnp.einsum`; no letter may be in one term
      only.
    lhs: Left operand, of a floating-point dtype.
    rhs: Right operand.
    recipe: How the three products are quantized.
    state: As `initial_state` makes it. With `None`, delayed scales are current
      ones: for a product outside of training, which has no history.
    key: Random key of stochastic rounding. With `None` the forward product
      rounds to the nearest value, as evaluation has it.
    preferred_element_type: Dtype of the result; `None` is that of `lhs`.

  Raises:
    ValueError: The equation is not one of two operands; the state is not that
      of the recipe; a backward product rounds at random, and there is no key.
  """
  _check_state(recipe, state)
  product = _Product(
    equation=equations.parse(equation, lhs.ndim, rhs.ndim),
    recipe=recipe,
    lhs_dtype=lhs.dtype,
    rhs_dtype=rhs.dtype,
    out_dtype=jnp.dtype(preferred_element_type or lhs.dtype),
  )
  return _quantized(
    product, lhs, rhs, None if state is None else dict(state), key
  )


@dataclasses.dataclass(frozen=True)
class _Product:
  """What is known of a product before its values are."""

  equation: equations.Equation
  recipe: recipe_lib.Recipe
  lhs_dtype: jnp.dtype
  rhs_dtype: jnp.dtype
  out_dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(
  product: _Product,
  lhs: jax.Array,
  rhs: jax.Array,
  state: State | None,
  key: jax.Array | None,
) -> jax.Array:
  return _forward(product, lhs, rhs, state, key)[0]


def _forward(product, lhs, rhs, state, key):
  """Returns the output, and what the backward pass needs."""
  equation, recipe = product.equation, product.recipe
  histories = state or {}
  amax = {
    name: scaling.amax_of(x)
    for name, x in ((_LHS, lhs), (_RHS, rhs))
    if history_name(name) in histories
  }
  narrow = functools.partial(
    _quantize, equation=equation, histories=histories, key=key
  )
  left = narrow(_LHS, lhs, _rounded(recipe.lhs, key), amax=amax.get(_LHS))
  right = narrow(_RHS, rhs, _rounded(recipe.rhs, key), amax=amax.get(_RHS))
  with jax.named_scope(products.FORWARD):
    out = narrow_products.multiply(
      equation,
      left,
      right,
      layer_dtype=product.lhs_dtype,
      out_dtype=product.out_dtype,
    )
  kept = (
    left if _is_reused(recipe, recipe.lhs, recipe.backward_lhs) else lhs,
    right if _is_reused(recipe, recipe.rhs, recipe.backward_rhs) else rhs,
  )
  return out, (*kept, amax, state, key)


def _backward(product, residuals, gradient):
  """Returns the gradients of lhs, rhs and state; the key has none."""
  recipe = product.recipe
  lhs, rhs, amax, state, key = residuals
  if state is not None:
    amax = {**amax, _GRADIENT: scaling.amax_of(gradient)}
  if recipe.gradient is None:
    # As wide_einsum: no product of a wide gradient with narrow values.
    gradient = gradient.astype(product.lhs_dtype)
  narrow = functools.partial(_quantize, histories=state or {}, key=key)
  to_lhs = functools.partial(narrow, equation=product.equation.backward_lhs)
  to_rhs = functools.partial(narrow, equation=product.equation.backward_rhs)
  of_gradient = amax.get(_GRADIENT)
  left = to_lhs(_GRADIENT, gradient, recipe.gradient, amax=of_gradient)
  right = left
  if not _is_per_tensor(recipe.gradient):
    right = to_rhs(_GRADIENT_AGAIN, gradient, recipe.gradient)
  if not _is_reused(recipe, recipe.lhs, recipe.backward_lhs):
    lhs = to_rhs(_LHS_AGAIN, lhs, recipe.backward_lhs or recipe.lhs)
  if not _is_reused(recipe, recipe.rhs, recipe.backward_rhs):
    rhs = to_lhs(_RHS_AGAIN, rhs, recipe.backward_rhs or recipe.rhs)
  multiply = functools.partial(
    narrow_products.multiply, layer_dtype=product.lhs_dtype
  )
  with jax.named_scope(products.INPUT_GRADIENT):
    equation = product.equation.backward_lhs
    lhs_gradient = multiply(equation, left, rhs, out_dtype=product.lhs_dtype)
  with jax.named_scope(products.WEIGHT_GRADIENT):
    equation = product.equation.backward_rhs
    rhs_gradient = multiply(equation, lhs, right, out_dtype=product.rhs_dtype)
  return lhs_gradient, rhs_gradient, _next_state(state, amax), None


_quantized.defvjp(_forward, _backward)


def _quantize(
  part: str,
  x: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe | None,
  *,
  equation: equations.Equation,
  histories: State,
  key: jax.Array | None,
  amax: jax.Array | None = None,
) -> narrow_products.Operand:
  """Returns an operand of a product as its recipe has it.

  Args:
    part: One of `_PARTS`.
    x: The operand.
    tensor_recipe: Its recipe; `None` leaves it.
    equation: The product.
    histories: Of delayed scaling.
    key: Random key.
    amax: Largest magnitude of the whole operand, if known.
  """
  if tensor_recipe is None:
    return x
  is_right = part in (_RHS, _RHS_AGAIN, _GRADIENT_AGAIN)
  letters = equation.rhs if is_right else equation.lhs
  if tensor_recipe.rounding is recipe_lib.Rounding.STOCHASTIC and (
    key is not None
  ):
    key = jax.random.fold_in(key, _PARTS.index(part))
  return quantized_array.quantize(
    x,
    tensor_recipe,
    contracted=equation.contracted_axes(letters),
    amax=amax if _is_per_tensor(tensor_recipe) else None,
    history=histories.get(history_name(part)),
    key=key,
  )


def _rounded(
  tensor_recipe: recipe_lib.TensorRecipe | None, key: jax.Array | None
) -> recipe_lib.TensorRecipe | None:
  """Returns a forward recipe, which without a key rounds to the nearest."""
  if tensor_recipe is None or key is not None:
    return tensor_recipe
  return dataclasses.replace(
    tensor_recipe, rounding=recipe_lib.Rounding.NEAREST
  )


def _next_state(
  state: State | None, amax: Mapping[str, jax.Array]
) -> dict[str, jax.Array] | None:
  """Returns the histories after this call; zeros if the loss is not reached."""
  if state is None:
    return None
  reached = amax[_GRADIENT] != 0
  result = {}
  for name in (_LHS, _RHS, _GRADIENT):
    history = state.get(history_name(name))
    if history is not None:
      new = scaling.next_history(history, amax[name])
      result[history_name(name)] = jnp.where(reached, new, jnp.zeros_like(new))
  return result


def _tensor_recipes(
  recipe: recipe_lib.Recipe,
) -> dict[str, recipe_lib.TensorRecipe | None]:
  return {_LHS: recipe.lhs, _RHS: recipe.rhs, _GRADIENT: recipe.gradient}


def _check_state(recipe: recipe_lib.Recipe, state: State | None) -> None:
  if state is None:
    return
  expected = jax.tree.map(jnp.shape, initial_state(recipe) or {})
  given = jax.tree.map(jnp.shape, dict(state))
  if given != expected:
    raise ValueError(
      f"quantized_einsum's state must have the arrays {expected} of "
      f"initial_state(recipe), got {given}."
    )


def _is_per_tensor(tensor_recipe: recipe_lib.TensorRecipe | None) -> bool:
  """Whether an operand is the same in every product it takes part in."""
  return (
    tensor_recipe is None
    or tensor_recipe.granularity is recipe_lib.Granularity.TENSOR
  )


def _is_reused(
  recipe: recipe_lib.Recipe,
  forward: recipe_lib.TensorRecipe | None,
  backward: recipe_lib.TensorRecipe | None,
) -> bool:
  """Whether the backward product has the operand of the forward product."""
  if recipe.gradient is None:
    return True
  return backward is None and _is_per_tensor(forward)
