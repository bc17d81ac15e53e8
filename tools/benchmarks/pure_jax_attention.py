"""Self-attention layers in plain JAX, in one file.

What one would write by hand for multi-head, grouped-query and multi-query
attention: rotary positions, packed rows, and as asked for a window, a cap on
logits, biases, norms of queries and keys, ALiBi. Kernels multiply in `dtype`,
softmax and norms are float32.

Letters: B batch, T S length, D embed, N heads, K key/value heads, G groups
(N / K), H head_dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes of the layer, and what it has."""

  num_heads: int
  num_kv_heads: int
  head_dim: int
  dtype: str = "float32"
  causal: bool = True
  rotary: bool = True
  window: int | None = None
  logit_cap: float | None = None
  alibi: bool = False


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] turned by the angles of their positions [B,T]."""
  speed = 1e4 ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
  angle = jnp.einsum("BT,H->BTH", positions.astype(speed.dtype), speed)
  sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = a * cos - b * sin, b * cos + a * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] over their root mean square, times `scale`."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
  return (y * scale[None, None, None]).astype(x.dtype)


def apply(
  w: Params,
  x: jax.Array,
  positions: jax.Array,
  segments: jax.Array,
  *,
  c: Config,
) -> jax.Array:
  """Returns what each token of `x` [B,T,D] gathers from those it sees.

  Args:
    w: Kernels `query` [D,N,H], `key` and `value` [D,K,H], `out` [N,H,D], or
      `qkv` [D,3,N,H] for the first three; biases as `query_bias` or
      `qkv_bias`; `query_norm` and `key_norm` as `{"scale": [H]}`.
    x: The tokens.
    positions: From 0 in each document, [B,T].
    segments: The number of each token's document, [B,T].
    c: What the layer has.
  """
  w = jax.tree.map(lambda p: p.astype(c.dtype) if p.ndim > 1 else p, w)
  K, H = c.num_kv_heads, c.head_dim
  if "qkv" in w:
    qkv = jnp.einsum("BTD,DPNH->BTPNH", x, w["qkv"])
    qkv += w["qkv_bias"][None, None]
    q, k, v = (qkv[:, :, i] for i in range(3))
  else:
    q, k, v = (
      jnp.einsum("BTD,DNH->BTNH", x, w[n]) for n in ("query", "key", "value")
    )
    if "query_bias" in w:
      q, k, v = (
        y + w[n][None, None]
        for y, n in ((q, "query_bias"), (k, "key_bias"), (v, "value_bias"))
      )
  if "query_norm" in w:
    q, k = norm(q, w["query_norm"]["scale"]), norm(k, w["key_norm"]["scale"])
  if c.rotary:
    q, k = rotate(q, positions), rotate(k, positions)
  B, T, N, _ = q.shape
  # One query head for each key/value head is no group.
  grouped = K < N
  q = q.reshape(B, T, K, N // K, H) if grouped else q
  logits = jnp.einsum(
    "BTKGH,BSKH->BKGTS" if grouped else "BTKH,BSKH->BKTS",
    q,
    k,
    preferred_element_type=jnp.float32,
  )
  heads = (K, N // K) if grouped else (N,)
  inner = tuple(range(1, 1 + len(heads)))
  logits *= H**-0.5
  distance = positions[:, :, None] - positions[:, None, :]
  if c.alibi:
    slopes = 2 ** (-8 * jnp.arange(1, N + 1) / N)
    far = jnp.expand_dims(jnp.abs(distance).astype(jnp.float32), inner)
    logits -= slopes.reshape(1, *heads, 1, 1) * far
  if c.logit_cap is not None:
    logits = c.logit_cap * jnp.tanh(logits / c.logit_cap)
  mask = segments[:, :, None] == segments[:, None, :]
  if c.causal:
    mask &= distance >= 0
  if c.window is not None:
    mask &= jnp.abs(distance) < c.window
  logits = jnp.where(jnp.expand_dims(mask, inner), logits, -1e30)
  shares = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
  if grouped:
    y = jnp.einsum("BKGTS,BSKH->BTKGH", shares, v).reshape(B, T, N, H)
  else:
    y = jnp.einsum("BKTS,BSKH->BTKH", shares, v)
  y = jnp.einsum("BTNH,NHD->BTD", y, w["out"])
  if "out_bias" in w:
    y += w["out_bias"].astype(y.dtype)[None, None]
  return y
