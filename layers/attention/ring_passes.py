"""The two passes of ring attention, on one device of the ring.

Keys and values rotate in the ring, and each device attends to those it holds
(Liu et al. 2023, https://arxiv.org/abs/2310.01889), block by block, with an
online softmax: a maximum, a sum and a weighted sum for each query. The backward
pass rotates once more, together with the gradients of keys and values,
and computes each block's weights again from the logarithm of the sum. A block
in which no query sees any key is skipped.

Letters: B batch, T queries, S keys, K key/value heads, G queries per key/value
head, H head_dim, H' width of values; n blocks, each of T queries or S keys.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxon.layers import activations, precision
from paxon.layers.attention import mask as attention_mask

# Below every logit, and finite, so that differences are no NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """Static settings of a ring.

  Attributes:
    axes: Mesh axes along which keys are split; empty for no ring.
    size: Number of devices of the ring.
    block_q: Queries of a block.
    block_kv: Keys of a block.
    scale: Factor of the dot products.
    logit_cap: Soft cap of the scaled logits, or None.
    rules: Rules of the mask.
  """

  axes: tuple[str, ...]
  size: int
  block_q: int
  block_kv: int
  scale: float
  logit_cap: float | None
  rules: attention_mask.MaskRules


class Tokens(NamedTuple):
  """The arrays of a mask for queries or keys, each [..., B, length]."""

  positions: jax.Array
  segment_ids: jax.Array
  prefix: jax.Array | None


class Sums(NamedTuple):
  """An online softmax: sums of logits and values so far.

  Attributes:
    highest: The highest logit [n,B,K,G,T].
    total: The sum of `exp(logit - highest)` likewise.
    values: The sum of the values with these weights [n,B,K,G,T,H'].
  """

  highest: jax.Array
  total: jax.Array
  values: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  setup: Setup,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  q_tokens: Tokens,
  kv_tokens: Tokens,
  sinks: jax.Array | None,
) -> jax.Array:
  """Returns the attention of the queries to the keys of the whole ring.

  Args:
    setup: Static settings.
    query: Queries of this device [B,T,K,G,H].
    key: Keys of this device [B,S,K,H].
    value: Values of this device [B,S,K,H'].
    q_tokens: Arrays of the mask for queries [B,T].
    kv_tokens: Arrays of the mask for keys [B,S].
    sinks: Logits of attention sinks [K,G], or None.
  """
  return _forward(setup, query, key, value, q_tokens, kv_tokens, sinks)[0]


def _forward(
  setup: Setup,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  q_tokens: Tokens,
  kv_tokens: Tokens,
  sinks: jax.Array | None,
) -> tuple[jax.Array, Any]:
  sums = gather_sums(setup, query, key, value, q_tokens, kv_tokens)
  out, log_total = finish(sums, sinks)
  out = out.astype(query.dtype)
  saved = (query, key, value, q_tokens, kv_tokens, sinks, out, log_total)
  return out, saved


def gather_sums(
  setup: Setup,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  q_tokens: Tokens,
  kv_tokens: Tokens,
) -> Sums:
  """Returns the sums over the keys of the whole ring; see `attend`."""
  queries = _blocks((query, q_tokens), setup.block_q)
  held = _blocks((key, value, kv_tokens), setup.block_kv)
  number, B, T, K, G, _ = queries[0].shape
  dtype = precision.at_least_float32(query.dtype)
  sums = Sums(
    jnp.full((number, B, K, G, T), _LOWEST, dtype),
    jnp.zeros((number, B, K, G, T), dtype),
    jnp.zeros((number, B, K, G, T, value.shape[-1]), dtype),
  )

  def gather(sums: Sums, held: Any) -> Sums:
    def gather_queries(_: None, block: Any) -> tuple[None, Sums]:
      sums, block = block
      add = functools.partial(_add, setup, block)
      return None, jax.lax.scan(add, sums, held)[0]

    return jax.lax.scan(gather_queries, None, (sums, queries))[1]

  def step(state: tuple[Sums, Any], _: None) -> tuple[tuple[Sums, Any], None]:
    sums, held = state
    # Begun first, so that the next keys travel while these are used.
    following = passed_on(setup, held)
    return (gather(sums, held), following), None

  (sums, held), _ = jax.lax.scan(step, (sums, held), length=setup.size - 1)
  return gather(sums, held)


def finish(sums: Sums, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
  """Returns the softmax of the sums over all keys.

  Returns:
    The weighted values [B,T,K,G,H], and the logarithm of the softmax's sum
    [n,B,K,G,T].
  """
  highest, total, values = sums
  if sinks is not None:
    sinks = sinks.astype(total.dtype)[None, None, :, :, None]
    risen = jnp.maximum(highest, sinks)
    shrink = jnp.exp(highest - risen)
    total = total * shrink + jnp.exp(sinks - risen)
    values, highest = values * shrink[..., None], risen
  # Queries without visible keys give zeros.
  safe = jnp.where(total > 0, total, 1)
  log_total = jnp.where(total > 0, highest + jnp.log(safe), 0)
  out = values / safe[..., None]
  return _whole(jnp.moveaxis(out, 4, 2)), log_total


def passed_on(setup: Setup, held: Any) -> Any:
  """Returns the arrays of the previous device in the ring."""
  if setup.size == 1:
    return held
  ring = [(i, (i + 1) % setup.size) for i in range(setup.size)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, setup.axes, ring), held)


def _add(
  setup: Setup, queries: Any, sums: Sums, keys: Any
) -> tuple[Sums, None]:
  """Adds a block of keys to the sums of a block of queries."""
  query, q_tokens = queries
  key, value, kv_tokens = keys
  visible = _visible(setup, q_tokens, kv_tokens)

  def add(sums: Sums) -> Sums:
    logits = _logits(setup, query, key, visible)
    highest = jnp.maximum(sums.highest, jnp.max(logits, axis=-1))
    weights = _weights(logits, highest, visible)
    shrink = jnp.exp(sums.highest - highest)
    values = _product("BKGTS,BSKH->BKGTH", weights.astype(value.dtype), value)
    return Sums(
      highest,
      sums.total * shrink + jnp.sum(weights, axis=-1),
      sums.values * shrink[..., None] + values,
    )

  return jax.lax.cond(jnp.any(visible), add, lambda sums: sums, sums), None


def _backward(setup: Setup, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
  query, key, value, q_tokens, kv_tokens, sinks, out, log_total = saved
  dtype = log_total.dtype
  # The sum over keys of weight times gradient of the weight.
  shared = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1)
  blocks = _blocks((query, q_tokens, d_out, shared), setup.block_q)
  shared = jnp.moveaxis(blocks[3], 2, 4)
  queries = (*blocks[:3], shared, log_total)
  d_query = jnp.zeros(blocks[0].shape, dtype)
  keys = _blocks((key, value, kv_tokens), setup.block_kv)
  d_keys = (jnp.zeros(keys[0].shape, dtype), jnp.zeros(keys[1].shape, dtype))

  def gather(d_query: jax.Array, keys: Any, d_keys: Any) -> Any:
    def gather_keys(d_query: jax.Array, block: Any) -> tuple[jax.Array, Any]:
      keys, d_keys = block
      add = functools.partial(_add_gradients, setup, keys)
      d_keys, d_query = jax.lax.scan(add, d_keys, (queries, d_query))
      return d_query, d_keys

    return jax.lax.scan(gather_keys, d_query, (keys, d_keys))

  def step(state: Any, _: None) -> tuple[Any, None]:
    d_query, keys, d_keys = state
    following = passed_on(setup, keys)
    d_query, d_keys = gather(d_query, keys, d_keys)
    return (d_query, following, passed_on(setup, d_keys)), None

  state = (d_query, keys, d_keys)
  (d_query, keys, d_keys), _ = jax.lax.scan(step, state, length=setup.size - 1)
  d_query, d_keys = gather(d_query, keys, d_keys)
  # The last step returns the gradients to their device.
  d_key, d_value = passed_on(setup, d_keys)
  d_sinks = None
  if sinks is not None:
    weight = jnp.exp(sinks.astype(dtype)[None, None, :, :, None] - log_total)
    d_sinks = -jnp.sum(weight * shared, axis=(0, 1, 4)).astype(sinks.dtype)
  return (
    _whole(d_query).astype(query.dtype),
    _whole(d_key).astype(key.dtype),
    _whole(d_value).astype(value.dtype),
    None,
    None,
    d_sinks,
  )


attend.defvjp(_forward, _backward)


def _add_gradients(
  setup: Setup, keys: Any, d_keys: Any, block: Any
) -> tuple[Any, jax.Array]:
  """Adds the gradients of a block of queries and a block of keys."""
  key, value, kv_tokens = keys
  (query, q_tokens, d_out, shared, log_total), d_query = block
  visible = _visible(setup, q_tokens, kv_tokens)

  def add(state: Any) -> Any:
    (d_key, d_value), d_query = state
    # The name by which FLOPs of recomputation are known.
    with jax.named_scope("rematted_computation"):
      logits = _logits(setup, query, key, visible)
    weights = _weights(logits, log_total, visible)
    d_value += _product("BKGTS,BTKGH->BSKH", weights.astype(d_out.dtype), d_out)
    d_weights = _product("BTKGH,BSKH->BKGTS", d_out, value)
    d_logits = weights * (d_weights - shared[..., None])
    if setup.logit_cap is not None:
      # Masked logits have a weight of zero.
      capped = jnp.where(visible[:, :, None], logits / setup.logit_cap, 0)
      d_logits *= 1 - capped**2
    d_logits = (d_logits * setup.scale).astype(query.dtype)
    d_query += _product("BKGTS,BSKH->BTKGH", d_logits, key)
    d_key += _product("BKGTS,BTKGH->BSKH", d_logits, query)
    return (d_key, d_value), d_query

  return jax.lax.cond(
    jnp.any(visible), add, lambda state: state, (d_keys, d_query)
  )


def _logits(
  setup: Setup, query: jax.Array, key: jax.Array, visible: jax.Array
) -> jax.Array:
  """Scaled, soft-capped and masked logits [B,K,G,T,S]."""
  logits = _product("BTKGH,BSKH->BKGTS", query, key) * setup.scale
  if setup.logit_cap is not None:
    logits = activations.soft_cap(logits, setup.logit_cap)
  return jnp.where(visible[:, :, None], logits, _LOWEST)


def _weights(
  logits: jax.Array, less: jax.Array, visible: jax.Array
) -> jax.Array:
  # Zero also where a query sees nothing, and its highest logit is the lowest.
  weights = jnp.exp(logits - less[..., None])
  return jnp.where(visible[:, :, None], weights, 0)


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  # float32 because the softmax takes differences, and sums grow long.
  dtype = precision.at_least_float32(x.dtype)
  return jnp.einsum(equation, x, y, preferred_element_type=dtype)


def _visible(setup: Setup, q: Tokens, kv: Tokens) -> jax.Array:
  """The mask of a block [B,1,T,S]."""
  return attention_mask.AttentionMask(
    q_positions=q.positions,
    kv_positions=kv.positions,
    q_segment_ids=q.segment_ids,
    kv_segment_ids=kv.segment_ids,
    q_prefix=q.prefix,
    kv_prefix=kv.prefix,
    rules=setup.rules,
  ).to_array()


def _blocks(tree: Any, size: int) -> Any:
  """[B,L,...] to [L / size,B,size,...]."""

  def cut_blocks(x: jax.Array) -> jax.Array:
    B, L, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, L // size, size, *rest), 1, 0)

  return jax.tree.map(cut_blocks, tree)


def _whole(x: jax.Array) -> jax.Array:
  """[n,B,size,...] to [B,n * size,...]."""
  number, B, size, *rest = x.shape
  return jnp.moveaxis(x, 0, 1).reshape(B, number * size, *rest)
