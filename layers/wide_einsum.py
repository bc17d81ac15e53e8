"""A product of narrow arrays with a float32 result and narrow derivatives.

Logits of a head and of attention are wanted in float32, although what is
multiplied is bfloat16. `jnp.einsum` with `preferred_element_type` gives that,
but its two backward products then multiply a float32 gradient with a bfloat16
operand, for which no matrix unit has an instruction: they run in float32, at
half of the speed or less. Here the gradient is first rounded to the dtype of
the operands, as every other product of a bfloat16 model has it.
"""

import functools
from typing import Any

import jax
from jax import custom_derivatives
import jax.numpy as jnp
from jax.typing import DTypeLike


def wide_einsum(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Returns `jnp.einsum` of two arrays of one dtype.

  Args:
    equation: As of `jnp.einsum`.
    lhs: One operand.
    rhs: The other one.
    preferred_element_type: Dtype of the result; `None` is that of the operands.
      Where it is wider than theirs, gradients are rounded to theirs before
      they are multiplied; the sums inside of products stay wide.

  Raises:
    ValueError: The operands differ in dtype.
  """
  if lhs.dtype != rhs.dtype:
    raise ValueError(
      f"wide_einsum needs operands of one dtype, got {lhs.dtype} and "
      f"{rhs.dtype}."
    )
  wide = jnp.dtype(preferred_element_type or lhs.dtype)
  if wide == lhs.dtype:
    return jnp.einsum(equation, lhs, rhs)
  return _wide(equation, wide, lhs, rhs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _wide(
  equation: str, wide: jnp.dtype, lhs: jax.Array, rhs: jax.Array
) -> jax.Array:
  return jnp.einsum(equation, lhs, rhs, preferred_element_type=wide)


def _tangents(
  equation: str, wide: jnp.dtype, primals: Any, tangents: Any
) -> tuple[jax.Array, Any]:
  """The product rule, by narrow products.

  Its transposition, which is the backward pass, begins with that of `astype`:
  it rounds the gradient.
  """
  lhs, rhs = primals
  terms = [
    jnp.einsum(equation, *pair).astype(wide)
    for pair in ((tangents[0], rhs), (lhs, tangents[1]))
    if not any(isinstance(x, custom_derivatives.SymbolicZero) for x in pair)
  ]
  out = _wide(equation, wide, lhs, rhs)
  return out, sum(terms[1:], start=terms[0])


_wide.defjvp(_tangents, symbolic_zeros=True)
