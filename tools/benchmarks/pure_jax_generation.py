"""Greedy generation with a decoder-only language model in plain JAX.

Written by hand in one file: prefill of prompts of different lengths, then a
loop that appends one token per sequence and step. The caches of all layers are
one array, which a loop over the layers updates in place. Parameters are
those of `pure_jax_decoder_lm`.

Letters: B batch, P prompt length, S slots of the cache, V vocabulary, D embed,
N heads, K key/value heads, G groups (N / K), H head_dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]
einsum32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns the RMS norm of `x` [B,T,D], times `scale`."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
  return (y * scale[None, None]).astype(x.dtype)


def turn_by(positions: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
  """Returns sines and cosines [B,T,1,H/2] of the angles of positions."""
  speed = 1e4 ** -(jnp.arange(0, width, 2) / width)
  angle = jnp.einsum("BT,H->BTH", positions.astype(speed.dtype), speed)
  return jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
  """Returns heads [B,T,N,H] rotated by angles [B,T,1,H/2]."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = a * cos - b * sin, b * cos + a * sin
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def layer(x: jax.Array, w: Arrays, turn: Any, mask: Any, store: Any) -> Any:
  """Returns the residual stream after a layer, and the cache.

  Args:
    x: The residual stream [B,T,D].
    w: Kernels of the layer.
    turn: Sines and cosines of the tokens.
    mask: Keys that each token attends to, [B,T,S].
    store: `(keys, values of the tokens [B,K,T,H]) -> (all keys, all values,
      cache)`.
  """
  y = norm(x, w["attention_norm"])
  q, k, v = (jnp.einsum("BTD,DNH->BTNH", y, w[name]) for name in "qkv")
  # Heads before tokens: no matmul of a step transposes the cache.
  k, v, cache = store(*(a.swapaxes(1, 2) for a in (rotate(k, *turn), v)))
  (B, T, N, H), K = q.shape, k.shape[1]
  q = rotate(q, *turn).reshape(B, T, K, N // K, H)
  scores = einsum32("BTKGH,BKSH->BKGTS", q, k) * H**-0.5
  scores = jnp.where(mask[:, None, None], scores, -1e30)
  shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
  y = jnp.einsum("BKSH,BKGTS->BTKGH", v, shares).reshape(B, T, N, H)
  x += jnp.einsum("BTNH,NHD->BTD", y, w["out"])
  y = norm(x, w["mlp_norm"])
  return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], cache


def generate(
  params: Arrays,
  prompts: jax.Array,
  lengths: jax.Array,
  *,
  num_new: int,
  dtype: str,
) -> jax.Array:
  """Returns the ids [B, num_new] that follow prompts.

  Args:
    params: Params of `pure_jax_decoder_lm`.
    prompts: Ids [B,P], padded on the right.
    lengths: Number of ids of each prompt, [B].
    num_new: Number of ids to generate.
    dtype: Of the matmuls.
  """
  w = {n: p.astype(dtype) if p.ndim > 1 else p for n, p in params.items()}
  table, scale = w.pop("table"), w.pop("final_norm")
  L, H = w["q"].shape[0], w["q"].shape[-1]
  (B, P), D, S = prompts.shape, table.shape[1], prompts.shape[1] + num_new - 1
  at, slots = jnp.arange(P), jnp.arange(S)
  inside = at[None] < lengths[:, None]
  in_slots = jnp.pad(inside, ((0, 0), (0, S - P)))
  write = jax.lax.dynamic_update_slice

  def fill(k: jax.Array, v: jax.Array) -> Any:
    padding = ((0, 0), (0, 0), (0, S - P), (0, 0))
    return k, v, (jnp.pad(k, padding), jnp.pad(v, padding))

  def best(x: jax.Array) -> jax.Array:
    logits = einsum32("BTD,VD->BTV", norm(x, scale), table)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def step(i: jax.Array, carry: Any) -> Any:
    ids, last, cache = carry
    slot = P + i - 1
    mask = (in_slots | ((slots >= P) & (slots <= slot))[None])[:, None]
    turn = turn_by((lengths + i - 1)[:, None], H)

    def one(n: jax.Array, carry: Any) -> Any:
      x, cache = carry

      def store(k: jax.Array, v: jax.Array) -> Any:
        place = (n, 0, 0, slot, 0)
        new = tuple(
          write(old, y[None], place)
          for old, y in zip(cache, (k, v), strict=True)
        )
        return new[0][n], new[1][n], new

      return layer(x, jax.tree.map(lambda p: p[n], w), turn, mask, store)

    x = table[last] * D**0.5
    x, cache = jax.lax.fori_loop(0, L, one, (x, cache))
    last = best(x)
    return write(ids, last, (0, i)), last, cache

  turn = turn_by(jnp.broadcast_to(at[None], (B, P)), H)
  mask = (at[:, None] >= at[None])[None] & inside[:, None]
  x = table[prompts] * D**0.5
  x, cache = jax.lax.scan(lambda x, w: layer(x, w, turn, mask, fill), x, w)
  # Only the last token of a prompt needs the head.
  x = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
  last = best(x)
  ids = write(jnp.zeros((B, num_new), jnp.int32), last, (0, 0))
  return jax.lax.fori_loop(1, num_new, step, (ids, last, cache))[0]
