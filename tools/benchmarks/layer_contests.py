"""The layers that the bench compares with hand-written ones, by name."""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import (
  block,
  encoder_decoder_block,
  feed_forward,
  rms_norm,
  rotary_embedding,
)
from paxon.layers.attention import (
  cross_attention,
  grouped_query,
  head_norm,
  latent,
  position_bias,
  projections,
)
from paxon.tools.benchmarks import (
  decoder_lm_workload,
  layer_contest,
  pure_jax_attention,
  pure_jax_block,
  pure_jax_cross_block,
  pure_jax_latent_attention,
)

Workload = decoder_lm_workload.Workload
Maker = Callable[[Workload], layer_contest.Contest]

_NUM_DOCUMENTS = 3


def _tokens(workload: Workload) -> tuple[Any, Any]:
  """Returns tokens [B,T,D], and the positions and segments of packed rows."""
  rng = np.random.default_rng(1)
  B, T = workload.global_batch_size, workload.length
  x = rng.standard_normal((B, T, workload.config.embed_dim))
  cuts = np.sort(rng.integers(1, T, (B, _NUM_DOCUMENTS - 1)), axis=1)
  at = np.broadcast_to(np.arange(T), (B, T))
  segments = 1 + np.sum(at[:, :, None] >= cuts[:, None], axis=2)
  starts = np.concatenate([np.zeros((B, 1), int), cuts], axis=1)
  positions = at - np.take_along_axis(starts, segments - 1, axis=1)
  ids = (jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))
  return (jnp.asarray(x, workload.config.dtype),), ids


def _attention(
  workload: Workload, **fields: Any
) -> grouped_query.GroupedQueryAttention:
  c = workload.config
  given: dict[str, Any] = {
    "num_heads": c.num_heads,
    "num_kv_heads": c.num_kv_heads,
    "head_dim": c.head_dim,
    "rotary": rotary_embedding.Rotary(),
    "dtype": jnp.dtype(c.dtype),
  }
  return grouped_query.GroupedQueryAttention(**given | fields)


def _attention_contest(
  workload: Workload,
  *,
  fields: Callable[[Workload], Mapping[str, Any]] = lambda workload: {},
  **config: Any,
) -> layer_contest.Contest:
  module = _attention(workload, **fields(workload))
  c = pure_jax_attention.Config(
    num_heads=module.num_heads,
    num_kv_heads=module.num_kv_heads,
    head_dim=module.head_dim,
    dtype=workload.config.dtype,
    **config,
  )
  floats, integers = _tokens(workload)
  return layer_contest.Contest(
    module=module,
    baseline=functools.partial(pure_jax_attention.apply, c=c),
    floats=floats,
    integers=integers,
  )


def _block(workload: Workload, order: str) -> Any:
  dtype = jnp.dtype(workload.config.dtype)
  norm = functools.partial(rms_norm.RmsNorm, dtype=dtype)
  parts: dict[str, Any] = {
    "attention": _attention(workload),
    "feed_forward": feed_forward.GatedFeedForward(
      mlp_dim=workload.config.mlp_dim, dtype=dtype
    ),
  }
  if order == "parallel":
    return block.ParallelBlock(norm=norm(), **parts)
  parts |= {"attention_norm": norm(), "feed_forward_norm": norm()}
  if order == "pre":
    return block.TransformerBlock(**parts)
  if order == "post":
    return block.PostNormBlock(**parts)
  return block.SandwichBlock(
    post_attention_norm=norm(), post_feed_forward_norm=norm(), **parts
  )


def _block_contest(workload: Workload, *, order: str) -> layer_contest.Contest:
  c = pure_jax_block.Config(order=order, dtype=workload.config.dtype)
  floats, integers = _tokens(workload)
  return layer_contest.Contest(
    module=_block(workload, order),
    baseline=functools.partial(pure_jax_block.apply, c=c),
    floats=floats,
    integers=integers,
  )


def _memory(workload: Workload) -> tuple[jax.Array, jax.Array]:
  """Returns a memory half as long as the rows, and its segments."""
  rng = np.random.default_rng(2)
  B, S = workload.global_batch_size, workload.length // 2
  memory = rng.standard_normal((B, S, workload.config.embed_dim))
  segments = 1 + np.arange(S) * _NUM_DOCUMENTS // S
  ids = jnp.asarray(np.tile(segments, (B, 1)), jnp.int32)
  return jnp.asarray(memory, workload.config.dtype), ids


def _cross_attention(workload: Workload) -> cross_attention.CrossAttention:
  c = workload.config
  return cross_attention.CrossAttention(
    num_heads=c.num_heads,
    num_kv_heads=c.num_kv_heads,
    head_dim=c.head_dim,
    dtype=jnp.dtype(c.dtype),
  )


def _cross_contest(workload: Workload) -> layer_contest.Contest:
  (x,), (_, segments) = _tokens(workload)
  memory, memory_segments = _memory(workload)
  return layer_contest.Contest(
    module=_cross_attention(workload),
    baseline=functools.partial(
      pure_jax_cross_block.attention, dtype=workload.config.dtype
    ),
    floats=(x, memory),
    integers=(segments, memory_segments),
  )


