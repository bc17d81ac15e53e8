"""Tests for DeepSeek-V2 and V3, against golden files."""

import pytest

from paxon.layers.models.hugging_face import deepseek, golden_case, testing

Outcome = testing.Outcome
LOGITS = Outcome.OTHER_LOGITS
TENSORS = Outcome.OTHER_TENSORS
REJECTED = Outcome.REJECTED

CASES = {
  "deepseek_v2": deepseek.DEEPSEEK_V2,
  "deepseek_v2_greedy": deepseek.DEEPSEEK_V2,
  "deepseek_v3": deepseek.DEEPSEEK_V3,
  "deepseek_v3_plain": deepseek.DEEPSEEK_V3,
}
_ALL = pytest.mark.parametrize("case", CASES)


@_ALL
def test_logits(case):
  testing.check_logits(CASES[case], case)


@_ALL
def test_greedy(case):
  testing.check_greedy(CASES[case], case)


@_ALL
def test_names(case):
  testing.check_names(CASES[case], case)


@_ALL
def test_make(case):
  testing.check_make(CASES[case], case)


@_ALL
def test_round_trip(case):
  testing.check_round_trip(CASES[case], case)


def _rope(case, **changes):
  return golden_case.read(case).config["rope_parameters"] | changes


# Changes of both.
_BOTH = (
  ("attention_bias", True, REJECTED),
  ("aux_loss_alpha", -0.1, REJECTED),
  ("first_k_dense_replace", 0, TENSORS),
  ("head_dim", 12, REJECTED),
  ("hidden_size", 64, TENSORS),
  ("intermediate_size", 32, TENSORS),
  ("kv_lora_rank", 12, TENSORS),
  ("max_position_embeddings", 0, REJECTED),
  ("moe_intermediate_size", 32, TENSORS),
  ("moe_layer_freq", 2, REJECTED),
  ("n_group", 3, REJECTED),
  ("n_routed_experts", 16, TENSORS),
  ("n_shared_experts", 1, TENSORS),
  ("num_attention_heads", 2, REJECTED),
  ("num_experts_per_tok", 2, LOGITS),
  ("num_experts_per_tok", 5, REJECTED),
  ("num_experts_per_tok", 9, REJECTED),
  ("num_hidden_layers", 1, TENSORS),
  ("num_key_value_heads", 2, REJECTED),
  ("q_lora_rank", None, TENSORS),
  ("qk_head_dim", 12, REJECTED),
  ("qk_nope_head_dim", 8, REJECTED),
  ("qk_rope_head_dim", 12, REJECTED),
  ("routed_scaling_factor", 1.0, LOGITS),
  ("tie_word_embeddings", True, TENSORS),
  ("topk_group", 3, LOGITS),
  ("topk_group", 5, REJECTED),
  ("v_head_dim", 8, TENSORS),
  ("vocab_size", 65, TENSORS),
)
_CHANGES = {
  "deepseek_v2": (
    *_BOTH,
    ("hidden_act", "unknown", REJECTED),
    ("mlp_bias", True, REJECTED),
    ("n_group", 2, LOGITS),
    ("norm_topk_prob", True, REJECTED),
    ("rms_norm_eps", 0.0, REJECTED),
    ("rope_parameters", _rope("deepseek_v2", mscale=1.0), LOGITS),
    ("rope_parameters", _rope("deepseek_v2", mscale_all_dim=0.5), LOGITS),
    ("rope_parameters", _rope("deepseek_v2", mscale=-1.0), REJECTED),
    ("scoring_func", "sigmoid", REJECTED),
    ("topk_method", "greedy", LOGITS),
    ("topk_method", "noaux_tc", REJECTED),
  ),
  "deepseek_v3": (
    *_BOTH,
    ("hidden_act", "relu", LOGITS),
    ("n_group", 8, REJECTED),
    ("n_group", 2, LOGITS),
    ("norm_topk_prob", False, LOGITS),
    ("num_nextn_predict_layers", -1, REJECTED),
    ("rms_norm_eps", 0.01, LOGITS),
    ("rope_interleave", False, LOGITS),
    ("rope_parameters", _rope("deepseek_v3", mscale=0.5), LOGITS),
    ("rope_parameters", _rope("deepseek_v3", mscale_all_dim=0.0), LOGITS),
    ("scoring_func", "softmax", REJECTED),
    ("topk_method", "greedy", REJECTED),
  ),
}


@pytest.mark.parametrize(
  ("case", "field", "value", "outcome"),
  [(case, *change) for case, each in _CHANGES.items() for change in each],
)
def test_every_field_counts(case, field, value, outcome):
  testing.check_sensitive(CASES[case], case, {field: value}, outcome)


@pytest.mark.parametrize("case", _CHANGES)
def test_no_field_is_left_out(case):
  fields = {"output_router_logits"} | {field for field, *_ in _CHANGES[case]}
  testing.check_all_covered(case, fields)


def test_layers_of_further_tokens_are_not_part_of_the_model():
  config = golden_case.read("deepseek_v3").config
  config = {**config, "num_nextn_predict_layers": 1}
  names = deepseek.DEEPSEEK_V3.names(config)
  assert names.is_ignored("model.layers.2.eh_proj.weight")
  assert not names.is_ignored("model.layers.1.mlp.gate.weight")
  assert not names.is_ignored("model.layers.3.eh_proj.weight")
