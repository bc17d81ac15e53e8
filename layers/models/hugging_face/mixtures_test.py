"""Tests for families with mixtures of experts, against golden files."""

import jax
import numpy as np
import pytest

from paxon.layers.losses import auxiliary_loss
from paxon.layers.models.hugging_face import mixtures
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

Outcome = testing.Outcome
LOGITS = Outcome.OTHER_LOGITS
TENSORS = Outcome.OTHER_TENSORS
REJECTED = Outcome.REJECTED

CASES = {
  "mixtral": mixtures.MIXTRAL,
  "qwen2_moe": mixtures.QWEN2_MOE,
  "qwen2_moe_normalized": mixtures.QWEN2_MOE,
  "qwen3_moe": mixtures.QWEN3_MOE,
  "qwen3_next": mixtures.QWEN3_NEXT,
  "qwen3_next_biased": mixtures.QWEN3_NEXT,
  "olmoe": mixtures.OLMOE,
  "gpt_oss": mixtures.GPT_OSS,
}
_ALL = pytest.mark.parametrize("case", CASES)


@pytest.mark.nightly(keep=1)
@_ALL
def test_logits(case):
  testing.check_logits(CASES[case], case)


@pytest.mark.nightly(keep=1)
@_ALL
def test_greedy(case):
  testing.check_greedy(CASES[case], case)


def test_packed_documents_reset_the_state():
  testing.check_packed(CASES["qwen3_next"], "qwen3_next")


@pytest.mark.nightly(keep=1)
@_ALL
def test_balance_loss(case):
  golden = golden_case.read(case)
  ids, config = golden.arrays["ids"], {**golden.config}
  config |= {"router_aux_loss_coef": 0.5, "output_router_logits": True}
  of = CASES[case]
  batch = {
    "inputs": ids,
    "targets": ids,
    "weights": np.ones(ids.shape, np.float32),
    "positions": np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
    "segment_ids": golden_case.mask(),
  }
  batch = {k: jax.device_put(np.asarray(x)) for k, x in batch.items()}

  def metrics(weights, batch):
    model = of.model(config)
    (_, found, _), _ = model.apply(
      weights,
      batch,
      deterministic=True,
      method="loss",
      mutable=[auxiliary_loss.COLLECTION],
    )
    total, weight = found["auxiliary_loss/load_balance"]
    return total / weight

  value = testing.run(metrics, testing.variables(of.names(config)), batch)
  expected = 0.5 * golden.arrays["balance"]
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  # Balanced experts would have the number of choices.
  assert expected > 0.5 * config["num_experts_per_tok"] * 1.001


def test_balance_loss_needs_output_router_logits():
  config = {**golden_case.read("mixtral").config, "router_aux_loss_coef": 0.5}
  for is_on in (False, True):
    config["output_router_logits"] = is_on
    block = CASES["mixtral"].model(config).stack.blocks[0]
    assert bool(block.feed_forward.losses) is is_on


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


