"""State-space duality (SSD): a linear recurrence computed in chunks.

  state[t] = exp(log_decay[t]) * state[t - 1] + value[t] key[t]^T
  y[t] = state[t] query[t]

Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section 6. Inside of a chunk
the outputs are those of masked linear attention, a few matmuls; only the states
at the ends of chunks are computed one after another. One token takes a step of
the recurrence.

The paper's x, B, C and A are `value`, `key`, `query` and `log_decay` here, each
already multiplied by the time step where the recurrence needs it.

Letters: B batch, T length, G groups, R heads of a group, N = G R heads,
P head_dim, S state_dim, C chunks, Q and K tokens of a chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision


def scan(
  value: Float[Array, "batch length heads head_dim"],
  log_decay: Float[Array, "batch length heads"],
  key: Float[Array, "batch length groups state"],
  query: Float[Array, "batch length groups state"],
  runs: Int[Array, "batch length"],
  state: Float[Array, "batch heads head_dim state"] | None = None,
  *,
  chunk_length: int,
) -> tuple[
  Float[Array, "batch length heads head_dim"],
  Float[Array, "batch heads head_dim state"],
]:
  """Returns the outputs, and the state after the last token.

  Both are in at least float32, as are all decays; matmuls read operands in the
  dtype of `value`.

  Args:
    value: Inputs; zero for padding.
    log_decay: At most 0, in at least float32; zero for padding.
    key: Maps inputs to the state; heads of a group share it.
    query: Maps the state to outputs.
    runs: Number of resets so far: the state of a token with another number than
      the token before starts from zeros. See `decoding_state.Tokens`.
    state: State before the first token, which run 0 continues; `None` is zeros.
    chunk_length: Tokens of a chunk, which any number gives the same result up
      to rounding.
  """
  batch, length, heads, head_dim = value.shape
  groups, state_dim = key.shape[2:]
  wide = precision.at_least_float32(value.dtype)
  split = (groups, heads // groups)
  value = value.reshape(batch, length, *split, head_dim)
  log_decay = log_decay.astype(wide).reshape(batch, length, *split)
  if state is None:
    state = jnp.zeros((batch, heads, head_dim, state_dim), wide)
  state = state.astype(wide).reshape(batch, *split, head_dim, state_dim)
  run = _step if length == 1 else _chunks
  y, state = run(value, log_decay, key, query, runs, state, chunk_length)
  y = y.reshape(batch, length, heads, head_dim)
  return y, state.reshape(batch, heads, head_dim, state_dim)


def _step(
  value: jax.Array,
  log_decay: jax.Array,
  key: jax.Array,
  query: jax.Array,
  runs: jax.Array,
  state: jax.Array,
  chunk_length: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns the output [B,1,G,R,P] of one token, and the state after it."""
  del chunk_length
  value, key, query = (x[:, 0].astype(state.dtype) for x in (value, key, query))
  kept = jnp.where((runs == 0)[..., None], jnp.exp(log_decay[:, 0]), 0)
  added = value[..., None] * key[:, :, None, None]
  state = state * kept[..., None, None] + added
  return jnp.einsum("BGRPS,BGS->BGRP", state, query)[:, None], state


def _chunks(
  value: jax.Array,
  log_decay: jax.Array,
  key: jax.Array,
  query: jax.Array,
  runs: jax.Array,
  state: jax.Array,
  chunk_length: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs [B,T,G,R,P], and the state after the last token."""
  length, dtype, wide = value.shape[1], value.dtype, state.dtype
  size = min(chunk_length, length)
  value, log_decay, key, query = (
    _to_chunks(x, size) for x in (value, log_decay, key, query)
  )
  runs = _to_chunks(runs, size, mode="edge")
  # The run before each chunk, that before the call is number 0.
  last = runs[:, :, -1]
  before = jnp.pad(last[:, :-1], [(0, 0), (1, 0)])
  total = jnp.cumsum(log_decay, axis=2)

  # Outputs of the inputs of each chunk.
  scores = jnp.einsum(
    "BCQGS,BCKGS->BCGQK", query, key, preferred_element_type=wide
  )
  causal = jnp.tril(jnp.ones((size, size), bool))
  sees = (runs[..., None] == runs[:, :, None]) & causal[None, None]
  heads_first = jnp.moveaxis(total, 2, -1)
  gap = heads_first[..., None] - heads_first[..., None, :]
  decay = jnp.exp(jnp.where(sees[:, :, None, None], gap, -jnp.inf))
  weights = (scores[:, :, :, None] * decay).astype(dtype)
  y = jnp.einsum(
    "BCGRQK,BCKGRP->BCQGRP", weights, value, preferred_element_type=wide
  )

  # States at the ends of chunks.
  is_kept = _to_heads(runs == last[:, :, None])
  left = jnp.where(is_kept, jnp.exp(total[:, :, -1:] - total), 0)
  added = jnp.einsum(
    "BCKGRP,BCKGS->BCGRPS",
    value * left[..., None].astype(dtype),
    key,
    preferred_element_type=wide,
  )
  kept = jnp.where(_to_heads(last == before), jnp.exp(total[:, :, -1]), 0)

  def advance(
    state: jax.Array, chunk: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    added, kept = chunk
    return state * kept[..., None, None] + added, state

  by_chunk = (jnp.moveaxis(added, 1, 0), jnp.moveaxis(kept, 1, 0))
  state, states = jax.lax.scan(advance, state, by_chunk)

  # Outputs of the state before each chunk.
  is_seen = _to_heads(runs == before[:, :, None])
  seen = jnp.where(is_seen, jnp.exp(total), 0)
  carried = jnp.einsum(
    "BCQGS,CBGRPS->BCQGRP",
    query,
    states.astype(dtype),
    preferred_element_type=wide,
  )
  y += carried * seen[..., None]
  return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state


def _to_chunks(x: jax.Array, size: int, mode: str = "constant") -> jax.Array:
  """Returns [B,C,size,...], padded at the end."""
  after = -x.shape[1] % size
  pads = [(0, 0), (0, after), *[(0, 0)] * (x.ndim - 2)]
  x = jnp.pad(x, pads, mode=mode)
  return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _to_heads(x: jax.Array) -> jax.Array:
  return x[..., None, None]
