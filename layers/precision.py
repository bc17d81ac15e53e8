"""Operations that need float32 in a bfloat16 model.

Softmax, norm statistics, rotary angles and losses are computed in float32,
because they sum many small terms or subtract large ones. float64 stays float64,
so that tests can use finite differences.
"""

import functools
from typing import Any

import jax
from jax import custom_derivatives
import jax.numpy as jnp
from jax.typing import DTypeLike


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
  """Returns float32, or `dtype` if it is wider."""
  is_low = jnp.finfo(dtype).bits < 32
  return jnp.dtype(jnp.float32 if is_low else dtype)


def widen(x: jax.Array) -> jax.Array:
  """Returns `x` in at least float32."""
  return x.astype(at_least_float32(x.dtype))


def wide_einsum(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Returns `jnp.einsum` of two arrays, with low-precision gradients.

  Logits of a head and of attention need float32. The backward matmuls of
  `jnp.einsum` with `preferred_element_type` multiply a float32 gradient by a
  bfloat16 operand, which runs in float32 at half the speed or less. Here the
  gradient is first rounded to the dtype of the operands, as in every other
  matmul of a bfloat16 model; the backward matmuls accumulate in float32.

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


def rounded_einsum(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Returns `jnp.einsum`, rounded to the dtype of the operands.

  Called like `wide_einsum`, in its place as the `einsum` of a head: logits of
  bfloat16 operands are stored in bfloat16 and widened where they are read, so
  the loss moves half of the bytes. They have 8 significant bits; a logit
  between 16 and 32 is off by up to 0.06, so the largest may be a tie.
  """
  out = jnp.einsum(equation, lhs, rhs)
  return out.astype(preferred_element_type or out.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _wide(
  equation: str, wide: jnp.dtype, lhs: jax.Array, rhs: jax.Array
) -> jax.Array:
  return jnp.einsum(equation, lhs, rhs, preferred_element_type=wide)


def _tangents(
  equation: str, wide: jnp.dtype, primals: Any, tangents: Any
) -> tuple[jax.Array, Any]:
  """The product rule with low-precision matmuls.

  Its transpose, the backward pass, starts with that of `astype`, which rounds
  the gradient.
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
