"""Causal attention by blocks of queries and keys.

A loop over pairs of blocks skips those that the mask hides, about half of them
in one document and more in packed ones. It keeps no T x T matrix: the forward
pass corrects its sums as the largest logit grows, and the backward pass
computes the logits again from the log normalizers (Dao et al. 2022,
https://arxiv.org/abs/2205.14135, algorithms 1 and 4).

  queries [B,K,G,block,H] x keys [B,K,block,H], pair after pair

Heads come first, as XLA:CPU multiplies matrices. Which pairs are skipped is
known only when the program runs, from positions and segments, so tokens can be
in any order and one pair is compiled.

Letters: B batch, T length, S keys, K key/value heads, G queries per key/value
head, R queries of a block and group, H head_dim.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import precision, remat
from paxon.layers.cpu import one_pass

# For shorter sequences, compilation takes longer than the blocks save.
MIN_LENGTH: Final = 512

# Smaller blocks leave cores idle, and each pair costs some time of the loop.
_MIN_BLOCK = 64
_MAX_BLOCKS = 8


class Tokens(NamedTuple):
  """Positions and segments [B,T] of queries and keys, which are the same."""

  q_positions: jax.Array
  kv_positions: jax.Array
  q_segment_ids: jax.Array
  kv_segment_ids: jax.Array


# `(*, q_positions, kv_positions, q_segment_ids, kv_segment_ids) -> [B,1,T,S]`.
Rules = Callable[..., jax.Array]


def attend(
  rules: Rules,
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch length kv_heads head_dim"],
  value: Float[Array, "batch length kv_heads value_dim"],
  tokens: Tokens,
  *,
  logit_cap: float | None = None,
  scale: float | None = None,
  block_length: int | None = None,
) -> Float[Array, "batch length heads value_dim"]:
  """Returns attention; softmax in float32.

  Only its gradient is defined, not its derivative in forward mode.

  Args:
    rules: Returns the mask of some tokens. A query sees no later positions;
      tokens of segment 0 are visible to none.
    query: Queries.
    key: Keys of the same tokens.
    value: Values; they may have another width.
    tokens: Positions and segments.
    logit_cap: Soft-caps the scaled logits to `(-logit_cap, logit_cap)`.
    scale: Factor of the dot products; `None` is `H ** -0.5`.
    block_length: Number of queries of a block, `None` at most eight blocks of
      64 or more.

  Raises:
    ValueError: `block_length` is not positive.
  """
  if block_length is not None and block_length <= 0:
    raise ValueError(
      f"causal_blocks needs a positive block_length, got {block_length}."
    )
  B, T, N, H = query.shape
  block = block_length or _MIN_BLOCK * -(-T // (_MIN_BLOCK * _MAX_BLOCKS))
  settings = _Settings(
    block=block, cap=logit_cap, scale=H**-0.5 if scale is None else scale
  )
  K = key.shape[2]
  heads = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  key, value = (x.transpose(0, 2, 1, 3) for x in (key, value))
  extra = -T % block
  heads, key, value = (_pad(x, -2, extra) for x in (heads, key, value))
  # Tokens of segment 0 are visible to none.
  tokens = Tokens(*(_pad(x, 1, extra) for x in tokens))
  out = _attend(settings, rules, heads, key, value, tokens)
  out = out[..., :T, :].transpose(0, 3, 1, 2, 4)
  return out.reshape(B, T, N, value.shape[-1])


def _pad(x: jax.Array, axis: int, extra: int) -> jax.Array:
  if not extra:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, extra)
  return jnp.pad(x, widths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
  """Constants; `block` is the number of queries, and of keys, of a block."""

  block: int
  cap: float | None
  scale: float

  def slice(self, x: jax.Array, index: jax.Array, axis: int = -2) -> jax.Array:
    """Returns a block of an array, by default of `[...,T,H]`."""
    return jax.lax.dynamic_slice_in_dim(x, index * self.block, self.block, axis)

  def set(self, x: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """Returns `[...,T,H]` with another block."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, index * self.block, -2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
  settings: _Settings,
  rules: Rules,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  tokens: Tokens,
) -> jax.Array:
  """Returns [B,K,G,T,H'] of queries [B,K,G,T,H], keys and values [B,K,T,H]."""
  return _forward(settings, rules, query, key, value, tokens)[0]


