"""Attention layers for tests, from flat settings; results of kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.attention import (
  grouped_query,
  head_norm,
  kernels,
  projections,
)
from paxon.layers.attention import mask as attention_mask

_MASK = ("causal", "window", "right_window", "chunk")
_LOGITS = {
  "logit_cap": "cap",
  "logit_scale": "scale",
  "query_scale": "query_scale",
  "position_bias": "position_bias",
  "relative_position": "relative_position",
  "sinks": "sinks",
}
_NORMS = {
  "query_norm": "query_norm",
  "key_norm": "key_norm",
  "after_rotary": "after_rotary",
}
_PROJECTIONS = (
  "kernel_init",
  "query_init",
  "output_init",
  "use_bias",
  "output_bias",
)


def grouped_query_attention(
  num_heads: int, **settings: Any
) -> grouped_query.GroupedQueryAttention:
  """Returns a layer with `settings` as in `fields`."""
  return grouped_query.GroupedQueryAttention(num_heads, **fields(**settings))


def fields(
  *, combined: bool = False, gated: bool = False, **settings: Any
) -> dict[str, Any]:
  """Returns the fields of an attention layer.

  Args:
    combined: Whether one kernel makes queries, keys and values.
    gated: Whether the weighted values have gates.
    **settings: Fields of the layer and of its parts: of `MaskRules`, of
      `Logits` (`logit_cap` and `logit_scale` for its `cap` and `scale`), of
      `QueryKeyNorm` and of `Projections`.
  """
  mask = {k: settings.pop(k) for k in _MASK if k in settings}
  logits = {v: settings.pop(k) for k, v in _LOGITS.items() if k in settings}
  norms = {v: settings.pop(k) for k, v in _NORMS.items() if k in settings}
  of_projections = {k: settings.pop(k) for k in _PROJECTIONS if k in settings}
  if mask:
    settings["mask"] = attention_mask.MaskRules(**mask)
  if logits:
    settings["logits"] = kernels.Logits(**logits)
  if norms:
    settings["head_norm"] = head_norm.QueryKeyNorm(**norms)
  kind = projections.SeparateProjections
  if gated:
    kind = projections.GatedProjections
  if combined:
    kind = projections.CombinedProjections
  if combined or gated or of_projections:
    settings["projections"] = kind(**of_projections)
  return settings


def outcome(
  kernel: Any, arrays: Any, mask: Any, **keywords: Any
) -> list[np.ndarray]:
  """Returns the output, and the gradients of the sum of its sines."""

  def loss(arrays: Any) -> tuple[jax.Array, jax.Array]:
    out = kernel(*arrays, mask, **keywords)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

  (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
  return [np.asarray(x, np.float64) for x in (out, *gradients)]
