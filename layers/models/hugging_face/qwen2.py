"""Qwen 2 and 2.5 (Yang et al. 2024, https://arxiv.org/abs/2407.10671)."""

from collections.abc import Mapping
from typing import Any

from paxon.layers.models.hugging_face import (
  activations,
  config_fields,
  family,
  gated_decoder,
  rope,
  windows,
)


def _read(config: Mapping[str, Any]) -> gated_decoder.GatedDecoder:
  fields = config_fields.Fields(config, architecture=FAMILY.architecture)
  sizes = gated_decoder.heads(fields, kv_heads=32, head_dim=None)
  result = gated_decoder.GatedDecoder(
    vocab_size=fields.size("vocab_size"),
    mlp_dim=fields.size("intermediate_size"),
    windows=windows.read(fields, num_layers=fields.size("num_hidden_layers")),
    rope=rope.read(
      fields,
      head_dim=sizes["head_dim"],
      max_length=fields.size("max_position_embeddings", 32_768),
    ),
    activation=fields.one_of("hidden_act", "silu", activations.SERVED),
    epsilon=fields.number("rms_norm_eps", 1e-6),
    tied=fields.flag("tie_word_embeddings", False),
    qkv_bias=True,
    **sizes,
  )
  fields.check_all_read()
  return result


FAMILY = family.Family(
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  read=_read,
)
