"""Tests for DeepSeek-V2 and V3, against golden files."""

import jax
import numpy as np
import pytest

from paxon.layers.models.hugging_face import deepseek
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)
from paxon.layers.stacks import stack
from paxon.sharding import variables

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


@pytest.mark.nightly(keep=1)
@_ALL
def test_logits(case):
  testing.check_logits(CASES[case], case)


@pytest.mark.nightly(keep=1)
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


@pytest.mark.nightly(keep=9)
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


def test_modules_of_further_tokens():
  """Their tensors by DeepSeek's names; logits do not depend on them."""
  config = golden_case.read("deepseek_v3").config
  assert config["num_nextn_predict_layers"] == 1
  of, layer = deepseek.DEEPSEEK_V3, "model.layers.2"
  names, plain = (
    of.names({**config, "num_nextn_predict_layers": n}) for n in (1, 0)
  )
  added = names.tensors.keys() - plain.tensors.keys()
  last = {name for name in plain.tensors if name.startswith("model.layers.1.")}
  ends = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
  assert added == {name.replace("layers.1.", "layers.2.") for name in last} | {
    f"{layer}.{end}.weight" for end in ends
  }
  assert names.tensors[f"{layer}.eh_proj.weight"].shape == (32, 64)
  assert names.tied == {
    f"{layer}.embed_tokens.weight": "model.embed_tokens.weight",
    f"{layer}.shared_head.head.weight": "lm_head.weight",
  }
  model = of.model({**config, "num_nextn_predict_layers": 1})
  made = jax.eval_shape(model.init, jax.random.key(0), *of.example(config))
  specs = jax.tree.leaves(variables.get_specs(made))
  assert {spec.name: spec.shape for spec in specs} == {
    name: leaf.shape for name, leaf in names.leaves.items()
  }
  # Embedded tokens come first, as in the files.
  kernel = names.leaves["params/multi_token/depths_0/projection/kernel"]
  rows = np.arange(32 * 64).reshape(32, 64)
  np.testing.assert_array_equal(
    kernel.from_tensors(lambda name, start, stop: rows[start:stop]), rows.T
  )


def test_dense_layers_before_mixtures_are_a_stack():
  """So V3 compiles two layers instead of 61; scanned equals unrolled."""
  golden = golden_case.read("deepseek_v3_plain")
  of, names = deepseek.DEEPSEEK_V3, deepseek.DEEPSEEK_V3.names(golden.config)
  layer = "params/stack/stacks_1/layers/blocks_0/feed_forward"
  assert [
    tensor.name for tensor, _ in names.leaves[f"{layer}/shared/up"].sources
  ] == [f"model.layers.{i}.mlp.shared_experts.up_proj.weight" for i in (2, 3)]

  def unrolled(cls, **fields):
    more = {"scan": False} if cls is stack.Stack else {}
    return cls(**fields, **more)

  model = of.model(golden.config, unrolled)
  assert len(model.stack.stacks) == 2
  np.testing.assert_allclose(
    testing.run(
      model.apply,
      testing.variables(names),
      *testing.token_args(golden.arrays["ids"]),
    ),
    testing.causal_lm_logits(of, golden.config, golden.arrays["ids"]),
    atol=1e-5,
  )
