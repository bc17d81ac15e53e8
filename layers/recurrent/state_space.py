"""State-space duality (SSD): a linear recurrence computed in chunks.

  state[t] = exp(log_decay[t]) * state[t - 1] + value[t] key[t]^T
  y[t] = state[t] query[t]

Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section 6. Inside of a chunk
the outputs are those of masked linear attention, a few matmuls; only the states
at the ends of chunks are computed one after another. One token takes a step of
the recurrence.

The paper's x, B, C and A are `value`, `key`, `query` and `log_decay` here, each
already multiplied by the time step where the recurrence needs it.

Letters: B batch, T length, R heads of a group, P head_dim, S state_dim,
C chunks, Q and K tokens of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision


def scan(
  value: Float[Array, "batch length heads head_dim"],
  log_decay: Float[Array, "batch length heads"],
  key: Float[Array, "batch length groups state"],
  query: Float[Array, "batch length groups state"],
  runs: Int[Array, "batch length"] | None,
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
      the token before starts from zeros. See `decoding_state.Tokens`. `None`
      is one run that continues `state`.
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

  def run(*group: jax.Array) -> tuple[jax.Array, jax.Array]:
    if length == 1:
      return _step(*group, runs=runs)
    return _chunks(*group, runs=runs, chunk_length=chunk_length)

  if groups == 1:
    # Without an axis of one group, which slows XLA:CPU down.
    inputs = (x[:, :, 0] for x in (value, log_decay, key, query))
    y, state = run(*inputs, state[:, 0])
  else:
    every = jax.vmap(run, in_axes=(2, 2, 2, 2, 1), out_axes=(2, 1))
    y, state = every(value, log_decay, key, query, state)
  y = y.reshape(batch, length, heads, head_dim)
  return y, state.reshape(batch, heads, head_dim, state_dim)


def _step(
  value: jax.Array,
  log_decay: jax.Array,
  key: jax.Array,
  query: jax.Array,
  state: jax.Array,
  *,
  runs: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the output [B,1,R,P] of one token, and the state after it."""
  value, key, query = (x[:, 0].astype(state.dtype) for x in (value, key, query))
  kept = jnp.exp(log_decay[:, 0])
  if runs is not None:
    kept = jnp.where(runs == 0, kept, 0)
  added = value[..., None] * key[:, None, None]
  state = state * kept[..., None, None] + added
  return jnp.einsum("BRPS,BS->BRP", state, query)[:, None], state


def _chunks(
  value: jax.Array,
  log_decay: jax.Array,
  key: jax.Array,
  query: jax.Array,
  state: jax.Array,
  *,
  runs: jax.Array | None,
  chunk_length: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs [B,T,R,P], and the state after the last token."""
  length, dtype, wide = value.shape[1], value.dtype, state.dtype
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  size = min(chunk_length, length)
  value, log_decay, key, query = (
    _to_chunks(x, size) for x in (value, log_decay, key, query)
  )
  sees = jnp.tril(jnp.ones((size, size), bool))[None, None]
  is_kept = is_first = is_seen = None
  if runs is not None:
    runs = _to_chunks(runs, size, mode="edge")
    # The run before each chunk, that before the call is number 0.
    last = runs[:, :, -1]
    before = jnp.pad(last[:, :-1], [(0, 0), (1, 0)])
    sees = (runs[..., None] == runs[:, :, None]) & sees
    is_kept = (runs == last[:, :, None])[..., None]
    is_first = (last == before)[..., None]
    is_seen = (runs == before[:, :, None])[..., None]
  total = jnp.cumsum(log_decay, axis=2)

  # Outputs of the inputs of each chunk.
  scores = einsum("BCQS,BCKS->BCQK", query, key)
  heads_first = jnp.moveaxis(total, 2, -1)
  gap = heads_first[..., None] - heads_first[..., None, :]
  decay = jnp.exp(jnp.where(sees[:, :, None], gap, -jnp.inf))
  weights = (scores[:, :, None] * decay).astype(dtype)
  y = einsum("BCRQK,BCKRP->BCQRP", weights, value)

  # States at the ends of chunks.
  left = _where(is_kept, jnp.exp(total[:, :, -1:] - total))
  left = value * left[..., None].astype(dtype)
  added = einsum("BCKRP,BCKS->CBRPS", left, key)
  kept = _where(is_first, jnp.exp(total[:, :, -1]))

  def advance(
    state: jax.Array, chunk: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    added, kept = chunk
    return state * kept[..., None, None] + added, state

  by_chunk = (added, jnp.moveaxis(kept, 1, 0))
  state, states = jax.lax.scan(advance, state, by_chunk)

  # Outputs of the state before each chunk.
  seen = _where(is_seen, jnp.exp(total))
  carried = einsum("BCQS,CBRPS->BCQRP", query, states.astype(dtype))
  y += carried * seen[..., None]
  return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state


def _to_chunks(x: jax.Array, size: int, mode: str = "constant") -> jax.Array:
  """Returns [B,C,size,...], padded at the end."""
  after = -x.shape[1] % size
  pads = [(0, 0), (0, after), *[(0, 0)] * (x.ndim - 2)]
  x = jnp.pad(x, pads, mode=mode)
  return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _where(mask: jax.Array | None, x: jax.Array) -> jax.Array:
  return x if mask is None else jnp.where(mask, x, 0)