def _forward(
  settings: _Settings,
  rules: Rules,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  tokens: Tokens,
) -> tuple[jax.Array, Any]:
  wide = precision.at_least_float32(query.dtype)
  rows, width = query.shape[:-1], value.shape[-1]
  block_rows = (*rows[:-1], settings.block)
  num_blocks = key.shape[2] // settings.block

  def one_block(q: jax.Array, results: Any) -> Any:
    queries = settings.slice(query, q)

    def one_pair(kv: jax.Array, sums: _Sums) -> _Sums:
      visible = _visible(settings, rules, tokens, q, kv)

      def add(sums: _Sums) -> _Sums:
        keys, values = (settings.slice(x, kv) for x in (key, value))
        return _add_pair(settings, sums, queries, keys, values, visible)

      return jax.lax.cond(jnp.any(visible), add, lambda sums: sums, sums)

    sums = _Sums(
      largest=jnp.full((*block_rows, 1), one_pass.HIDDEN, wide),
      total=jnp.zeros((*block_rows, 1), wide),
      out=jnp.zeros((*block_rows, width), wide),
    )
    sums = jax.lax.fori_loop(0, num_blocks, one_pair, sums)
    # A query that sees a key has a total of one or more.
    total = jnp.maximum(sums.total, 0.5)
    normalizers = sums.largest + jnp.log(total)
    out = jnp.where(
      _saw_any(normalizers), sums.out / total, jnp.zeros((), wide)
    )
    new = out.astype(value.dtype), normalizers
    return tuple(
      settings.set(x, q, y) for x, y in zip(results, new, strict=True)
    )

  results = jnp.zeros((*rows, width), value.dtype), jnp.zeros((*rows, 1), wide)
  out, total = (
    remat.tag(x, remat.ATTENTION_RESIDUALS)
    for x in jax.lax.fori_loop(0, num_blocks, one_block, results)
  )
  return out, (query, key, value, tokens, out, total)


def _backward(
  settings: _Settings,
  rules: Rules,
  residuals: Any,
  gradient: jax.Array,
) -> tuple[Any, ...]:
  query, key, value, tokens, out, total = residuals
  # Of padding, which saw no key, the output is a constant.
  gradient = jnp.where(_saw_any(total), gradient, jnp.zeros((), out.dtype))
  # The sum over keys of weights times their gradients. Of matrices: with a
  # batch of one, XLA:CPU of jax 0.10 takes ten times as long.
  left, right = (
    precision.widen(x.reshape(-1, x.shape[-1])) for x in (gradient, out)
  )
  mean = jnp.sum(left * right, axis=-1).reshape(total.shape)
  num_blocks = key.shape[2] // settings.block
  query_t, gradient_t = (
    precision.widen(x).transpose(0, 1, 4, 2, 3) for x in (query, gradient)
  )
  query_t *= settings.scale

  def columns(x: jax.Array, q: jax.Array) -> jax.Array:
    x = settings.slice(x, q, -1)
    return x.reshape(*x.shape[:3], -1)

  def one_block(kv: jax.Array, bars: Any) -> Any:
    q_bar, *others = bars
    keys, values = (settings.slice(x, kv) for x in (key, value))

    def one_pair(q: jax.Array, bars: Any) -> Any:
      visible = _visible(settings, rules, tokens, q, kv)

      def add(bars: Any) -> Any:
        new, *more = _backward_block(
          settings,
          *(settings.slice(x, q) for x in (query, gradient, total, mean)),
          columns=(columns(query_t, q), columns(gradient_t, q)),
          key=keys,
          value=values,
          visible=visible,
        )
        q_bar = settings.set(bars[0], q, settings.slice(bars[0], q) + new)
        return q_bar, *(a + b for a, b in zip(bars[1:], more, strict=True))

      return jax.lax.cond(jnp.any(visible), add, lambda bars: bars, bars)

    zeros = (jnp.zeros(x.shape, total.dtype) for x in (keys, values))
    bars = (q_bar, *zeros)
    q_bar, *new = jax.lax.fori_loop(0, num_blocks, one_pair, bars)
    return q_bar, *(
      settings.set(x, kv, y) for x, y in zip(others, new, strict=True)
    )

  arrays = query, key, value
  bars = tuple(jnp.zeros(x.shape, total.dtype) for x in arrays)
  bars = jax.lax.fori_loop(0, num_blocks, one_block, bars)
  return *(x.astype(y.dtype) for x, y in zip(bars, arrays, strict=True)), None


