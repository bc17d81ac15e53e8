"""Summaries of what quantized products lose, in training.

For each operand of a product, the shares of values that saturate and of those
that become zero, as `summaries/<layer>/einsum/<product>/lhs_clipped`, and
`lhs_flushed`, `rhs_...`, `gradient_...`.

The gradient of an output is known in the backward pass only, from which
nothing can be told. So its shares are the "gradient" of a variable beside the
histories, `gradient_shares`, which a learner overwrites with it; the forward
pass of the next step tells them.
"""

import dataclasses
import functools
from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.quantization import (
  equations,
  quantized_array,
  quantized_einsum,
  shares,
)
from paxon.quantization import recipe as recipe_lib

# Of the variable, float32 [3]: 1 (it has been seen), clipped, flushed.
RECORD: Final = "gradient_shares"
RECORD_SHAPE: Final = (3,)

# As `layers.summaries` has it, which may not be imported here.
_SUMMARIES = "summaries"


def tell_operands(
  module: nn.Module,
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  recipe: recipe_lib.Recipe,
  state: quantized_einsum.State | None,
) -> None:
  """Tells the shares of both operands of a forward product.

  Args:
    module: Who speaks.
    equation: Of the product.
    lhs: Left operand.
    rhs: Right operand.
    recipe: Of the product.
    state: Of delayed scaling.
  """
  found = shares.of_operands(equation, lhs, rhs, recipe=recipe, state=state)
  for operand, share in found.items():
    _tell(module, operand, share.clipped, share.flushed)


def watched(
  module: nn.Module,
  equation: str,
  out: jax.Array,
  record: jax.Array,
  *,
  ranks: tuple[int, int],
  recipe: recipe_lib.Recipe,
  state: quantized_einsum.State | None,
) -> jax.Array:
  """Returns `out`, whose gradient is recorded; tells the last record.

  Args:
    module: Who speaks.
    equation: Of the product.
    out: Its output.
    record: The variable `RECORD`, whose gradient is its next value.
    ranks: Of both operands.
    recipe: Of the product; its gradient is quantized.
    state: Of delayed scaling.
  """
  _tell(module, "gradient", record[1], record[2])
  assert recipe.gradient is not None
  to_lhs = equations.parse(equation, *ranks).backward_lhs
  nearest = dataclasses.replace(
    recipe.gradient, rounding=recipe_lib.Rounding.NEAREST
  )
  history = (state or {}).get(quantized_einsum.history_name("gradient"))
  return _recorded(to_lhs, nearest, out, record, history)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _recorded(
  equation: equations.Equation,
  tensor_recipe: recipe_lib.TensorRecipe,
  out: jax.Array,
  record: jax.Array,
  history: jax.Array | None,
) -> jax.Array:
  del equation, tensor_recipe, record, history
  return out


def _forward(
  equation: equations.Equation,
  tensor_recipe: recipe_lib.TensorRecipe,
  out: jax.Array,
  record: jax.Array,
  history: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  del equation, tensor_recipe, record
  return out, history


def _backward(
  equation: equations.Equation,
  tensor_recipe: recipe_lib.TensorRecipe,
  history: jax.Array | None,
  gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
  quantized = quantized_array.quantize(
    gradient,
    tensor_recipe,
    contracted=equation.contracted_axes(equation.lhs),
    history=history,
  )
  share = shares.of(gradient, quantized)
  seen = jnp.ones((), jnp.float32)
  record = jnp.stack([seen, share.clipped, share.flushed])
  # Zeros, where the loss did not reach the product: the old record stays.
  reached = jnp.any(gradient != 0)
  return gradient, jnp.where(reached, record, jnp.zeros_like(record)), None


_recorded.defvjp(_forward, _backward)


def _tell(
  module: nn.Module, operand: str, clipped: jax.Array, flushed: jax.Array
) -> None:
  if not module.is_initializing():
    for name, value in (("clipped", clipped), ("flushed", flushed)):
      told = jax.lax.stop_gradient(value)
      module.sow(_SUMMARIES, f"{operand}_{name}", told)
