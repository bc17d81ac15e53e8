"""Summaries of values that quantization clips or flushes to zero.

For each operand of a matmul, the fractions of values that saturate and that
become zero are summaries: `summaries/<layer>/einsum/<matmul>/lhs_clipped`,
`lhs_flushed`, `rhs_...`, `gradient_...`.

The backward pass cannot write summaries. The fractions of the gradient are
therefore the "gradient" of the variable `gradient_shares`, which a learner
overwrites with it, and the forward pass of the next step reports them.
"""

from collections.abc import Mapping
import dataclasses
import functools
import operator
from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.quantization import equations, quantized_array, quantized_einsum
from paxon.quantization import recipe as recipe_lib

# Variable, float32 [3]: 1 once it is recorded, clipped, flushed.
RECORD: Final = "gradient_shares"
RECORD_SHAPE: Final = (3,)

# As in `layers.summaries`, which may not be imported here.
_SUMMARIES = "summaries"


def sow_operands(
  module: nn.Module,
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  recipe: recipe_lib.Recipe,
  state: quantized_einsum.State | None,
) -> None:
  """Writes the summaries of both operands of a forward matmul."""
  found = measure_operands(equation, lhs, rhs, recipe=recipe, state=state)
  for operand, share in found.items():
    _sow(module, operand, share.clipped, share.flushed)


def record_gradient(
  module: nn.Module,
  equation: str,
  out: jax.Array,
  record: jax.Array,
  *,
  ranks: tuple[int, int],
  recipe: recipe_lib.Recipe,
  state: quantized_einsum.State | None,
) -> jax.Array:
  """Returns `out` and records its gradient; writes the previous record.

  The gradient of `record`, the variable `RECORD`, is its next value.
  """
  _sow(module, "gradient", record[1], record[2])
  assert recipe.gradient is not None
  to_lhs = equations.parse(equation, *ranks).backward_lhs
  nearest = dataclasses.replace(
    recipe.gradient, rounding=recipe_lib.Rounding.NEAREST
  )
  history = (state or {}).get(quantized_einsum.history_name("gradient"))
  return _record(to_lhs, nearest, out, record, history)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _record(
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
  share = measure(gradient, quantized)
  seen = jnp.ones((), jnp.float32)
  record = jnp.stack([seen, share.clipped, share.flushed])
  # Zero if the loss does not depend on the matmul, which keeps the old record.
  reached = jnp.any(gradient != 0)
  return gradient, jnp.where(reached, record, jnp.zeros_like(record)), None


_record.defvjp(_forward, _backward)


def _sow(
  module: nn.Module, operand: str, clipped: jax.Array, flushed: jax.Array
) -> None:
  if not module.is_initializing():
    for name, value in (("clipped", clipped), ("flushed", flushed)):
      fixed = jax.lax.stop_gradient(value)
      module.sow(_SUMMARIES, f"{operand}_{name}", fixed)


# Larger than the rounding error of a scaled value.
_ROUNDED = 1 + 2.0**-20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shares:
  """Fractions of the values of a tensor, each float32 [] in [0, 1].

  Attributes:
    clipped: Finite values beyond the largest value of the format.
    flushed: Nonzero values that became zero.
    not_finite: Values that were infinite or NaN.
  """

  clipped: jax.Array
  flushed: jax.Array
  not_finite: jax.Array


def measure(x: jax.Array, quantized: quantized_array.QuantizedArray) -> Shares:
  """Returns the fractions of clipped, flushed and non-finite values."""
  x = x.astype(jnp.float32)
  # Scales are rounded; the largest value itself must not count as clipped.
  limit = quantized.format.largest * quantized.scale * _ROUNDED
  beyond = quantized_array.apply_by_group(operator.gt, jnp.abs(x), limit)
  finite = jnp.isfinite(x)
  values = quantized.values.astype(jnp.float32)
  return Shares(
    clipped=jnp.mean(beyond & finite, dtype=jnp.float32),
    flushed=jnp.mean((x != 0) & finite & (values == 0), dtype=jnp.float32),
    not_finite=jnp.mean(~finite, dtype=jnp.float32),
  )


def measure_operands(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  recipe: recipe_lib.Recipe,
  state: quantized_einsum.State | None = None,
) -> Mapping[str, Shares]:
  """Returns the fractions of the operands of a forward matmul by name.

  The arguments are those of `quantized_einsum`; values are rounded to nearest.
  A compiler removes the computations that both have in common.
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
      result[name] = measure(x, quantized)
  return result
