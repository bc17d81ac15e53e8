"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024)."""

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
  sizes = gated_decoder.heads(fields, kv_heads=None, head_dim=None)
  bias = fields.flag("attention_bias", False)
  # Our gated feed-forward layer has no bias, and no known file of this family
  # asks for one.
  fields.one_of("mlp_bias", False, {False: False})
  num_layers = fields.size("num_hidden_layers")
  result = gated_decoder.GatedDecoder(
    vocab_size=fields.size("vocab_size"),
    mlp_dim=fields.size("intermediate_size"),
    windows=(None,) * num_layers,
    rope=rope.read(
      fields,
      head_dim=sizes["head_dim"],
      max_length=fields.size("max_position_embeddings", 2048),
    ),
    activation=fields.one_of("hidden_act", "silu", activations.SERVED),
    epsilon=fields.number("rms_norm_eps", 1e-6),
    tied=fields.flag("tie_word_embeddings", False),
    qkv_bias=bias,
    output_bias=bias,
    **sizes,
  )
  fields.check_all_read()
  return result


FAMILY = family.Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  read=_read,
)
