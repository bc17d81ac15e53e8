"""The forward pass of `pure_jax_decoder_lm`, tuned by hand for CPUs.

The same function, in one file: layers are unrolled, heads come before tokens,
attention computes blocks of queries with the keys up to their end, and all
tokens of a batch are one matrix in matmuls, whose sums are rounded once. Every
sequence is in order: a key that comes later is of a later position, or of
another segment.

Letters: batch B, length T, keys S, embed D, heads N, key/value heads K, groups
G (N / K), queries of all groups of a block R, head_dim H.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]
BLOCK = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies into float32; gradients are rounded to the dtype of inputs."""
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _backward(equation: str, xy: Any, gradient: jax.Array) -> Any:
  (x, y), (left, out) = xy, equation.split("->")
  a, b = left.split(",")
  gradient = gradient.astype(x.dtype)
  dx = multiply(f"{out},{b}->{a}", gradient, y)
  dy = multiply(f"{a},{out}->{b}", x, gradient)
  return dx.astype(x.dtype), dy.astype(y.dtype)


multiply.defvjp(lambda e, x, y: (multiply(e, x, y), (x, y)), _backward)


def project(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies tokens [B,T,...] with the first axes of a kernel."""
  tokens = x.reshape(x.shape[0] * x.shape[1], -1)
  y = multiply("MD,DF->MF", tokens, w.reshape(tokens.shape[1], -1))
  return y.astype(x.dtype).reshape(*x.shape[:2], *w.shape[x.ndim - 2 :])


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns the RMS norm of `x` [B,T,D], times `scale`."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
  return (y * scale[None, None]).astype(x.dtype)


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] rotated by angles [B,T,1,H/2], as [B,N,T,H]."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype).swapaxes(1, 2)


def attention(x: jax.Array, w: Arrays, segments: jax.Array, turn: Any) -> Any:
  """Returns the attention output of `x` [B,T,D]."""
  q, k, v = (project(x, w[name]) for name in "qkv")
  (B, T, N, H), K = q.shape, k.shape[2]
  q = rotate(q, *turn).reshape(B, K, N // K, T, H) * H**-0.5
  k, v = rotate(k, *turn), v.swapaxes(1, 2)
  outputs = []
  for begin in range(0, T, BLOCK):
    end = min(begin + BLOCK, T)
    mask = segments[:, begin:end, None] == segments[:, None, :end]
    order = jnp.arange(begin, end)[:, None] >= jnp.arange(end)[None]
    mask = jnp.tile((mask & order[None])[:, None], (1, 1, N // K, 1))
    rows = q[..., begin:end, :].reshape(B, K, -1, H)
    scores = multiply("BKRH,BKSH->BKRS", rows, k[:, :, :end])
    scores = jnp.where(mask, scores, -1e30)
    shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    y = multiply("BKRS,BKSH->BKRH", shares, v[:, :, :end]).astype(x.dtype)
    outputs.append(y.reshape(B, N, end - begin, H))
  y = jnp.concatenate(outputs, axis=2).swapaxes(1, 2)
  return project(y, w["out"])


def forward(params: Arrays, batch: Arrays, c: Any) -> jax.Array:
  """Returns logits [B,T,V], float32; `c` is a `pure_jax_decoder_lm.Config`."""
  speed = 1e4 ** -(jnp.arange(0, c.head_dim, 2) / c.head_dim)
  angle = jnp.einsum("BT,H->BTH", batch["positions"].astype(speed.dtype), speed)
  turn = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
  w = {n: p.astype(c.dtype) if p.ndim > 2 else p for n, p in params.items()}
  table, scale = w.pop("table").astype(c.dtype), w.pop("final_norm")
  x = table[batch["inputs"]] * c.embed_dim**0.5
  for i in range(c.num_layers):
    one = {name: p[i] for name, p in w.items()}
    y = norm(x, one["attention_norm"])
    x += attention(y, one, batch["segment_ids"], turn)
    y = norm(x, one["mlp_norm"])
    y = jax.nn.silu(project(y, one["gate"])) * project(y, one["up"])
    x += project(y, one["down"])
  x = norm(x, scale)
  tokens = x.reshape(-1, x.shape[-1])
  logits = multiply("MD,VD->MV", tokens, table)
  return logits.reshape(*x.shape[:2], -1)
