"""Attention of short sequences on CPUs, in forms that run on all cores.

XLA:CPU multiplies a batch of matrices on a single core if each has fewer than
512 rows, as the heads of a short sequence have. A matmul that is fused with a
reduction runs on all cores instead, so each matmul has one here: the maximum
and the sum of the softmax, and the smallest entry of each row of the gradients
(`on_all_cores`). The mask is added to the logits, since a select is not fused.
Two matmuls of the backward pass are in float32, because XLA:CPU has no kernel
for them in bfloat16. Weights are computed again for the backward pass; of size
T x S only the mask is saved, one for all key/value heads.

Letters: B batch, T queries, S keys, N heads, K key/value heads, G queries per
key/value head, H head_dim.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers import precision

# Added to a float32 logit, it leaves nothing of the logit, and no NaN.
HIDDEN: Final = -1e30


def attend(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads value_dim"],
  visible: Bool[Array, "batch 1 length kv_length"],
  *,
  scale: float,
) -> Float[Array, "batch length heads value_dim"]:
  """Returns attention; logits and softmax in float32.

  The output of a query that sees no key is a mean of all values. Only the
  gradient is defined, not the derivative in forward mode.
  """
  wide = precision.at_least_float32(query.dtype)
  hidden = addend(visible, wide)
  groups = query.shape[2] // key.shape[2]
  if groups > 1:
    hidden = jnp.tile(hidden, (1, 1, groups, 1))
  return _attend(scale, query, key, value, hidden)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  scale: float,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  hidden: jax.Array,
) -> jax.Array:
  """`attend` of a mask [B,1,GT,S] that is zero for visible keys."""
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
  out = multiply("BKTS,BSKH->BKTH", weights, value) / total
  out = _to_tokens(out.astype(value.dtype), query.shape[1])
  return out, (query, key, value, hidden)


def _backward(
  scale: float, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  query, key, value, hidden = residuals
  T, K = query.shape[1], key.shape[2]
  gradient = precision.widened(gradient)
  # The name that counts of FLOPs know. Without the barrier the weights of the
  # forward pass would be kept.
  with jax.named_scope("rematted_computation"):
    again = jax.lax.optimization_barrier((query, key, hidden))
    weights = _weights(scale, *again)
  share = 1 / jnp.sum(weights, axis=-1, keepdims=True)
  # The small matrix is transposed, not the large one [T,S].
  columns = _to_columns(gradient, K) * share.swapaxes(2, 3)
  v_bar = on_all_cores(jnp.einsum("BKHT,BKTS->BKHS", columns, weights))
  bar = multiply("BKTH,BSKH->BKTS", _to_rows(gradient, K) * share, value)
  mean = jnp.sum(weights * bar, axis=-1, keepdims=True) * share
  bar = weights * (bar - mean)
  # Scaled here, since XLA:CPU would write the scale as a matrix [T,S] if two
  # matrices were multiplied by it.
  q_bar = on_all_cores(multiply("BKTS,BSKH->BKTH", bar, key)) * scale
  columns = precision.widened(_to_columns(query, K)) * scale
  k_bar = on_all_cores(jnp.einsum("BKHT,BKTS->BKHS", columns, bar))
  return (
    _to_tokens(q_bar, T).astype(query.dtype),
    k_bar.transpose(0, 3, 1, 2).astype(key.dtype),
    v_bar.transpose(0, 3, 1, 2).astype(value.dtype),
    None,
  )


_attend.defvjp(_forward, _backward)


def _weights(
  scale: float, query: jax.Array, key: jax.Array, hidden: jax.Array
) -> jax.Array:
  """Returns weights [B,K,GT,S] relative to the largest of each query."""
  rows = _to_rows(query, key.shape[2])
  logits = multiply("BKTH,BSKH->BKTS", rows, key) * scale + hidden
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


def _to_rows(x: jax.Array, kv_heads: int) -> jax.Array:
  """Returns heads [B,T,N,H] as rows [B,K,GT,H]."""
  (B, T, N, H), K = x.shape, kv_heads
  if N == K:
    return x.transpose(0, 2, 1, 3)
  x = x.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  return x.reshape(B, K, -1, H)


def _to_columns(x: jax.Array, kv_heads: int) -> jax.Array:
  """Returns heads [B,T,N,H] as columns [B,K,H,GT]."""
  (B, T, N, H), K = x.shape, kv_heads
  if N == K:
    return x.transpose(0, 2, 3, 1)
  x = x.reshape(B, T, K, N // K, H).transpose(0, 2, 4, 3, 1)
  return x.reshape(B, K, H, -1)


def _to_tokens(x: jax.Array, length: int) -> jax.Array:
  """Returns rows [B,K,GT,H] as heads [B,T,N,H]."""
  B, K, rows, H = x.shape
  if rows == length:
    return x.transpose(0, 2, 1, 3)
  x = x.reshape(B, K, -1, length, H).transpose(0, 3, 1, 2, 4)
  return x.reshape(B, length, -1, H)
