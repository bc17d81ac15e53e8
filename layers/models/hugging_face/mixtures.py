"""Decoders with mixtures of experts: Mixtral.

- Mixtral 8x7B and 8x22B (Jiang et al. 2024, https://arxiv.org/abs/2401.04088)
"""

from paxon.layers.models.hugging_face import (
  expert_layers,
  family,
  gated_decoder,
  llama,
)

# The auxiliary loss is part of training here, whatever a forward pass returns.
_INERT = ("output_router_logits",)


def _read_mixtral(fields: family.Fields) -> gated_decoder.GatedDecoder:
  window = fields.optional_size("sliding_window", None)
  experts = expert_layers.Experts(
    **expert_layers.read_router(
      fields,
      experts_field="num_local_experts",
      num_experts=8,
      num_chosen=2,
      balance_weight=0.001,
    ),
    mlp_dim=fields.size("intermediate_size", 14_336),
    normalize=True,
    at="block_sparse_moe",
    tensors=("w1", "w3", "w2"),
  )
  return llama.read_decoder(
    fields,
    windows=(window,) * fields.size("num_hidden_layers"),
    max_length=131_072,
    kv_heads=8,
    epsilon=1e-5,
    rope_options={"theta": 1e6},
    experts=experts,
  )


MIXTRAL = family.Family(
  model_type="mixtral",
  architecture="MixtralForCausalLM",
  read=_read_mixtral,
  inert=_INERT,
  # Noise of the experts' input, which is not supported.
  neutral={"router_jitter_noise": (0.0, 0)},
)