# Changes of all families.
_SIZES = (
  ("hidden_act", "relu", LOGITS),
  ("hidden_size", 64, TENSORS),
  ("intermediate_size", 32, TENSORS),
  ("max_position_embeddings", 0, REJECTED),
  ("num_attention_heads", 2, TENSORS),
  ("num_experts_per_tok", 1, LOGITS),
  ("num_experts_per_tok", 7, REJECTED),
  ("num_hidden_layers", 1, TENSORS),
  ("num_key_value_heads", 1, TENSORS),
  ("num_local_experts", 4, TENSORS),
  ("num_local_experts", 0, REJECTED),
  ("rms_norm_eps", 0.01, LOGITS),
  ("router_aux_loss_coef", -0.1, REJECTED),
  ("router_aux_loss_coef", True, REJECTED),
  ("tie_word_embeddings", True, TENSORS),
  ("vocab_size", 65, TENSORS),
)
_QWEN = (
  ("decoder_sparse_step", 3, TENSORS),
  ("decoder_sparse_step", 0, REJECTED),
  ("mlp_only_layers", [], TENSORS),
  ("mlp_only_layers", [5], REJECTED),
  ("mlp_only_layers", 1, REJECTED),
  ("moe_intermediate_size", 32, TENSORS),
  ("rms_norm_eps", 0.02, LOGITS),
  ("sliding_window", 4, LOGITS),
)
_WINDOW = ("sliding_window",)
_OTHERS = (
  "num_local_experts",
  "hidden_act",
  "intermediate_size",
  "num_hidden_layers",
)
_CHANGES = {
  "mixtral": (
    *_SIZES,
    ("head_dim", 8, TENSORS),
    ("num_experts", 4, REJECTED),
    ("num_experts_per_tok", 3, LOGITS),
    ("rope_parameters", _rope("mixtral", rope_theta=100.0), LOGITS),
    ("sliding_window", None, LOGITS),
  ),
  "qwen2_moe": (
    *(
      each
      for each in _SIZES
      if each[0] not in ("num_local_experts", "num_hidden_layers")
    ),
    *_QWEN,
    ("layer_types", ["full_attention"] * 5, LOGITS),
    ("layer_types", ["full_attention"] * 4, REJECTED),
    ("max_window_layers", -1, REJECTED),
    ("norm_topk_prob", True, LOGITS),
    ("num_experts", 4, TENSORS),
    ("num_experts_per_tok", 2, LOGITS),
    ("num_hidden_layers", 4, REJECTED),
    ("qkv_bias", False, TENSORS),
    ("rope_parameters", _rope("qwen2_moe", rope_theta=100.0), LOGITS),
    ("shared_expert_intermediate_size", 32, TENSORS),
    ("use_sliding_window", False, REJECTED),
  ),
  "qwen2_moe_normalized": (("norm_topk_prob", False, LOGITS),),
  "qwen3_moe": (
    *(each for each in _SIZES if each[0] != "num_hidden_layers"),
    *_QWEN,
    ("attention_bias", True, TENSORS),
    ("head_dim", 8, TENSORS),
    ("norm_topk_prob", False, LOGITS),
    ("num_experts_per_tok", 2, LOGITS),
    ("num_hidden_layers", 2, TENSORS),
    ("rope_parameters", _rope("qwen3_moe", rope_theta=100.0), LOGITS),
    ("use_sliding_window", False, LOGITS),
  ),
  "qwen3_next": (
    *(
      each
      for each in _SIZES
      if each[0] not in ("num_local_experts", *_OTHERS[2:])
    ),
    ("num_experts", 4, TENSORS),
    *(each for each in _QWEN if each[0] not in ("mlp_only_layers", *_WINDOW)),
    ("attention_bias", True, TENSORS),
    ("full_attention_interval", 0, REJECTED),
    ("head_dim", 8, TENSORS),
    ("layer_types", ["linear_attention"] * 3, TENSORS),
    ("layer_types", ["linear_attention"] * 4, REJECTED),
    ("layer_types", ["sliding_attention"] * 3, REJECTED),
    ("linear_conv_kernel_dim", 3, TENSORS),
    ("linear_key_head_dim", 16, TENSORS),
    ("linear_num_key_heads", 1, TENSORS),
    ("linear_num_key_heads", 3, REJECTED),
    ("linear_num_value_heads", 8, TENSORS),
    ("linear_value_head_dim", 16, TENSORS),
    ("mlp_only_layers", [1], TENSORS),
    ("norm_topk_prob", False, LOGITS),
    ("num_experts_per_tok", 2, LOGITS),
    ("num_hidden_layers", 4, REJECTED),
    ("rope_parameters", _rope("qwen3_next", rope_theta=100.0), LOGITS),
    (
      "rope_parameters",
      _rope("qwen3_next", partial_rotary_factor=0.5),
      LOGITS,
    ),
    ("shared_expert_intermediate_size", 32, TENSORS),
    ("use_sliding_window", True, REJECTED),
  ),
  "qwen3_next_biased": (
    ("hidden_act", "silu", LOGITS),
    ("intermediate_size", 32, TENSORS),
  ),
  "olmoe": (
    *(each for each in _SIZES if each[0] not in _OTHERS[:1]),
    ("attention_bias", True, TENSORS),
    ("clip_qkv", None, LOGITS),
    ("clip_qkv", 0.5, LOGITS),
    ("clip_qkv", 0, REJECTED),
    ("norm_topk_prob", True, LOGITS),
    ("num_experts", 4, TENSORS),
    ("rope_parameters", _rope("olmoe", rope_theta=100.0), LOGITS),
    ("sliding_window", 4, REJECTED),
  ),
  "gpt_oss": (
    *(each for each in _SIZES if each[0] not in _OTHERS[1:]),
    ("intermediate_size", 48, TENSORS),
    ("num_hidden_layers", 2, REJECTED),
    ("attention_bias", False, TENSORS),
    ("head_dim", 8, TENSORS),
    ("hidden_act", "relu", REJECTED),
    ("layer_types", ["full_attention"] * 3, LOGITS),
    ("quantization_config", {"quant_method": "fp8"}, REJECTED),
    ("rope_parameters", _rope("gpt_oss", factor=3.0), LOGITS),
    ("rope_parameters", _rope("gpt_oss", truncate=True), LOGITS),
    ("rope_parameters", _rope("gpt_oss", truncate=1), REJECTED),
    ("rope_parameters", None, LOGITS),
    ("sliding_window", 4, LOGITS),
    ("swiglu_alpha", 1.0, LOGITS),
    ("swiglu_limit", 1.0, LOGITS),
    ("swiglu_limit", 0, REJECTED),
  ),
}


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize(
  ("case", "field", "value", "outcome"),
  [(case, *change) for case, each in _CHANGES.items() for change in each],
)
def test_every_field_counts(case, field, value, outcome):
  testing.check_sensitive(CASES[case], case, {field: value}, outcome)


@pytest.mark.parametrize(
  "case", set(_CHANGES) - {"qwen2_moe_normalized", "qwen3_next_biased"}
)
def test_no_field_is_left_out(case):
  fields = {"output_router_logits", *CASES[case].inert}
  fields |= {field for field, *_ in _CHANGES[case]}
  if case == "qwen3_next":
    # Only layers without experts have it; `qwen3_next_biased` has one. The
    # fraction of rotated features is also in `rope_parameters`.
    fields |= {"intermediate_size", "partial_rotary_factor"}
  testing.check_all_covered(case, fields)
