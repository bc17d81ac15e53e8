"""Multi-head latent attention in plain JAX, in one file.

What one would write by hand for training: each token gives a latent, of which
the keys and values of all heads are made, and one rotated key for all heads.
Kernels multiply in `dtype`, softmax and norms are float32.

Letters: B batch, T S length, D embed, N heads, R latent, H width of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def norm(x: jax.Array, w: Params) -> jax.Array:
  """Returns `x` [B,T,R] over its root mean square, times a scale."""
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


def apply(
  w: Params,
  x: jax.Array,
  positions: jax.Array,
  segments: jax.Array,
  *,
  dtype: str,
) -> jax.Array:
  """Returns what each token of `x` [B,T,D] gathers from those it sees.

  Args:
    w: Kernels `query` [D,N,H + P], `latent/kernel` [D,R + P], `key` [R,N,H],
      `value` [R,N,H], `out` [N,H,D], and `latent_norm`.
    x: The tokens.
    positions: From 0 in each document, [B,T].
    segments: The number of each token's document, [B,T].
    dtype: Of the products.
  """
  w = jax.tree.map(lambda p: p.astype(dtype) if p.ndim > 1 else p, w)
  R, _, H = w["key"].shape
  q = jnp.einsum("BTD,DNH->BTNH", x, w["query"])
  q_rotated = rotate(q[..., H:], positions)
  both = x @ w["latent"]["kernel"]
  latent = norm(both[..., :R], w["latent_norm"])
  k_rotated = rotate(both[:, :, None, R:], positions)
  k = jnp.einsum("BSR,RNH->BSNH", latent, w["key"])
  v = jnp.einsum("BSR,RNH->BSNH", latent, w["value"])
  shape = (*k.shape[:3], k_rotated.shape[-1])
  k = jnp.concatenate([k, jnp.broadcast_to(k_rotated, shape)], axis=-1)
  q = jnp.concatenate([q[..., :H], q_rotated], axis=-1)
  logits = jnp.einsum(
    "BTNH,BSNH->BNTS", q, k, preferred_element_type=jnp.float32
  )
  mask = positions[:, :, None] >= positions[:, None]
  mask &= segments[:, :, None] == segments[:, None]
  logits = jnp.where(mask[:, None], logits * q.shape[-1] ** -0.5, -1e30)
  shares = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
  y = jnp.einsum("BNTS,BSNH->BTNH", shares, v)
  return jnp.einsum("BTNH,NHD->BTD", y, w["out"])