def _cross_block_contest(workload: Workload) -> layer_contest.Contest:
  dtype = jnp.dtype(workload.config.dtype)
  norm = functools.partial(rms_norm.RmsNorm, dtype=dtype)
  (x,), (positions, segments) = _tokens(workload)
  memory, memory_segments = _memory(workload)

  def call(module: Any, x: Any, memory: Any, *integers: Any) -> jax.Array:
    positions, segments, memory_segments = integers
    return module(x, positions, segments, memory, memory_segments)

  return layer_contest.Contest(
    module=encoder_decoder_block.CrossBlock(
      self_attention_norm=norm(),
      self_attention=_attention(workload),
      cross_attention_norm=norm(),
      cross_attention=_cross_attention(workload),
      feed_forward_norm=norm(),
      feed_forward=feed_forward.GatedFeedForward(
        mlp_dim=workload.config.mlp_dim, dtype=dtype
      ),
    ),
    baseline=functools.partial(
      pure_jax_cross_block.block, dtype=workload.config.dtype
    ),
    floats=(x, memory),
    integers=(positions, segments, memory_segments),
    call=call,
  )


def _latent_contest(workload: Workload) -> layer_contest.Contest:
  c, dtype = workload.config, jnp.dtype(workload.config.dtype)
  floats, integers = _tokens(workload)
  return layer_contest.Contest(
    module=latent.LatentAttention(
      num_heads=c.num_heads,
      head_dim=c.head_dim,
      rope_dim=c.head_dim // 2,
      value_dim=c.head_dim,
      latent_dim=c.embed_dim // 4,
      rotary=rotary_embedding.Rotary(),
      latent_norm=rms_norm.RmsNorm(dtype=dtype),
      dtype=dtype,
    ),
    baseline=functools.partial(pure_jax_latent_attention.apply, dtype=c.dtype),
    floats=floats,
    integers=integers,
  )


def _all_heads(workload: Workload) -> Mapping[str, Any]:
  return {"num_kv_heads": workload.config.num_heads}


def _gpt2(workload: Workload) -> Mapping[str, Any]:
  return {
    **_all_heads(workload),
    "rotary": None,
    "use_bias": True,
    "projections": projections.CombinedProjections(),
  }


def _qk_norm(workload: Workload) -> Mapping[str, Any]:
  dtype = jnp.dtype(workload.config.dtype)
  norm = functools.partial(head_norm.HeadNorm, dtype=dtype)
  return {"query_norm": norm(), "key_norm": norm()}


def _alibi(workload: Workload) -> Mapping[str, Any]:
  del workload
  return {"rotary": None, "position_bias": position_bias.Alibi()}


# With the sizes of the workload, but where the summary says otherwise.
CONTESTS: Mapping[str, tuple[str, Maker]] = {
  "attention_multi_head": (
    "as many key/value heads as heads",
    functools.partial(_attention_contest, fields=_all_heads),
  ),
  "attention_grouped": ("grouped queries", _attention_contest),
  "attention_multi_query": (
    "one key/value head",
    functools.partial(
      _attention_contest, fields=lambda workload: {"num_kv_heads": 1}
    ),
  ),
  "attention_window": (
    "a window of 64",
    functools.partial(
      _attention_contest, fields=lambda workload: {"window": 64}, window=64
    ),
  ),
  "attention_cap": (
    "capped logits",
    functools.partial(
      _attention_contest,
      fields=lambda workload: {"logit_cap": 5.0},
      logit_cap=5.0,
    ),
  ),
  "attention_biases": (
    "one projection with biases, no rotation, as in GPT-2",
    functools.partial(_attention_contest, fields=_gpt2, rotary=False),
  ),
  "attention_qk_norm": (
    "norms of queries and keys",
    functools.partial(_attention_contest, fields=_qk_norm),
  ),
  "attention_alibi": (
    "ALiBi",
    functools.partial(
      _attention_contest, fields=_alibi, rotary=False, alibi=True
    ),
  ),
  "attention_bidirectional": (
    "both directions",
    functools.partial(
      _attention_contest,
      fields=lambda workload: {"causal": False},
      causal=False,
    ),
  ),
  "attention_cross": ("to a memory half as long", _cross_contest),
  "attention_latent": ("keys and values of a latent", _latent_contest),
  "block_pre": (
    "norms before the branches",
    functools.partial(_block_contest, order="pre"),
  ),
  "block_post": (
    "norms after the residuals",
    functools.partial(_block_contest, order="post"),
  ),
  "block_sandwich": (
    "norms on both sides",
    functools.partial(_block_contest, order="sandwich"),
  ),
  "block_parallel": (
    "attention beside feed-forward",
    functools.partial(_block_contest, order="parallel"),
  ),
  "block_cross": (
    "of a decoder that reads a memory",
    _cross_block_contest,
  ),
}
