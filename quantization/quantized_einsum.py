"""Differentiable einsum with quantized operands and gradients.

With `Q` for "quantize, then dequantize" and E for the equation:

  out        = E(Q(lhs), Q(rhs))
  d loss/lhs = E'(Q(g), Q(rhs)),  d loss/rhs = E''(Q(lhs), Q(g))

`g` is the gradient of the output, and E', E'' are the equations of the
unquantized gradients. Gradients are straight-through: the derivative of
rounding and saturation is 1.

**Matmul dtypes.** Two fp8 or two integer operands are multiplied by one
`lax.dot_general` in low precision, with sums in float32 or int32, and scales
multiply the result. This requires scales that are constant along the contracted
dimensions (`TENSOR` and `CHANNEL`). Otherwise (one unquantized operand, fp8 and
integer, tiles) quantized values are cast to the dtype of the layer before the
matmul. int4 values are multiplied as int8.

**Scales of the backward matmuls.** With one scale per tensor, an operand is
quantized once and stored in low precision for the backward pass. Finer scales
are constant along the dimensions that a matmul contracts, which differ in the
three matmuls, so operands are quantized again from the original values.

**Delayed scaling.** For each operand with delayed scaling, `state` has the
history of the largest magnitudes of the last steps, newest first. In each step
(Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; as in Transformer
Engine and flax):

  1. scale = max(history) * 2^margin / largest value of the format
     (`initial_scale` if the history is zero)
  2. values = round(x / scale), saturated
  3. history = [max |x|, *history[:-1]]

The "gradient" of the state is its next value; a learner overwrites the state
with it. The state contains no scales, so the elementwise maximum of the
histories of several calls (microbatches, replicas) equals the history of one
call on all of their values. If the gradient of the output is zero, the loss
does not depend on the call, and the gradient of the state is exactly zero.

**Non-finite values** stay visible: the outputs that depend on them are NaN and,
with current scaling, all outputs that share their scale. Finite values beyond a
delayed scale saturate; `monitor` reports their fraction.
"""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import (
  equations,
  quantized_array,
  quantized_matmul,
  scaling,
  scopes,
)
from paxon.quantization import recipe as recipe_lib

State = Mapping[str, jax.Array]

_LHS, _RHS, _GRADIENT = "lhs", "rhs", "gradient"
# Operands that are quantized again for a backward matmul: `lhs` as its left
# operand, the others as its right operand.
_LHS_AGAIN = "lhs_again"
_RHS_AGAIN, _GRADIENT_AGAIN = "rhs_again", "gradient_again"
# Indices are folded into random keys, so each rounding has a different key.
_PARTS = (_LHS, _RHS, _GRADIENT, _LHS_AGAIN, _RHS_AGAIN, _GRADIENT_AGAIN)


def history_name(operand: str) -> str:
  """Returns the name of an operand's history in the state.

  Args:
    operand: `lhs`, `rhs` or `gradient`.
  """
  return f"{operand}_amax_history"


