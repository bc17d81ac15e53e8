"""Mistral 7B and Nemo (Jiang et al. 2023, https://arxiv.org/abs/2310.06825)."""

from collections.abc import Mapping
from typing import Any

from paxon.layers.models.hugging_face import (
  activations,
  config_fields,
  family,
  gated_decoder,
  rope,
)


def _read(config: Mapping[str, Any]) -> gated_decoder.GatedDecoder:
  fields = config_fields.Fields(config, architecture=FAMILY.architecture)
  sizes = gated_decoder.heads(fields, kv_heads=8, head_dim=None)
  window = fields.optional_size("sliding_window", 4096)
  result = gated_decoder.GatedDecoder(
    vocab_size=fields.size("vocab_size"),
    mlp_dim=fields.size("intermediate_size"),
    windows=(window,) * fields.size("num_hidden_layers"),
    rope=rope.read(
      fields,
      head_dim=sizes["head_dim"],
      max_length=fields.size("max_position_embeddings", 131_072),
    ),
    activation=fields.one_of("hidden_act", "silu", activations.SERVED),
    epsilon=fields.number("rms_norm_eps", 1e-6),
    tied=fields.flag("tie_word_embeddings", False),
    **sizes,
  )
  fields.check_all_read()
  return result


FAMILY = family.Family(
  model_type="mistral",
  architecture="MistralForCausalLM",
  read=_read,
)
