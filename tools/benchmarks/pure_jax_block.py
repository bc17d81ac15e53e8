"""Transformer blocks in plain JAX, in one file.

What one would write by hand: rotary grouped-query attention and a gated
feed-forward, with norms before them ("pre"), after the residuals ("post"), on
both sides ("sandwich"), or side by side after one norm ("parallel"). Kernels
multiply in `dtype`, softmax and norms are float32.

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
  """Sizes of the layer, and the order of its parts."""

  order: str
  dtype: str = "float32"


def norm(x: jax.Array, w: Params) -> jax.Array:
  """Returns `x` [B,T,D] over its root mean square, times a scale."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
  return (y * w["scale"][None, None]).astype(x.dtype)


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] turned by angles [B,T,1,H/2]."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = a * cos - b * sin, b * cos + a * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(
  x: jax.Array, w: Params, positions: jax.Array, segments: jax.Array
) -> jax.Array:
  """Returns what each token of `x` [B,T,D] gathers from those it sees."""
  q, k, v = (
    jnp.einsum("BTD,DNH->BTNH", x, w[n]) for n in ("query", "key", "value")
  )
  (B, T, N, H), K = q.shape, k.shape[2]
  speed = 1e4 ** -(jnp.arange(0, H, 2) / H)
  angle = jnp.einsum("BT,H->BTH", positions.astype(speed.dtype), speed)
  turn = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
  q, k = rotate(q, *turn).reshape(B, T, K, N // K, H), rotate(k, *turn)
  logits = jnp.einsum(
    "BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32
  )
  mask = positions[:, :, None] >= positions[:, None, :]
  mask &= segments[:, :, None] == segments[:, None, :]
  logits = jnp.where(mask[:, None, None], logits * H**-0.5, -1e30)
  shares = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
  y = jnp.einsum("BKGTS,BSKH->BTKGH", shares, v).reshape(B, T, N, H)
  return jnp.einsum("BTNH,NHD->BTD", y, w["out"])


def feed_forward(x: jax.Array, w: Params) -> jax.Array:
  """Returns the gated feed-forward layer of `x` [B,T,D]."""
  return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def apply(
  w: Params,
  x: jax.Array,
  positions: jax.Array,
  segments: jax.Array,
  *,
  c: Config,
) -> jax.Array:
  """Returns the residual stream `x` [B,T,D] after the block.

  Args:
    w: `attention` and `feed_forward` with their kernels, and the norms.
    x: The residual stream.
    positions: From 0 in each document, [B,T].
    segments: The number of each token's document, [B,T].
    c: The order of the parts.
  """
  w = jax.tree.map(lambda p: p.astype(c.dtype) if p.ndim > 1 else p, w)

  def attend(y: jax.Array) -> jax.Array:
    return attention(y, w["attention"], positions, segments)

  if c.order == "pre":
    x += attend(norm(x, w["attention_norm"]))
    return x + feed_forward(norm(x, w["feed_forward_norm"]), w["feed_forward"])
  if c.order == "post":
    x = norm(x + attend(x), w["attention_norm"])
    x += feed_forward(x, w["feed_forward"])
    return norm(x, w["feed_forward_norm"])
  if c.order == "sandwich":
    y = attend(norm(x, w["attention_norm"]))
    x += norm(y, w["post_attention_norm"])
    y = feed_forward(norm(x, w["feed_forward_norm"]), w["feed_forward"])
    return x + norm(y, w["post_feed_forward_norm"])
  if c.order == "parallel":
    y = norm(x, w["norm"])
    return x + attend(y) + feed_forward(y, w["feed_forward"])
  raise ValueError(f"There is no order {c.order!r}.")