def initial_state(recipe: recipe_lib.Recipe) -> dict[str, jax.Array] | None:
  """Returns the state before the first step; `None` without delayed scaling.

  The state has a history, float32 zeros [H], per operand with delayed scaling.
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
  """Returns the einsum of two operands that are quantized by a recipe.

  Differentiable in `lhs`, `rhs`, and `state`, whose gradient is its next value.

  Args:
    equation: `"lhs,rhs->out"`, as in `jnp.einsum`; each letter must be in at
      least two terms.
    lhs: Left operand, of a floating-point dtype.
    rhs: Right operand, of a floating-point dtype.
    recipe: How the three matmuls are quantized.
    state: The state, initially from `initial_state`. `None` replaces delayed by
      current scaling, for matmuls outside of training.
    key: Random key for stochastic rounding. With `None` the forward matmul
      rounds to nearest.
    preferred_element_type: Dtype of the result; `None` is that of `lhs`.

  Raises:
    ValueError: The equation does not have two operands, the state does not
      match the recipe, or a backward matmul rounds stochastically without a
      key.
  """
  _check_state(recipe, state)
  matmul = _Matmul(
    equation=equations.parse(equation, lhs.ndim, rhs.ndim),
    recipe=recipe,
    lhs_dtype=lhs.dtype,
    rhs_dtype=rhs.dtype,
    out_dtype=jnp.dtype(preferred_element_type or lhs.dtype),
  )
  return _contract_quantized(
    matmul, lhs, rhs, None if state is None else dict(state), key
  )


@dataclasses.dataclass(frozen=True)
class _Matmul:
  """The static properties of a matmul."""

  equation: equations.Equation
  recipe: recipe_lib.Recipe
  lhs_dtype: jnp.dtype
  rhs_dtype: jnp.dtype
  out_dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract_quantized(
  matmul: _Matmul,
  lhs: jax.Array,
  rhs: jax.Array,
  state: State | None,
  key: jax.Array | None,
) -> jax.Array:
  return _forward(matmul, lhs, rhs, state, key)[0]


def _forward(matmul, lhs, rhs, state, key):
  """Returns the output and the residuals of the backward pass."""
  equation, recipe = matmul.equation, matmul.recipe
  histories = state or {}
  amax = {
    name: scaling.find_amax(x)
    for name, x in ((_LHS, lhs), (_RHS, rhs))
    if history_name(name) in histories
  }
  narrow = functools.partial(
    _quantize, equation=equation, histories=histories, key=key
  )
  left = narrow(
    _LHS, lhs, _drop_stochastic_rounding(recipe.lhs, key), amax=amax.get(_LHS)
  )
  right = narrow(
    _RHS, rhs, _drop_stochastic_rounding(recipe.rhs, key), amax=amax.get(_RHS)
  )
  with jax.named_scope(scopes.FORWARD):
    out = quantized_matmul.multiply(
      equation,
      left,
      right,
      layer_dtype=matmul.lhs_dtype,
      out_dtype=matmul.out_dtype,
    )
  kept = (
    left if _is_reused(recipe, recipe.lhs, recipe.backward_lhs) else lhs,
    right if _is_reused(recipe, recipe.rhs, recipe.backward_rhs) else rhs,
  )
  return out, (*kept, amax, state, key)


def _backward(matmul, residuals, gradient):
  """Returns the gradients of lhs, rhs and state; the key has none."""
  recipe = matmul.recipe
  lhs, rhs, amax, state, key = residuals
  if state is not None:
    amax = {**amax, _GRADIENT: scaling.find_amax(gradient)}
  if recipe.gradient is None:
    # The matmul runs in the dtype of the layer.
    gradient = gradient.astype(matmul.lhs_dtype)
  narrow = functools.partial(_quantize, histories=state or {}, key=key)
  to_lhs = functools.partial(narrow, equation=matmul.equation.backward_lhs)
  to_rhs = functools.partial(narrow, equation=matmul.equation.backward_rhs)
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
    quantized_matmul.multiply, layer_dtype=matmul.lhs_dtype
  )
  with jax.named_scope(scopes.INPUT_GRADIENT):
    equation = matmul.equation.backward_lhs
    lhs_gradient = multiply(equation, left, rhs, out_dtype=matmul.lhs_dtype)
  with jax.named_scope(scopes.WEIGHT_GRADIENT):
    equation = matmul.equation.backward_rhs
    rhs_gradient = multiply(equation, lhs, right, out_dtype=matmul.rhs_dtype)
  return lhs_gradient, rhs_gradient, _next_state(state, amax), None


_contract_quantized.defvjp(_forward, _backward)


def _quantize(
  part: str,
  x: jax.Array,
  tensor_recipe: recipe_lib.TensorRecipe | None,
  *,
  equation: equations.Equation,
  histories: State,
  key: jax.Array | None,
  amax: jax.Array | None = None,
) -> quantized_matmul.Operand:
  """Quantizes an operand of a matmul; returns `x` without a recipe.

  `part` is one of `_PARTS`, `amax` the largest magnitude of the whole operand.
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


def _drop_stochastic_rounding(
  tensor_recipe: recipe_lib.TensorRecipe | None, key: jax.Array | None
) -> recipe_lib.TensorRecipe | None:
  """Returns the recipe, with rounding to nearest if there is no key."""
  if tensor_recipe is None or key is not None:
    return tensor_recipe
  return dataclasses.replace(
    tensor_recipe, rounding=recipe_lib.Rounding.NEAREST
  )


def _next_state(
  state: State | None, amax: Mapping[str, jax.Array]
) -> dict[str, jax.Array] | None:
  """Returns the next histories; zeros if the gradient of the output is zero."""
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
  """Returns whether an operand is quantized equally in all its matmuls."""
  return (
    tensor_recipe is None
    or tensor_recipe.granularity is recipe_lib.Granularity.TENSOR
  )


def _is_reused(
  recipe: recipe_lib.Recipe,
  forward: recipe_lib.TensorRecipe | None,
  backward: recipe_lib.TensorRecipe | None,
) -> bool:
  """Returns whether the backward matmul reuses the operand of the forward."""
  if recipe.gradient is None:
    return True
  return backward is None and _is_per_tensor(forward)
