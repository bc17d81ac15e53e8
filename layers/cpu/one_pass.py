"""Attention of short sequences, in forms that run on all cores.

XLA:CPU multiplies a batch of matrices on a single core if each has fewer than
512 rows, as the heads of a short sequence have. A matmul that is fused with a
reduction runs on all cores instead, so each matmul has one here: the maximum
and the sum of the softmax, and the smallest entry of each row of the gradients
(`on_all_cores`). Key/value heads are repeated for the heads that share them: a
matrix of all their queries and its gradients would not fit into the cache of a
core. The mask is added to the logits, since a select is not fused. Two matmuls
of the backward pass are in float32, because XLA:CPU has no kernel for them in
bfloat16. Weights are computed again for the backward pass; of size T x S only
the mask is saved, one for all heads.

Letters: B batch, T queries, S keys, N heads, H head_dim.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers import precision

# For shorter sequences the plain form is faster.
MIN_LENGTH: Final = 64

# Added to a float32 logit, it leaves nothing of the logit, and no NaN.
HIDDEN: Final = -1e30


def attend(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads value_dim"],
  visible: Bool[Array, "batch 1 length kv_length"],
  *,
  scale: float | None = None,
) -> Float[Array, "batch length heads value_dim"]:
  """Returns attention; logits and softmax in float32.

  `scale` is the factor of the dot products, None is `H ** -0.5`. The output of
  a query that sees no key is a mean of all values. Only the gradient is
  defined, not the derivative in forward mode.
  """
  hidden = addend(visible, precision.at_least_float32(query.dtype))
  groups = query.shape[2] // key.shape[2]
  if groups > 1:
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
  scale = query.shape[-1] ** -0.5 if scale is None else scale
  return _attend(scale, query, key, value, hidden)


def einsum(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  dtype: DTypeLike,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Returns a matmul of the plain form of attention, with keys or values.

  `rhs`, of a cache, may have a wider dtype than `dtype`, to which `lhs` is
  rounded.
  """
  lhs = lhs.astype(dtype).astype(rhs.dtype)
  if preferred_element_type is not None:
    return precision.wide_einsum(
      equation, lhs, rhs, preferred_element_type=preferred_element_type
    )
  operands, result = equation.split("->")
  first, second = operands.split(",")
  if lhs.shape[first.index("T")] > 1:
    return jnp.einsum(equation, lhs, rhs)
  # `jnp.einsum` puts its second operand to the left of the matmul, where
  # XLA:CPU wants the contracted axis last: it would transpose all values of a
  # cache for each token.
  return jnp.einsum(f"{second},{first}->{result}", rhs, lhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  scale: float,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  hidden: jax.Array,
) -> jax.Array:
  """`attend` of N key/value heads and a mask, zero for visible keys."""
  return _forward(scale, query, key, value, hidden)[0]


def _forward(
  scale: float,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  hidden: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  weights = _weights(scale, query, key, hidden)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  out = multiply("BNTS,BSNH->BNTH", weights, value) / total
  out = out.astype(value.dtype).transpose(0, 2, 1, 3)
  return out, (query, key, value, hidden)


def _backward(
  scale: float, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  query, key, value, hidden = residuals
  gradient = precision.widen(gradient)
  # The name that counts of FLOPs know. Without the barrier the weights of the
  # forward pass would be kept.
  with jax.named_scope("rematted_computation"):
    again = jax.lax.optimization_barrier((query, key, hidden))
    weights = _weights(scale, *again)
  share = 1 / jnp.sum(weights, axis=-1, keepdims=True)
  # The small matrix is transposed, not the large one [T,S].
  columns = _to_columns(gradient) * share.swapaxes(2, 3)
  v_bar = on_all_cores(jnp.einsum("BNHT,BNTS->BNHS", columns, weights))
  rows = gradient.transpose(0, 2, 1, 3) * share
  bar = multiply("BNTH,BSNH->BNTS", rows, value)
  mean = jnp.sum(weights * bar, axis=-1, keepdims=True) * share
  bar = weights * (bar - mean)
  # Scaled here, since XLA:CPU would write the scale as a matrix [T,S] if two
  # matrices were multiplied by it.
  q_bar = on_all_cores(multiply("BNTS,BSNH->BNTH", bar, key)) * scale
  columns = precision.widen(_to_columns(query)) * scale
  k_bar = on_all_cores(jnp.einsum("BNHT,BNTS->BNHS", columns, bar))
  return (
    q_bar.transpose(0, 2, 1, 3).astype(query.dtype),
    k_bar.transpose(0, 3, 1, 2).astype(key.dtype),
    v_bar.transpose(0, 3, 1, 2).astype(value.dtype),
    None,
  )


_attend.defvjp(_forward, _backward)


def _weights(
  scale: float, query: jax.Array, key: jax.Array, hidden: jax.Array
) -> jax.Array:
  """Returns weights [B,N,T,S] relative to the largest of each query."""
  rows = query.transpose(0, 2, 1, 3)
  logits = multiply("BNTH,BSNH->BNTS", rows, key) * scale + hidden
  return jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))


def multiply(equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  """Returns `jnp.einsum` in float32, of `lhs` in the dtype of `rhs`."""
  wide = precision.at_least_float32(rhs.dtype)
  lhs = lhs.astype(rhs.dtype)
  return jnp.einsum(equation, lhs, rhs, preferred_element_type=wide)


def addend(visible: jax.Array, dtype: DTypeLike) -> jax.Array:
  """Returns a mask that is added to logits: zero for visible keys."""
  return jnp.where(visible, jnp.zeros((), dtype), jnp.asarray(HIDDEN, dtype))


def on_all_cores(x: jax.Array) -> jax.Array:
  """Returns `x`, with a reduction that XLA:CPU fuses with its matmul."""
  return jnp.maximum(x, jnp.min(x, axis=-1, keepdims=True))


def _to_columns(x: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] as columns [B,N,H,T]."""
  return x.transpose(0, 2, 3, 1)