_attend.defvjp(_forward, _backward)


def _saw_any(total: jax.Array) -> jax.Array:
  """Returns which queries saw a key, [B,K,G,T,1], by their log normalizers.

  Not by a comparison that is false for NaN, which must not be hidden.
  """
  return ~(total <= one_pass.HIDDEN / 2)


def _visible(
  settings: _Settings,
  rules: Rules,
  tokens: Tokens,
  q: jax.Array,
  kv: jax.Array,
) -> jax.Array:
  """Returns the mask of a pair of blocks, [B,1,1,R,S]."""
  at = Tokens(q, kv, q, kv)
  pair = (settings.slice(x, i, 1) for x, i in zip(tokens, at, strict=True))
  return rules(**Tokens(*pair)._asdict())[:, :, None]


def _logits(
  settings: _Settings, query: jax.Array, key: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns masked logits [B,K,G,R,S], and the slope of the soft cap."""
  wide = precision.at_least_float32(query.dtype)
  B, K, G, R, H = query.shape
  logits = _multiply("BKRH,BKSH->BKRS", query.reshape(B, K, G * R, H), key)
  logits = logits.reshape(B, K, G, R, key.shape[2])
  logits *= settings.scale
  slope = jnp.ones((), wide)
  if settings.cap is not None:
    bent = jnp.tanh(logits / settings.cap)
    logits, slope = settings.cap * bent, 1 - jnp.square(bent)
  return logits + one_pass.addend(visible, wide), slope


def _multiply(equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  """Returns `one_pass.multiply`, on all cores of a CPU."""
  return one_pass.on_all_cores(one_pass.multiply(equation, lhs, rhs))


class _Sums(NamedTuple):
  """The softmax of a block of queries over the keys so far.

  The largest logit [B,K,G,R,1], and the sums of weights relative to it, and of
  weighted values [B,K,G,R,H'].
  """

  largest: jax.Array
  total: jax.Array
  out: jax.Array


def _add_pair(
  settings: _Settings,
  sums: _Sums,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  visible: jax.Array,
) -> _Sums:
  """Returns the sums with a block of keys added."""
  logits, _ = _logits(settings, query, key, visible)
  largest = jnp.maximum(sums.largest, jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits - largest)
  old = jnp.exp(sums.largest - largest)
  B, K, G, R, S = logits.shape
  out = _multiply("BKRS,BKSH->BKRH", weights.reshape(B, K, G * R, S), value)
  return _Sums(
    largest=largest,
    total=sums.total * old + jnp.sum(weights, axis=-1, keepdims=True),
    out=sums.out * old + out.reshape(sums.out.shape),
  )


def _backward_block(
  settings: _Settings,
  query: jax.Array,
  gradient: jax.Array,
  total: jax.Array,
  mean: jax.Array,
  *,
  columns: tuple[jax.Array, jax.Array],
  key: jax.Array,
  value: jax.Array,
  visible: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the gradients of a block's queries, keys and values."""
  # The name that counts of FLOPs know; the forward pass has computed them.
  with jax.named_scope("rematted_computation"):
    logits, slope = _logits(settings, query, key, visible)
  weights = jnp.exp(logits - total)
  B, K, G, R, S = logits.shape
  rows = (B, K, G * R)
  gradient = gradient.reshape(*rows, -1)
  # XLA:CPU is slow at sums over the first axis of the large matrix [R,S]; the
  # small one is transposed instead.
  query_t, gradient_t = columns
  weights_of_rows = weights.reshape(*rows, S)
  v_bar = _multiply("BKHR,BKRS->BKHS", gradient_t, weights_of_rows)
  weights_bar = _multiply("BKRH,BKSH->BKRS", gradient, value)
  logits_bar = weights * (weights_bar.reshape(logits.shape) - mean)
  logits_bar = (logits_bar * slope).reshape(*rows, S)
  # Scaled here and in the columns: not the large matrix.
  q_bar = _multiply("BKRS,BKSH->BKRH", logits_bar, key) * settings.scale
  k_bar = _multiply("BKHR,BKRS->BKHS", query_t, logits_bar)
  k_bar, v_bar = (x.swapaxes(2, 3) for x in (k_bar, v_bar))
  return q_bar.reshape(query.shape), k_bar, v_bar
