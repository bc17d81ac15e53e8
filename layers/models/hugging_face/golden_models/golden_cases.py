"""Configurations of the golden models of all families."""

from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  golden_dense_cases,
  golden_mixture_cases,
  media_cases,
)

_SIZES = golden_mixture_cases.SIZES
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
_GEMMA = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 12,
  "max_position_embeddings": 64,
}
_GEMMA3_ROPE = {
  "full_attention": {
    "rope_type": "linear",
    "factor": 4.0,
    "rope_theta": 1000.0,
  },
  "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
}
_T5 = {
  "vocab_size": 64,
  "d_model": 32,
  "num_heads": 4,
  "num_layers": 2,
  # Rows reach all buckets.
  "relative_attention_num_buckets": 8,
  "relative_attention_max_distance": 16,
  "decoder_start_token_id": 0,
}
_BERT = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "max_position_embeddings": 24,
}
_MAMBA2 = {
  "vocab_size": 64,
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_heads": 8,
  "head_dim": 8,
  "state_size": 6,
  "n_groups": 2,
  "chunk_size": 8,
}


CASES = (
  *golden_dense_cases.CASES,
  *golden_mixture_cases.CASES,
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
    name="llama_biased",
    architecture="LlamaForCausalLM",
    config={**_SIZES, "attention_bias": True, "mlp_bias": True},
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
    # Sequences and continuations are longer than the positions.
    name="llama_dynamic",
    architecture="LlamaForCausalLM",
    config={
      **_SIZES,
      "max_position_embeddings": 12,
      "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 100.0,
        "factor": 4.0,
      },
    },
  ),
  golden_case.Case(
    # Sequences are longer than the original length.
    name="phi3_longrope_long",
    architecture="Phi3ForCausalLM",
    config={
      **_SIZES,
      "original_max_position_embeddings": 12,
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
  golden_case.Case(
    name="mamba2", architecture="Mamba2ForCausalLM", config=_MAMBA2
  ),
  golden_case.Case(
    name="mamba2_biased",
    architecture="Mamba2ForCausalLM",
    config={
      **_MAMBA2,
      "use_bias": True,
      "use_conv_bias": False,
      "conv_kernel": 3,
      "tie_word_embeddings": True,
      "time_step_limit": (0.3, 0.9),
    },
  ),
  golden_case.Case(
    name="gemma",
    architecture="GemmaForCausalLM",
    config={
      **_GEMMA,
      "num_key_value_heads": 1,
      "hidden_act": "gelu",
      "rms_norm_eps": 1e-3,
    },
  ),
  golden_case.Case(
    name="gemma_untied",
    architecture="GemmaForCausalLM",
    config={
      **_GEMMA,
      "attention_bias": True,
      "tie_word_embeddings": False,
      "hidden_act": "relu",
      "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
  ),
  golden_case.Case(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    config={
      **_GEMMA,
      # The last layer is half of a period.
      "num_hidden_layers": 3,
      "query_pre_attn_scalar": 5,
      "sliding_window": 5,
      "attn_logit_softcapping": 2.0,
      "final_logit_softcapping": 3.0,
    },
  ),
  golden_case.Case(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    config={
      **_GEMMA,
      "query_pre_attn_scalar": 20,
      "sliding_window": 4,
      "layer_types": ["sliding_attention", "full_attention"],
      "final_logit_softcapping": 30.0,
      "rope_parameters": _GEMMA3_ROPE,
    },
  ),
  golden_case.Case(
    name="gemma3_period",
    architecture="Gemma3ForCausalLM",
    config={
      **_GEMMA,
      # Five local layers, a global one, and two of the next period.
      "num_hidden_layers": 8,
      "query_pre_attn_scalar": 100,
      "sliding_window": 4,
      "rope_parameters": _GEMMA3_ROPE,
    },
  ),
  golden_case.Case(
    name="t5",
    architecture="T5ForConditionalGeneration",
    config={
      **_T5,
      "d_kv": 8,
      "d_ff": 40,
      "num_layers": 3,
      "num_decoder_layers": 2,
    },
  ),
  golden_case.Case(
    name="t5_v1_1",
    architecture="T5ForConditionalGeneration",
    config={
      **_T5,
      "d_kv": 12,
      "d_ff": 64,
      "feed_forward_proj": "gated-gelu",
      "layer_norm_epsilon": 1e-3,
      "tie_word_embeddings": False,
    },
    has_own_head=True,
  ),
  golden_case.Case(
    name="bert", architecture="BertForMaskedLM", config={**_BERT}
  ),
  # Its logits are hidden states.
  golden_case.Case(
    name="bert_encoder", architecture="BertModel", config={**_BERT}
  ),
  golden_case.Case(
    name="bert_classifier",
    architecture="BertForSequenceClassification",
    config={**_BERT, "id2label": {"0": "no", "1": "maybe", "2": "yes"}},
  ),
  golden_case.Case(
    name="bert_untied",
    architecture="BertForMaskedLM",
    config={
      **_BERT,
      "type_vocab_size": 3,
      "hidden_act": "gelu_new",
      "layer_norm_eps": 1e-3,
      "tie_word_embeddings": False,
    },
  ),
  *media_cases.CASES,
)
