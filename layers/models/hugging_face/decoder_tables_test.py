"""Tests for families that are tables, against golden files."""

import pytest

from paxon.layers.models.hugging_face import (
  families,
  family,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  golden_dense_cases,
  testing,
)

# Cases whose tables have what no other has.
_CASES = [case.name for case in golden_dense_cases.CASES]


def _family(case):
  return families.find(golden_case.read(case).config)


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("case", _CASES)
def test_logits(case):
  testing.check_logits(_family(case), case)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("case", ["cohere2", "exaone_moe", "persimmon", "phi"])
def test_packed_documents(case):
  testing.check_packed(_family(case), case)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("case", ["olmo3", "gptj", "glm4_moe", "smollm3"])
def test_greedy(case):
  testing.check_greedy(_family(case), case)


@pytest.mark.parametrize("case", _CASES)
def test_tensors_go_round(case):
  testing.check_round_trip(_family(case), case)


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("case", _CASES)
def test_names_and_makers(case):
  testing.check_names(_family(case), case)
  testing.check_make(_family(case), case)


@pytest.mark.parametrize("model_type", ["internlm3", "iquestcoder"])
def test_other_names_of_llama(model_type):
  config = golden_case.read("llama3").config
  other = {**config, "model_type": model_type, "architectures": None}
  llama, found = families.find(config), families.find(other)
  assert found.model(other) == llama.model(config)
  assert found.names(other) == llama.names(config)


@pytest.mark.parametrize(
  ("case", "changes", "message"),
  [
    ("cohere2", {"layer_types": ["full_attention"]}, "a list of 4 types"),
    ("dots1", {"num_experts_per_tok": 5}, "at most the 4 experts"),
    ("exaone4", {"sliding_window_pattern": -1}, "at least 0"),
    ("exaone_moe", {"mlp_layer_types": ["x"] * 4}, "'sparse' or 'dense'"),
    ("ernie4_5_moe", {"moe_layer_end_index": -2}, "at least -1"),
    ("ernie4_5_moe", {"use_bias": True}, "supports only False"),
    ("olmo3", {"rope_parameters": {"linear": {}}}, "full_attention and"),
    ("phi", {"qk_layernorm": True}, "supports only False"),
    ("smollm3", {"no_rope_layers": [1, 2, 0, 0]}, "4 times 0 or 1"),
    ("stablelm", {"qk_layernorm": True}, "supports only False"),
  ],
)
def test_unsupported_values_are_errors(case, changes, message):
  config = {**golden_case.read(case).config, **changes}
  with pytest.raises(family.UnsupportedConfigError, match=message):
    families.find(config).names(config)
