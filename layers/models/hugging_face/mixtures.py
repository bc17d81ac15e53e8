"""Decoders with mixtures of experts: Mixtral, Qwen, OLMoE, gpt-oss.

- Mixtral 8x7B and 8x22B (Jiang et al. 2024, https://arxiv.org/abs/2401.04088)
- Qwen 1.5 and 2 with a shared expert (Yang et al. 2024,
  https://arxiv.org/abs/2407.10671)
- Qwen 3 (Yang et al. 2025, https://arxiv.org/abs/2505.09388)
- Qwen3-Next (Qwen Team 2025), whose layers have gated delta nets (Yang et al.
  2024, https://arxiv.org/abs/2412.06464), and every fourth gated attention
- OLMoE (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060)
- gpt-oss 20b and 120b (OpenAI 2025, https://arxiv.org/abs/2508.10925). Its
  files have experts in MXFP4, which are read as bfloat16 (`weight_files`).
"""

from typing import Any

from paxon.layers.models.hugging_face import (
  decoder,
  decoder_table,
  delta_layers,
  expert_layers,
  family,
  llama,
)

_GPT_OSS_ROPE = {
  "rope_type": "yarn",
  "factor": 32.0,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "truncate": False,
  "original_max_position_embeddings": 4096,
}


def _read_mixtral(fields: family.Fields) -> decoder.Decoder:
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
  return decoder_table.read(
    fields,
    windows=(window,) * fields.size("num_hidden_layers"),
    max_length=131_072,
    kv_heads=8,
    epsilon=1e-5,
    rope={"theta": 1e6},
    experts=experts,
  )


def _read_qwen2_moe(fields: family.Fields) -> decoder.Decoder:
  num_layers = fields.size("num_hidden_layers", 24)
  windows = llama.read_windows(
    fields, has_window=lambda i, last: i % 2 == 0 and i < last
  )
  return decoder_table.read(
    fields,
    windows=windows,
    max_length=32_768,
    kv_heads=16,
    attention={"qkv_bias": fields.flag("qkv_bias", True)},
    experts=expert_layers.Experts(
      **_read_qwen_experts(fields, num_experts=60, num_chosen=4, mlp_dim=1408),
      shared_dim=fields.size("shared_expert_intermediate_size", 5632),
    ),
    dense_layers=_read_dense_layers(fields, num_layers),
  )


def _read_qwen3_moe(fields: family.Fields) -> decoder.Decoder:
  num_layers = fields.size("num_hidden_layers", 24)
  bias = fields.flag("attention_bias", False)
  return decoder_table.read(
    fields,
    windows=(llama.read_window(fields),) * num_layers,
    max_length=32_768,
    kv_heads=4,
    attention={
      "qkv_bias": bias,
      "output_bias": bias,
      "head_norm": "shared",
    },
    experts=expert_layers.Experts(
      **_read_qwen_experts(fields, num_experts=128, num_chosen=8, mlp_dim=768)
    ),
    dense_layers=_read_dense_layers(fields, num_layers),
  )


def _read_qwen3_next(fields: family.Fields) -> decoder.Decoder:
  num_layers = fields.size("num_hidden_layers", 48)
  bias = fields.flag("attention_bias", False)
  return decoder_table.read(
    fields,
    windows=(None,) * num_layers,
    max_length=32_768,
    kv_heads=2,
    head_dim=256,
    rope={"partial": 0.25},
    attention={
      "qkv_bias": bias,
      "output_bias": bias,
      "head_norm": "shared",
      "has_output_gate": True,
    },
    norm={"epsilon": fields.number("rms_norm_eps", 1e-6), "offset": 1.0},
    delta=delta_layers.read(fields),
    experts=expert_layers.Experts(
      **_read_qwen_experts(
        fields, num_experts=512, num_chosen=10, mlp_dim=512, normalize=True
      ),
      shared_dim=fields.size("shared_expert_intermediate_size", 512),
    ),
    dense_layers=_read_dense_layers(fields, num_layers),
  )


def _read_qwen_experts(
  fields: family.Fields,
  *,
  mlp_dim: int,
  normalize: bool = False,
  **defaults: int,
) -> dict[str, Any]:
  return {
    **expert_layers.read_router(
      fields, experts_field="num_experts", balance_weight=0.001, **defaults
    ),
    "mlp_dim": fields.size("moe_intermediate_size", mlp_dim),
    "normalize": fields.flag("norm_topk_prob", normalize),
  }


