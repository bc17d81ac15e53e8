"""Golden cases of the families of decoders."""

from paxon.layers.models.hugging_face import golden_case

_SIZES = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
}
_GPT2 = {
  "vocab_size": 64,
  "n_embd": 32,
  "n_layer": 2,
  "n_head": 4,
  "n_positions": 24,
  "bos_token_id": 0,
  "eos_token_id": 0,
}
_NEOX = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "max_position_embeddings": 64,
}
_LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 100.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}

CASES = (
  golden_case.Case(
    name="llama2",
    architecture="LlamaForCausalLM",
    config={**_SIZES, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
  ),
  golden_case.Case(
    name="llama3",
    architecture="LlamaForCausalLM",
    config={
      **_SIZES,
      "num_hidden_layers": 3,
      "head_dim": 12,
      "rope_parameters": _LLAMA3,
      "attention_bias": True,
      "tie_word_embeddings": True,
      "hidden_act": "gelu",
    },
  ),
  golden_case.Case(
    name="mistral",
    architecture="MistralForCausalLM",
    config={**_SIZES, "sliding_window": 7, "head_dim": 16},
  ),
  golden_case.Case(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    config={
      **_SIZES,
      "num_hidden_layers": 4,
      "use_sliding_window": True,
      "sliding_window": 5,
      "max_window_layers": 2,
      "tie_word_embeddings": True,
      "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    },
  ),
  golden_case.Case(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    config={
      **_SIZES,
      "num_hidden_layers": 3,
      "head_dim": 16,
      "use_sliding_window": True,
      "sliding_window": 6,
      "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
      ],
      "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
      },
    },
  ),
  golden_case.Case(
    name="phi3",
    architecture="Phi3ForCausalLM",
    config={
      **_SIZES,
      "sliding_window": 9,
      "partial_rotary_factor": 0.5,
      "pad_token_id": 0,
    },
  ),
  golden_case.Case(
    name="phi3_longrope",
    architecture="Phi3ForCausalLM",
    config={
      **_SIZES,
      "original_max_position_embeddings": 32,
      "tie_word_embeddings": True,
      "pad_token_id": 0,
      "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
      },
    },
  ),
  golden_case.Case(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    config={**_GPT2, "n_inner": 48},
  ),
  golden_case.Case(
    name="gpt2_scaled",
    architecture="GPT2LMHeadModel",
    config={
      **_GPT2,
      "n_layer": 3,
      "scale_attn_by_inverse_layer_idx": True,
      "activation_function": "gelu",
      "tie_word_embeddings": False,
    },
  ),
  golden_case.Case(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    config={**_NEOX, "rotary_pct": 0.5, "intermediate_size": 40},
    renamed={"lm_head.weight": "embed_out.weight"},
  ),
  golden_case.Case(
    name="gpt_neox_sequential",
    architecture="GPTNeoXForCausalLM",
    config={
      **_NEOX,
      "use_parallel_residual": False,
      "attention_bias": False,
      "tie_word_embeddings": True,
      "hidden_act": "gelu_new",
    },
  ),
)
