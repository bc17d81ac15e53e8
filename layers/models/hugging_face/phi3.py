"""Phi-3 and Phi-4-mini (Abdin et al. 2024, https://arxiv.org/abs/2404.14219).

Files hold queries, keys and values in one tensor, and the gate with what it
gates; with us they are parameters of their own. Of LongRoPE the short factors
are served (`long_rope`).
"""

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
  window = fields.optional_size("sliding_window", None)
  result = gated_decoder.GatedDecoder(
    vocab_size=fields.size("vocab_size"),
    mlp_dim=fields.size("intermediate_size"),
    windows=(window,) * fields.size("num_hidden_layers"),
    rope=rope.read(
      fields,
      head_dim=sizes["head_dim"],
      max_length=fields.size("max_position_embeddings", 4096),
      partial=1.0,
      original_length=fields.size("original_max_position_embeddings", 4096),
      aliases={"su": "longrope", "yarn": "longrope"},
    ),
    activation=fields.one_of("hidden_act", "silu", activations.SERVED),
    epsilon=fields.number("rms_norm_eps", 1e-5),
    tied=fields.flag("tie_word_embeddings", False),
    is_fused=True,
    **sizes,
  )
  fields.check_all_read()
  return result


FAMILY = family.Family(
  model_type="phi3",
  architecture="Phi3ForCausalLM",
  read=_read,
)
