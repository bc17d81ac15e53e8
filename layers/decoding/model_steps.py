"""The two steps of generation, from a linen model and its variables.

`generate` knows functions only; these make them from any linen module that has
`prefill` and `decode_step` as `layers.models.decoder_lm.DecoderLm` has.
"""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
import jax

from paxon.layers.attention import kv_cache
from paxon.layers.decoding import generate

Variables = Mapping[str, Any]


def prefill(
  model: nn.Module, variables: Variables, **inputs: jax.Array
) -> generate.Prefill:
  """Returns the step that reads the prompts and makes the cache.

  Args:
    model: Not bound.
    variables: Its variables; a cache among them is not used.
    **inputs: More of what the model's `prefill` is called with, one row for
      each prompt, such as `encoder_inputs`, `encoder_positions` and
      `encoder_segment_ids` of an encoder-decoder.
  """
  more: dict[str, Any] = dict(inputs)

  def step(
    ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    cache_length: int,
    at: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    return model.apply(
      _without_cache(variables),
      ids,
      positions,
      segment_ids,
      cache_length=cache_length,
      at=at,
      **more,
      method="prefill",
      mutable=[kv_cache.COLLECTION],
    )

  return step


def decode_step(model: nn.Module, variables: Variables) -> generate.DecodeStep:
  """Returns the step that appends one id per row."""

  def step(
    cache: Any, ids: jax.Array, positions: jax.Array, segment_ids: jax.Array
  ) -> tuple[jax.Array, Any]:
    return model.apply(
      {**_without_cache(variables), **cache},
      ids,
      positions,
      segment_ids,
      method="decode_step",
      mutable=[kv_cache.COLLECTION],
    )

  return step


def _without_cache(variables: Variables) -> dict[str, Any]:
  return {k: v for k, v in variables.items() if k != kv_cache.COLLECTION}
