"""Golden cases of the families of Gemma."""

from paxon.layers.models.hugging_face import golden_case

_SIZES = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 12,
  "max_position_embeddings": 64,
}
_ROPE = {
  "full_attention": {
    "rope_type": "linear",
    "factor": 4.0,
    "rope_theta": 1000.0,
  },
  "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
}

CASES = (
  golden_case.Case(
    name="gemma",
    architecture="GemmaForCausalLM",
    config={
      **_SIZES,
      "num_key_value_heads": 1,
      "hidden_act": "gelu",
      "rms_norm_eps": 1e-3,
    },
  ),
  golden_case.Case(
    name="gemma_untied",
    architecture="GemmaForCausalLM",
    config={
      **_SIZES,
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
      **_SIZES,
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
      **_SIZES,
      "query_pre_attn_scalar": 20,
      "sliding_window": 4,
      "layer_types": ["sliding_attention", "full_attention"],
      "final_logit_softcapping": 30.0,
      "rope_parameters": _ROPE,
    },
  ),
  golden_case.Case(
    name="gemma3_period",
    architecture="Gemma3ForCausalLM",
    config={
      **_SIZES,
      # Five local layers, a global one, and two of the next period.
      "num_hidden_layers": 8,
      "query_pre_attn_scalar": 100,
      "sliding_window": 4,
      "rope_parameters": _ROPE,
    },
  ),
)
