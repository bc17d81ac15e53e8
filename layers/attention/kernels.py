"""Attention kernels: functions with one signature, interchangeable as parts.

  out[t, n] = sum_s softmax_s(query[t, n] . key[s, k] / sqrt(H)) value[s, k]

over the keys `s` that the mask shows to `t`, with `k = n // (N / K)`: each
group of N / K neighbouring query heads shares a key/value head. A query that
sees no key (padding) gives zeros, in every kernel.

Einsum letters: B batch, T queries, S keys, N heads, K key/value heads,
G groups (N / K), H head_dim.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paxon.layers import precision, soft_cap, wide_einsum
from paxon.layers.attention import mask as attention_mask

# `(query, key, value, mask, *, logit_cap=None, bias=None)`. A keyword comes
# only where it is asked for.
Kernel = Callable[..., jax.Array]


def plain(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads head_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Float[Array, "batch heads length kv_length"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
  """Attention by two contractions; logits and softmax in float32.

  Args:
    query: Queries.
    key: Keys.
    value: Values.
    mask: Which keys each query sees.
    logit_cap: Bends the scaled logits into `(-logit_cap, logit_cap)`.
    bias: Added to the scaled logits, before they are bent.

  Returns:
    The weighted values.

  Raises:
    ValueError: The heads do not divide into groups.
  """
  groups = _groups(query, key)
  B, T, N, H = query.shape
  visible = mask.to_array()
  query = query.reshape(B, T, N // groups, groups, H)
  logits = wide_einsum.wide_einsum(
    "BTKGH,BSKH->BKGTS",
    query,
    key,
    # float32 because the softmax takes differences of logits.
    preferred_element_type=precision.at_least_float32(query.dtype),
  )
  logits *= H**-0.5
  if bias is not None:
    logits += bias.reshape(logits.shape).astype(logits.dtype)
  if logit_cap is not None:
    logits = soft_cap.soft_cap(logits, logit_cap)
  # Finite, because a row of -inf would make its softmax NaN.
  lowest = float(jnp.finfo(jnp.float32).min)
  logits = jnp.where(visible[:, :, None], logits, lowest)
  weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
  out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, value).reshape(B, T, N, H)
  return _zero_unless_seen(out, visible)


def fused(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads head_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Float[Array, "batch heads length kv_length"] | None = None,
  implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
  """Attention by `jax.nn.dot_product_attention`.

  Its softmax is in float32, also for float64 inputs.

  Args:
    query: Queries.
    key: Keys.
    value: Values.
    mask: Which keys each query sees.
    logit_cap: Refused: JAX's function has no such setting.
    bias: Added to the scaled logits.
    implementation: Passed on to JAX: "cudnn" asks for the fused kernel of
      NVIDIA GPUs (bfloat16 or float16 only), None leaves the choice to JAX.

  Returns:
    The weighted values.

  Raises:
    ValueError: The heads do not divide into groups, or a cap is asked for.
  """
  if logit_cap is not None:
    raise ValueError(
      f"kernels.fused cannot cap logits (logit_cap is {logit_cap}): "
      "jax.nn.dot_product_attention has no cap; use kernels.plain."
    )
  _groups(query, key)
  visible = mask.to_array()
  # JAX's own code mixes bfloat16 with float32, an error under strict promotion.
  with jax.numpy_dtype_promotion("standard"):
    out = jax.nn.dot_product_attention(
      query, key, value, bias, mask=visible, implementation=implementation
    )
  return _zero_unless_seen(out, visible)


def _zero_unless_seen(
  out: Float[Array, "batch length heads head_dim"],
  visible: Bool[Array, "batch 1 length kv_length"],
) -> jax.Array:
  """Returns `out` with zeros for queries that see no key.

  Their softmax is an average of all values. Zeroing the output and not the
  weights saves passes over the largest tensor of attention, [B,N,T,S].
  """
  sees_any = jnp.any(visible, axis=-1)[:, 0, :, None, None]
  return jnp.where(sees_any, out, jnp.zeros((), out.dtype))


def _groups(query: jax.Array, key: jax.Array) -> int:
  heads, kv_heads = query.shape[2], key.shape[2]
  if heads % kv_heads:
    raise ValueError(
      f"The heads of queries ({heads}) must be a multiple of those of keys "
      f"({kv_heads})."
    )
  return heads // kv_heads
