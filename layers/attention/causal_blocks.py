"""Causal attention by blocks of queries, for CPUs; keeps no T x T matrix.

Each block of queries attends to the keys up to its own end, and from the first
one that the mask reaches, so that about half of the pairs are computed:

  queries [B,K,G,block,H] x keys [B,K,end - begin,H], block after block

Heads come first, as XLA:CPU multiplies matrices. The backward pass computes the
logits again from the log normalizers of the forward pass (Dao et al. 2022,
https://arxiv.org/abs/2205.14135, algorithm 4).

Masks use positions, blocks use indices. Both agree where whole segments follow
one another (`mask.is_in_order`); otherwise the same code computes each block
with all keys, in a loop. So every mask is applied exactly.

Letters: B batch, T length, S keys, K key/value heads, G queries per key/value
head, R queries of a block and group, H head_dim.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.layers.attention import kernel_support
from paxon.layers.attention import mask as attention_mask

# Smaller blocks leave cores idle; more blocks take longer to compile.
_MIN_BLOCK = 64
_MAX_BLOCKS = 8
_LOWEST = float(jnp.finfo(jnp.float32).min)


@kernel_support.declare(kernel_support.CAUSAL_BLOCKS)
def causal_blocks(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch length kv_heads head_dim"],
  value: Float[Array, "batch length kv_heads value_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: jax.Array | None = None,
  scale: float | None = None,
  sinks: jax.Array | None = None,
  block_length: int | None = None,
) -> Float[Array, "batch length heads value_dim"]:
  """Causal attention, called like `kernels.plain`; softmax in float32.

  Only its gradient is defined, not its derivative in forward mode.
  `block_length` is the number of queries of a block, `None` at most eight
  blocks of 64 or more.

  Raises:
    ValueError: The mask is not causal, queries and keys are not the same
      tokens, there is a bias or sinks, or `block_length` is not positive.
  """
  if block_length is not None and block_length <= 0:
    raise ValueError(
      f"causal_blocks needs a positive block_length, got {block_length}."
    )
  kernel_support.check_call(
    kernel_support.CAUSAL_BLOCKS,
    query,
    key,
    value,
    mask,
    logit_cap=logit_cap,
    bias=bias,
    sinks=sinks,
  )
  B, T, N, H = query.shape
  block = block_length or _MIN_BLOCK * -(-T // (_MIN_BLOCK * _MAX_BLOCKS))
  before = mask.reach[0]
  settings = _Settings(
    block=block,
    # In blocks: the first key of a block, less rounding, is that far away.
    reach=None if before is None else -(-before // block),
    cap=logit_cap,
    scale=H**-0.5 if scale is None else scale,
  )
  K = key.shape[2]
  heads = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  key, value = (x.transpose(0, 2, 1, 3) for x in (key, value))
  tokens = _Tokens(
    mask.q_positions, mask.kv_positions, mask.q_segment_ids, mask.kv_segment_ids
  )
  extra = -T % block
  heads, key, value = (_padded(x, -2, extra) for x in (heads, key, value))
  # Tokens of segment 0 are visible to none.
  tokens = _Tokens(*(_padded(x, 1, extra) for x in tokens))
  out = _attend(settings, mask.rules, heads, key, value, tokens)
  out = out[..., :T, :].transpose(0, 3, 1, 2, 4)
  return out.reshape(B, T, N, value.shape[-1])


def _padded(x: jax.Array, axis: int, extra: int) -> jax.Array:
  if not extra:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, extra)
  return jnp.pad(x, widths)


class _Tokens(NamedTuple):
  """Positions and segments [B,T] of queries and keys."""

  q_positions: jax.Array
  kv_positions: jax.Array
  q_segment_ids: jax.Array
  kv_segment_ids: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
  """Constants: queries of a block, blocks before it that the mask reaches."""

  block: int
  reach: int | None
  cap: float | None
  scale: float

  def spans(self, length: int) -> list[tuple[slice, slice]]:
    """Returns the queries of each block, and their keys."""
    spans = []
    for begin in range(0, length, self.block):
      end = begin + self.block
      first = 0
      if self.reach is not None:
        first = max(0, begin - self.reach * self.block)
      spans.append((slice(begin, end), slice(first, end)))
    return spans


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
  settings: _Settings,
  rules: attention_mask.MaskRules,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  tokens: _Tokens,
) -> jax.Array:
  """Returns [B,K,G,T,H'] of queries [B,K,G,T,H], keys and values [B,K,T,H]."""
  return _forward(settings, rules, query, key, value, tokens)[0]


def _forward(
  settings: _Settings,
  rules: attention_mask.MaskRules,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  tokens: _Tokens,
) -> tuple[jax.Array, Any]:
  def in_blocks(query: jax.Array, tokens: _Tokens) -> Any:
    pairs = [
      _forward_block(
        settings,
        query[..., q, :],
        key[..., kv, :],
        value[..., kv, :],
        _visible(rules, tokens, q, kv),
      )
      for q, kv in settings.spans(key.shape[2])
    ]
    out, total = zip(*pairs, strict=True)
    return jnp.concatenate(out, axis=-2), jnp.concatenate(total, axis=-1)

  def in_any_order(query: jax.Array, tokens: _Tokens) -> Any:
    def one(part: tuple[jax.Array, _Tokens]) -> Any:
      visible = _visible(rules, part[1])
      return _forward_block(settings, part[0], key, value, visible)

    out, total = jax.lax.map(one, _chunks(settings, query, tokens))
    return _joined(out, -2), _joined(total, -1)

  is_in_order = _is_in_order(rules, tokens)
  out, total = jax.lax.cond(is_in_order, in_blocks, in_any_order, query, tokens)
  return out, (query, key, value, tokens, out, total, is_in_order)


def _backward(
  settings: _Settings,
  rules: attention_mask.MaskRules,
  residuals: Any,
  gradient: jax.Array,
) -> tuple[Any, ...]:
  query, key, value, tokens, out, total, is_in_order = residuals
  # Of padding, which saw no key, the output is a constant.
  gradient = jnp.where(_saw_any(total), gradient, jnp.zeros((), out.dtype))
  # The sum over keys of weights times their gradients.
  mean = jnp.sum(
    precision.widened(gradient) * precision.widened(out), axis=-1, keepdims=True
  )

  def in_blocks(*per_query: Any) -> Any:
    *arrays, tokens = per_query
    spans = settings.spans(key.shape[2])
    q_bars: list[jax.Array] = []
    sums: dict[int, list[Any]] = {}
    for q, kv in spans:
      q_bar, k_bar, v_bar = _backward_block(
        settings,
        *(x[..., q, :] for x in arrays),
        key=key[..., kv, :],
        value=value[..., kv, :],
        visible=_visible(rules, tokens, q, kv),
      )
      q_bars.append(q_bar)
      for begin in range(kv.start, kv.stop, settings.block):
        part = slice(begin - kv.start, begin - kv.start + settings.block)
        sums.setdefault(begin, []).append(
          (k_bar[..., part, :], v_bar[..., part, :])
        )
    added = [jax.tree.map(_add, *sums[q.start]) for q, _ in spans]
    k_bar, v_bar = (
      jnp.concatenate(x, axis=-2) for x in zip(*added, strict=True)
    )
    return jnp.concatenate(q_bars, axis=-2), k_bar, v_bar

  def in_any_order(*per_query: Any) -> Any:
    def one(sums: Any, part: Any) -> Any:
      *arrays, tokens = part
      visible = _visible(rules, tokens)
      q_bar, *bars = _backward_block(
        settings, *arrays, key=key, value=value, visible=visible
      )
      return jax.tree.map(jnp.add, sums, bars), q_bar

    zeros = [jnp.zeros(x.shape, total.dtype) for x in (key, value)]
    bars, q_bars = jax.lax.scan(one, zeros, _chunks(settings, *per_query))
    return _joined(q_bars, -2), *bars

  q_bar, k_bar, v_bar = jax.lax.cond(
    is_in_order,
    in_blocks,
    in_any_order,
    *(query, gradient, total[..., None], mean, tokens),
  )
  return (
    q_bar.astype(query.dtype),
    k_bar.astype(key.dtype),
    v_bar.astype(value.dtype),
    None,
  )


_attend.defvjp(_forward, _backward)


def _add(*terms: jax.Array) -> jax.Array:
  return functools.reduce(jnp.add, terms)


def _saw_any(total: jax.Array) -> jax.Array:
  """Returns which queries saw a key, [B,K,G,T,1], by their log normalizers.

  Not by a comparison that is false for NaN, which must not be hidden.
  """
  return ~(total <= _LOWEST / 2)[..., None]


def _visible(
  rules: attention_mask.MaskRules,
  tokens: _Tokens,
  q: slice = slice(None),
  kv: slice = slice(None),
) -> jax.Array:
  """Returns the mask of a block, [B,1,1,R,S]."""
  part = attention_mask.AttentionMask(
    q_positions=tokens.q_positions[:, q],
    kv_positions=tokens.kv_positions[:, kv],
    q_segment_ids=tokens.q_segment_ids[:, q],
    kv_segment_ids=tokens.kv_segment_ids[:, kv],
    rules=rules,
  )
  return part.to_array()[:, :, None]


def _is_in_order(rules: attention_mask.MaskRules, tokens: _Tokens) -> jax.Array:
  mask = attention_mask.AttentionMask(**tokens._asdict(), rules=rules)
  return jnp.all(attention_mask.is_in_order(mask))


def _chunks(settings: _Settings, *per_query: Any) -> Any:
  """Returns blocks [blocks, ...] of arrays [..,T,H] and of tokens."""
  *arrays, tokens = per_query

  def cut(x: jax.Array, axis: int) -> jax.Array:
    axis %= x.ndim
    shape = (*x.shape[:axis], -1, settings.block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  blocks = tokens.q_positions.shape[1] // settings.block
  kv = (
    jnp.broadcast_to(x[None], (blocks, *x.shape))
    for x in (tokens.kv_positions, tokens.kv_segment_ids)
  )
  kv_positions, kv_segment_ids = kv
  parts = _Tokens(
    cut(tokens.q_positions, 1),
    kv_positions,
    cut(tokens.q_segment_ids, 1),
    kv_segment_ids,
  )
  return *(cut(x, -2) for x in arrays), parts


def _joined(x: jax.Array, axis: int) -> jax.Array:
  """Undoes the cut of `_chunks` along an axis of the result."""
  axis %= x.ndim - 1
  x = jnp.moveaxis(x, 0, axis)
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _logits(
  settings: _Settings, query: jax.Array, key: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns masked logits [B,K,G,R,S], and the slope of the soft cap."""
  wide = precision.at_least_float32(query.dtype)
  B, K, G, R, H = query.shape
  logits = jnp.einsum(
    "BKRH,BKSH->BKRS",
    query.reshape(B, K, G * R, H),
    key,
    preferred_element_type=wide,
  ).reshape(B, K, G, R, key.shape[2])
  logits *= settings.scale
  slope = jnp.ones((), wide)
  if settings.cap is not None:
    bent = jnp.tanh(logits / settings.cap)
    logits, slope = settings.cap * bent, 1 - jnp.square(bent)
  return jnp.where(visible, logits, _LOWEST), slope


def _forward_block(
  settings: _Settings,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  visible: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the output [B,K,G,R,H'] and log normalizers [B,K,G,R]."""
  logits, _ = _logits(settings, query, key, visible)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - largest)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  B, K, G, R, S = logits.shape
  out = jnp.einsum(
    "BKRS,BKSH->BKRH",
    weights.reshape(B, K, G * R, S).astype(value.dtype),
    value,
    preferred_element_type=logits.dtype,
  )
  out = out.reshape(B, K, G, R, -1) / total
  total = (largest + jnp.log(total))[..., 0]
  out = jnp.where(_saw_any(total), out, jnp.zeros((), out.dtype))
  return out.astype(value.dtype), total


def _backward_block(
  settings: _Settings,
  query: jax.Array,
  gradient: jax.Array,
  total: jax.Array,
  mean: jax.Array,
  *,
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
  multiply = functools.partial(jnp.einsum, preferred_element_type=logits.dtype)
  v_bar = multiply(
    "BKRS,BKRH->BKSH",
    weights.reshape(*rows, S).astype(value.dtype),
    gradient,
  )
  weights_bar = multiply("BKRH,BKSH->BKRS", gradient, value)
  logits_bar = weights * (weights_bar.reshape(logits.shape) - mean)
  logits_bar = (logits_bar * (settings.scale * slope)).astype(query.dtype)
  logits_bar = logits_bar.reshape(*rows, S)
  q_bar = multiply("BKRS,BKSH->BKRH", logits_bar, key)
  k_bar = multiply(
    "BKRS,BKRH->BKSH", logits_bar, query.reshape(*rows, query.shape[-1])
  )
  return q_bar.reshape(query.shape), k_bar, v_bar