def _read_dense_layers(
  fields: family.Fields, num_layers: int
) -> tuple[int, ...]:
  """Returns the layers without experts of Qwen 2 and 3.

  Raises:
    UnsupportedConfigError: A listed layer does not exist.
  """
  step = fields.size("decoder_sparse_step", 1)
  listed = fields.get("mlp_only_layers", None) or []
  valid = isinstance(listed, list) and all(
    isinstance(i, int) and not isinstance(i, bool) and 0 <= i < num_layers
    for i in listed
  )
  if not valid:
    fields.reject("mlp_only_layers", f"layers from 0 to {num_layers - 1}")
  return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


def _read_olmoe(fields: family.Fields) -> decoder.Decoder:
  llama.reject_window(fields)
  bias = fields.flag("attention_bias", False)
  return decoder_table.read(
    fields,
    windows=(None,) * fields.size("num_hidden_layers", 16),
    max_length=4096,
    epsilon=1e-5,
    attention={
      "qkv_bias": bias,
      "output_bias": bias,
      "head_norm": "width",
      "qkv_limit": fields.optional_number("clip_qkv", None),
    },
    experts=expert_layers.Experts(
      **expert_layers.read_router(
        fields,
        experts_field="num_experts",
        num_experts=64,
        num_chosen=8,
        balance_weight=0.01,
      ),
      mlp_dim=fields.size("intermediate_size", 2048),
      normalize=fields.flag("norm_topk_prob", False),
    ),
  )


def _read_gpt_oss(fields: family.Fields) -> decoder.Decoder:
  window = fields.optional_size("sliding_window", 128)
  num_layers = fields.size("num_hidden_layers", 36)
  windows = tuple(None if i % 2 else window for i in range(num_layers))
  if fields.get("layer_types", None) is not None:
    windows = decoder_table.read_layer_types(fields, window)
  bias = fields.flag("attention_bias", True)
  return decoder_table.read(
    fields,
    windows=windows,
    max_length=131_072,
    kv_heads=8,
    head_dim=64,
    epsilon=1e-5,
    rope={"theta": 150_000.0, "default": _GPT_OSS_ROPE},
    attention={"qkv_bias": bias, "output_bias": bias, "has_sinks": True},
    experts=expert_layers.Experts(
      **expert_layers.read_router(
        fields,
        experts_field="num_local_experts",
        num_experts=128,
        num_chosen=4,
        balance_weight=0.001,
      ),
      mlp_dim=fields.size("intermediate_size", 2880),
      # The softmax over the chosen logits is that over all, normalized.
      normalize=True,
      clamp={
        "limit": fields.number("swiglu_limit", 7.0),
        "alpha": fields.number("swiglu_alpha", 1.702),
      },
    ),
  )


MIXTRAL = family.Family(
  model_type="mixtral",
  architecture="MixtralForCausalLM",
  read=_read_mixtral,
  # Noise of training, as dropout.
  inert=("router_jitter_noise",),
)
QWEN2_MOE = family.Family(
  model_type="qwen2_moe",
  architecture="Qwen2MoeForCausalLM",
  read=_read_qwen2_moe,
  neutral={"use_mrope": (False,)},
)
QWEN3_MOE = family.Family(
  model_type="qwen3_moe",
  architecture="Qwen3MoeForCausalLM",
  read=_read_qwen3_moe,
  # All layers have a window, or none has.
  inert=("max_window_layers",),
)
QWEN3_NEXT = family.Family(
  model_type="qwen3_next",
  architecture="Qwen3NextForCausalLM",
  read=_read_qwen3_next,
  # A field of Qwen 3 that published files still have.
  neutral={"use_sliding_window": (False,)},
)
OLMOE = family.Family(
  model_type="olmoe",
  architecture="OlmoeForCausalLM",
  read=_read_olmoe,
  neutral={"use_sliding_window": (False,)},
)
GPT_OSS = family.Family(
  model_type="gpt_oss",
  architecture="GptOssForCausalLM",
  read=_read_gpt_oss,
  # Names of fields in the first code of the model.
  inert=("experts_per_token", "initial_context_length"),
  # Its activation does not depend on it.
  neutral={"hidden_act": ("silu",)},
  packings=("mxfp4",),
)
