"""Changed configurations give what transformers gives for them.

The tests of families say that each field counts; these say that what it does is
right. Run as `oracle_test`, and skipped where torch is not installed.
"""

import importlib.util

import numpy as np
import pytest

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are not here; --config=oracle brings them",
  ),
  pytest.mark.filterwarnings("ignore"),
]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "rope_theta": 100.0,
  "original_max_position_embeddings": 32,
}
_LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "rope_theta": 50.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
_TEXT = golden_case.read("clip").config["text_config"]
_IMAGE = golden_case.read("siglip").config["vision_config"]
_CHANGES = (
  ("bert", {"hidden_act": "relu"}),
  ("bert", {"layer_norm_eps": 0.01}),
  ("bert", {"num_attention_heads": 2, "intermediate_size": 40}),
  ("bert", {"tie_word_embeddings": False}),
  ("gemma", {"hidden_act": "relu", "rms_norm_eps": 0.01}),
  ("gemma", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
  ("gemma2", {"attn_logit_softcapping": None, "head_dim": 8}),
  ("gemma2", {"final_logit_softcapping": None, "num_key_value_heads": 4}),
  ("gemma2", {"hidden_activation": "silu", "query_pre_attn_scalar": 12}),
  ("gemma2", {"layer_types": [_LOCAL, _GLOBAL, _GLOBAL], "sliding_window": 3}),
  ("gemma3", {"attention_bias": True, "rms_norm_eps": 0.01}),
  ("gemma3", {"layer_types": [_LOCAL, _LOCAL], "sliding_window": 3}),
  ("gemma3", {"query_pre_attn_scalar": 12, "final_logit_softcapping": None}),
  ("gemma3", {"rope_parameters": {_GLOBAL: _YARN, _LOCAL: _LLAMA3}}),
  ("gemma3", {"tie_word_embeddings": False}),
  ("llama3", {"attention_bias": False, "head_dim": 8, "rms_norm_eps": 0.01}),
  ("llama3", {"rope_parameters": _YARN, "tie_word_embeddings": False}),
  ("llama_biased", {"attention_bias": False, "hidden_act": "gelu"}),
  ("mistral", {"sliding_window": None, "hidden_act": "relu"}),
  ("mixtral", {"num_experts_per_tok": 3, "sliding_window": None}),
  ("gpt_oss", {"swiglu_limit": 0.7, "swiglu_alpha": 1.0}),
  ("gpt_oss", {"rope_parameters": _YARN, "sliding_window": 3}),
  ("olmoe", {"clip_qkv": None, "norm_topk_prob": True}),
  ("qwen2_moe", {"norm_topk_prob": True, "num_experts_per_tok": 2}),
  ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [2]}),
  ("qwen3_next", {"norm_topk_prob": False, "linear_num_key_heads": 4}),
  ("qwen3_next", {"layer_types": ["full_attention"] * 3, "head_dim": 8}),
  ("t5", {"feed_forward_proj": "gelu", "layer_norm_epsilon": 0.01}),
  ("t5", {"feed_forward_proj": "gated-relu", "num_heads": 2}),
  ("t5", {"num_layers": 2, "relative_attention_max_distance": 12}),
  ("t5", {"relative_attention_num_buckets": 12}),
  ("t5_v1_1", {"feed_forward_proj": "gated-silu"}),
  ("clip", {"text_config": _TEXT | {"eos_token_id": 2}}),
  ("clip", {"text_config": _TEXT | {"hidden_act": "relu"}}),
  ("siglip", {"vision_config": _IMAGE | {"layer_norm_eps": 0.1}}),
  ("vit", {"hidden_act": "relu", "layer_norm_eps": 0.01}),
  ("vit", {"num_attention_heads": 2, "qkv_bias": False}),
  ("wav2vec2", {"do_stable_layer_norm": True, "hidden_act": "relu"}),
  ("wav2vec2", {"num_attention_heads": 2, "layer_norm_eps": 0.1}),
  ("whisper", {"activation_function": "relu", "encoder_attention_heads": 2}),
  ("whisper", {"decoder_attention_heads": 2, "activation_function": "silu"}),
)


@pytest.mark.parametrize(("name", "changes"), _CHANGES)
def test_logits_of_changed_configurations(name, changes):
  from paxon.layers.models.hugging_face.golden_models import make_goldens

  arrays = golden_case.read(name).arrays
  model = make_goldens.torch_model(name, **changes)
  expected = make_goldens.logits(model, arrays)
  config = model.config.to_dict()
  found = testing.logits(families.find(config), config, arrays)
  if "mask" in arrays:
    expected = np.where(arrays["mask"][:, :, None], expected, arrays["logits"])
  np.testing.assert_allclose(found, expected, rtol=0, atol=testing.TOLERANCE)
  assert np.abs(found - arrays["logits"]).max() > 10 * testing.TOLERANCE
