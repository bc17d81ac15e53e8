"""Attention to a memory, and a decoder block with it, in plain JAX.

What one would write by hand, in one file: the pre-norm block of the decoder of
an encoder-decoder, with grouped-query attention (rotary to itself, without
positions to the memory) and a gated feed-forward. Kernels multiply in `dtype`,
softmax and norms are float32.

Letters: B batch, T length, S length of the memory, D embed, N heads, K
key/value heads, G groups (N / K), H head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def norm(x: jax.Array, w: Params) -> jax.Array:
  """Returns `x` [B,T,D] over its root mean square, times a scale."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
  return (y * w["scale"][None, None]).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] turned by the angles of their positions [B,T]."""
  speed = 1e4 ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
  angle = jnp.einsum("BT,H->BTH", positions.astype(speed.dtype), speed)
  sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = a * cos - b * sin, b * cos + a * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def gather(
  x: jax.Array, memory: jax.Array, w: Params, mask: jax.Array, positions: Any
) -> jax.Array:
  """Returns what tokens [B,T,D] gather from a memory [B,S,D].

  Args:
    x: The tokens.
    memory: What is attended to.
    w: Kernels `query`, `key`, `value` and `out`.
    mask: What each token sees, [B,T,S].
    positions: Of both, where they are the same; None rotates nothing.
  """
  q = jnp.einsum("BTD,DNH->BTNH", x, w["query"])
  k, v = (jnp.einsum("BSD,DKH->BSKH", memory, w[n]) for n in ("key", "value"))
  if positions is not None:
    q, k = rotate(q, positions), rotate(k, positions)
  (B, T, N, H), K = q.shape, k.shape[2]
  q = q.reshape(B, T, K, N // K, H)
  logits = jnp.einsum(
    "BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32
  )
  logits = jnp.where(mask[:, None, None], logits * H**-0.5, -1e30)
  shares = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
  y = jnp.einsum("BKGTS,BSKH->BTKGH", shares, v).reshape(B, T, N, H)
  return jnp.einsum("BTNH,NHD->BTD", y, w["out"])


def attention(
  w: Params,
  x: jax.Array,
  memory: jax.Array,
  segments: jax.Array,
  memory_segments: jax.Array,
  *,
  dtype: str,
) -> jax.Array:
  """Returns what tokens [B,T,D] gather from the memory of their document."""
  w = jax.tree.map(lambda p: p.astype(dtype), w)
  mask = segments[:, :, None] == memory_segments[:, None]
  return gather(x, memory, w, mask, None)


def block(
  w: Params,
  x: jax.Array,
  memory: jax.Array,
  positions: jax.Array,
  segments: jax.Array,
  memory_segments: jax.Array,
  *,
  dtype: str,
) -> jax.Array:
  """Returns the residual stream [B,T,D] after the block.

  Args:
    w: `self_attention`, `cross_attention` and `feed_forward` with their
      kernels, and the norm before each.
    x: The residual stream.
    memory: What the encoder gave, [B,S,D].
    positions: From 0 in each document, [B,T].
    segments: The number of each token's document, [B,T].
    memory_segments: The same of the memory, [B,S].
    dtype: Of the products.
  """
  w = jax.tree.map(lambda p: p.astype(dtype) if p.ndim > 1 else p, w)
  mask = positions[:, :, None] >= positions[:, None]
  mask &= segments[:, :, None] == segments[:, None]
  y = norm(x, w["self_attention_norm"])
  x += gather(y, y, w["self_attention"], mask, positions)
  mask = segments[:, :, None] == memory_segments[:, None]
  y = norm(x, w["cross_attention_norm"])
  x += gather(y, memory, w["cross_attention"], mask, None)
  y, w = norm(x, w["feed_forward_norm"]), w["feed_forward"]
  return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
