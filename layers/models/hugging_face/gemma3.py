"""Gemma 3, its text model (Gemma Team 2025, https://arxiv.org/abs/2503.19786)."""

from collections.abc import Mapping
from typing import Any

from paxon.layers.models.hugging_face import (
  config_fields,
  family,
  gated_decoder,
  gemma2,
  rope,
)

# By the kind of layer: the field of its base in older files, and the base.
_BASES = {
  "full_attention": ("rope_theta", 1_000_000.0),
  "sliding_attention": ("rope_local_base_freq", 10_000.0),
}


def _read(config: Mapping[str, Any]) -> gated_decoder.GatedDecoder:
  # Files with `layer_types` repeat the period that some of them had once.
  repeated = ("_sliding_window_pattern",) if config.get("layer_types") else ()
  fields = config_fields.Fields(
    config,
    architecture=FAMILY.architecture,
    inert=("cache_implementation", *repeated),
  )
  parts = gemma2.common(fields, period=None)
  # The class of transformers reads this field and does not use it.
  fields.one_of("attn_logit_softcapping", None, {None: None})
  ropes = {
    kind: _rope(fields, kind, head_dim=parts["head_dim"]) for kind in _BASES
  }
  result = gated_decoder.GatedDecoder(
    **parts,
    rope=ropes["full_attention"],
    local_rope=ropes["sliding_attention"],
    has_head_norm=True,
    logit_cap=gemma2.optional_number(fields, "final_logit_softcapping", None),
  )
  fields.check_all_read()
  return result


def _rope(
  fields: config_fields.Fields, kind: str, *, head_dim: int
) -> rope.Rope:
  """Returns the rotary positions of one kind of layers."""
  by_kind = fields.any("rope_parameters", None) or {}
  if not isinstance(by_kind, dict) or not set(by_kind) <= set(_BASES):
    fields.refuse("rope_parameters", f"objects for {' and '.join(_BASES)}")
  scaling = fields.any("rope_scaling", None)
  if scaling and by_kind:
    fields.refuse("rope_scaling", "null beside rope_parameters")
  if kind == "full_attention" and scaling:
    by_kind = {kind: scaling}
  theta = fields.number(*_BASES[kind])
  values = {"rope_theta": theta, **(by_kind.get(kind) or {})}
  return rope.read(
    config_fields.Fields(
      {"model_type": FAMILY.model_type, "rope_parameters": values},
      architecture=FAMILY.architecture,
    ),
    head_dim=head_dim,
    max_length=fields.size("max_position_embeddings", 131_072),
  )


FAMILY = family.Family(
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  read=_read,
)
