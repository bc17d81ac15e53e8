"""A mixture of experts in plain JAX: the baseline of the case `moe`.

Softmax over the logits of all experts, the best of each token with weights
that sum to one, and SwiGLU experts. Choices are sorted by expert and laid out
in tiles of one expert each, so no token is dropped. Loops over tiles multiply
them with their expert's matrices, forward and backward.
"""

import jax
import jax.numpy as jnp

NUM_CHOICES = 2
TILE = 128


def mixture(params, x):
  """Returns the weighted outputs of the best experts of each token [B,T,D]."""
  shape, x = x.shape, x.reshape(-1, x.shape[-1])
  experts = params["experts"]
  scores = jax.nn.softmax(jnp.dot(x, params["router"]["logits"]["kernel"]))
  weights, ids = jax.lax.top_k(scores, NUM_CHOICES)
  weights /= jnp.sum(weights, axis=-1, keepdims=True)
  token, slot, expert = _layout(ids, experts["up"].shape[0])
  tiles = x.at[token].get(mode="fill", fill_value=0)
  gate = _multiply(tiles, experts["gate"], expert)
  up = _multiply(tiles, experts["up"], expert)
  y = _multiply(jax.nn.silu(gate) * up, experts["down"], expert)
  y = y.reshape(-1, y.shape[-1])[slot]
  return jnp.sum(y * weights[..., None], axis=1).reshape(shape), ()


def _layout(ids, experts):
  """Returns the token of each row of tiles, slots of choices, experts."""
  flat = ids.reshape(-1)
  count = flat.size // TILE + experts
  sizes = jnp.bincount(flat, length=experts)
  tiles = -(-sizes // TILE)
  ends = jnp.cumsum(tiles)
  order = jnp.argsort(flat, stable=True)
  ranks = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size))
  first = jnp.cumsum(sizes) - sizes
  slot = ranks - first[flat] + (ends - tiles)[flat] * TILE
  none = ids.shape[0]
  token = (
    jnp.full(count * TILE, none)
    .at[slot]
    .set(jnp.arange(flat.size) // ids.shape[1])
  )
  expert = jnp.searchsorted(ends, jnp.arange(count), side="right")
  return token.reshape(count, TILE), slot.reshape(ids.shape), expert


@jax.custom_vjp
def _multiply(x, w, expert):
  """Returns each tile times the matrix of its expert."""

  def one(i, out):
    y = x[i] @ jax.lax.dynamic_index_in_dim(w, expert[i], keepdims=False)
    return out.at[i].set(y)

  out = jnp.zeros((*x.shape[:2], w.shape[2]), x.dtype)
  return jax.lax.fori_loop(0, _count_used(expert, w), one, out)


def _count_used(expert, w):
  return jnp.sum(expert < w.shape[0])


def _backward(saved, g):
  x, w, expert = saved

  def one(i, out):
    dx, dw = out
    e = expert[i]
    matrix = jax.lax.dynamic_index_in_dim(w, e, keepdims=False)
    return dx.at[i].set(g[i] @ matrix.T), dw.at[e].add(x[i].T @ g[i])

  start = jnp.zeros_like(x), jnp.zeros_like(w)
  return *jax.lax.fori_loop(0, _count_used(expert, w), one, start), None


_multiply.defvjp(lambda *args: (_multiply(*args), args), _backward)
