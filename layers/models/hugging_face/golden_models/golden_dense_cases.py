"""Configurations of the golden models of families that are tables."""

from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  golden_mixture_cases,
)

SIZES = golden_mixture_cases.SIZES
_GPTJ = {
  "vocab_size": 64,
  "n_embd": 32,
  "n_layer": 2,
  "n_head": 2,
  "n_positions": 64,
  "rotary_dim": 8,
}
_BIGCODE = {
  "vocab_size": 64,
  "n_embd": 32,
  "n_layer": 2,
  "n_head": 4,
  "n_positions": 64,
}
_FALCON = {
  "vocab_size": 64,
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
}
_LATENT = {
  "num_key_value_heads": 4,
  "q_lora_rank": 20,
  "kv_lora_rank": 16,
  "qk_nope_head_dim": 12,
  "qk_rope_head_dim": 8,
  "v_head_dim": 10,
}
_NO_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_YARN = {
  "rope_type": "yarn",
  "rope_theta": 100.0,
  "factor": 4.0,
  "original_max_position_embeddings": 16,
}


_EXPERTS = {
  "num_attention_heads": 4,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "moe_intermediate_size": 24,
}
# `name: (class of transformers, fields besides `SIZES`)`.
_CONFIGS = {
  "arcee": ("ArceeForCausalLM", {"attention_bias": True, "mlp_bias": True}),
  "cohere": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 2.0}),
  "cohere2": (
    "Cohere2ForCausalLM",
    {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 2.0},
  ),
  "cwm": ("CwmForCausalLM", {"num_hidden_layers": 3, "sliding_window": 4}),
  "ernie4_5": ("Ernie4_5ForCausalLM", {"use_bias": True, "head_dim": 12}),
  "bloom": (
    "BloomForCausalLM",
    {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
  ),
  "falcon": ("FalconForCausalLM", _FALCON),
  "falcon_new": (
    "FalconForCausalLM",
    {
      **_FALCON,
      "new_decoder_architecture": True,
      "num_kv_heads": 2,
      "bias": True,
    },
  ),
  "falcon_sequential": (
    "FalconForCausalLM",
    {**_FALCON, "parallel_attn": False, "multi_query": False},
  ),
  "gpt_bigcode": ("GPTBigCodeForCausalLM", _BIGCODE),
  "gpt_bigcode_heads": (
    "GPTBigCodeForCausalLM",
    {**_BIGCODE, "multi_query": False},
  ),
  "gpt_neo": (
    "GPTNeoForCausalLM",
    {
      "vocab_size": 64,
      "hidden_size": 32,
      "num_layers": 2,
      "num_heads": 4,
      "max_position_embeddings": 64,
      "window_size": 5,
      "attention_types": [[["global", "local"], 1]],
    },
  ),
  "mpt": (
    "MptForCausalLM",
    {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4},
  ),
  "opt": (
    "OPTForCausalLM",
    {
      "vocab_size": 64,
      "hidden_size": 32,
      "ffn_dim": 48,
      "num_hidden_layers": 2,
      "num_attention_heads": 4,
      "max_position_embeddings": 64,
      "word_embed_proj_dim": 32,
    },
  ),
  "exaone4": (
    "Exaone4ForCausalLM",
    {"num_hidden_layers": 4, "sliding_window": 5},
  ),
  "dots1": (
    "Dots1ForCausalLM",
    {
      **_EXPERTS,
      "n_shared_experts": 2,
      "n_group": 2,
      "first_k_dense_replace": 1,
      "max_window_layers": 1,
      "sliding_window": 5,
    },
  ),
  "ernie4_5_moe": (
    "Ernie4_5_MoeForCausalLM",
    {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 20},
  ),
  "exaone_moe": (
    "ExaoneMoeForCausalLM",
    {
      "num_experts": 8,
      "num_experts_per_tok": 3,
      "moe_intermediate_size": 24,
      "num_hidden_layers": 4,
      "sliding_window": 5,
    },
  ),
  "flex_olmo": (
    "FlexOlmoForCausalLM",
    {"num_experts": 6, "num_experts_per_tok": 3},
  ),
  "glm4_moe": (
    "Glm4MoeForCausalLM",
    {**_EXPERTS, "use_qk_norm": True, "head_dim": 12, "num_mtp_layers": 0},
  ),
  "glm4_moe_lite": (
    "Glm4MoeLiteForCausalLM",
    {**_EXPERTS, **_LATENT, "num_hidden_layers": 3},
  ),
  "youtu": ("YoutuForCausalLM", _LATENT),
  "hunyuan_moe": (
    "HunYuanMoEV1ForCausalLM",
    {"num_experts": 6, "moe_topk": 3, "head_dim": 12},
  ),
  "minimax_m2": (
    "MiniMaxM2ForCausalLM",
    {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12},
  ),
  "solar_open": ("SolarOpenForCausalLM", {**_EXPERTS, "head_dim": 16}),
  "glm": ("GlmForCausalLM", {"head_dim": 12}),
  "glm4": ("Glm4ForCausalLM", {"head_dim": 12}),
  "gptj": ("GPTJForCausalLM", _GPTJ),
  "granite": (
    "GraniteForCausalLM",
    {
      "attention_multiplier": 0.2,
      "embedding_multiplier": 3.0,
      "logits_scaling": 0.5,
      "residual_multiplier": 0.7,
    },
  ),
  "helium": ("HeliumForCausalLM", {"head_dim": 8}),
  "hunyuan_dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": 12}),
  "jais2": ("Jais2ForCausalLM", {}),
  "ministral": ("MinistralForCausalLM", {"sliding_window": 5, "head_dim": 12}),
  "nemotron": ("NemotronForCausalLM", {"attention_bias": True}),
  "olmo": ("OlmoForCausalLM", {"clip_qkv": 0.8}),
  "olmo2": ("Olmo2ForCausalLM", {"attention_bias": True}),
  "olmo3": (
    "Olmo3ForCausalLM",
    {
      "num_hidden_layers": 4,
      "sliding_window": 5,
      "rope_parameters": {
        "full_attention": _YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
      },
    },
  ),
  "persimmon": ("PersimmonForCausalLM", {}),
  "phi": ("PhiForCausalLM", {}),
  "seed_oss": (
    "SeedOssForCausalLM",
    {"head_dim": 12, "attention_out_bias": True},
  ),
  "smollm3": (
    "SmolLM3ForCausalLM",
    {
      "num_hidden_layers": 4,
      "use_sliding_window": True,
      "sliding_window": 5,
      "no_rope_layer_interval": 2,
    },
  ),
  "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}),
  "stablelm_parallel": ("StableLmForCausalLM", {"use_parallel_residual": True}),
  "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 5}),
}
# Tensors of experts in files, where they are not those of Qwen.
_OF_EXPERTS = {"minimax_m2": ("w1", "w3", "w2")}
_RENAMED = {
  "ernie4_5_moe": {"mlp.gate.moe_statics": "mlp.moe_statics"},
  "exaone_moe": {"mlp.gate.e_score": "mlp.e_score"},
  "minimax_m2": {".mlp.": ".block_sparse_moe."},
}
CASES = tuple(
  golden_case.Case(
    name=name,
    architecture=architecture,
    renamed=_RENAMED.get(name, {}),
    experts=_OF_EXPERTS.get(name, ("gate_proj", "up_proj", "down_proj")),
    config={**({} if "vocab_size" in fields else SIZES), **_NO_IDS, **fields},
  )
  for name, (architecture, fields) in _CONFIGS.items()
)
