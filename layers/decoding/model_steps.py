"""Prefill and decode steps of a linen model, for `generate`.

The model has the methods `prefill` and `decode_step`, such as
`layers.models.decoder_lm.DecoderLm`.
"""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
import jax

from paxon.layers.attention import kv_cache
from paxon.layers.decoding import generate

Variables = Mapping[str, Any]


def make_prefill(
  model: nn.Module, variables: Variables, **inputs: jax.Array
) -> generate.Prefill:
  """Returns the step that reads prompts and creates the cache.

  A cache among the variables of the unbound model is ignored. `inputs` are
  further arguments of the model's `prefill`, such as `encoder_inputs`.
  """

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
      **dict[str, Any](inputs),
      method="prefill",
      mutable=[kv_cache.COLLECTION],
    )

  return step


def make_decode_step(
  model: nn.Module, variables: Variables
) -> generate.DecodeStep:
  """Returns the step that appends one id to each sequence."""

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
