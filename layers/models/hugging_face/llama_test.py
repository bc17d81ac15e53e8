"""Tests for Llama, against golden files of transformers."""

import pytest

from paxon.layers.models.hugging_face import golden_case, llama, testing

Outcome = testing.Outcome
CASES = ("llama2", "llama3")


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
  testing.check_logits(llama.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_greedy(case):
  testing.check_greedy(llama.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_names(case):
  testing.check_names(llama.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case):
  testing.check_round_trip(llama.FAMILY, case)


_ROPE = golden_case.read("llama3").config["rope_parameters"]
_CHANGES = (
  ("attention_bias", False, Outcome.OTHER_TENSORS),
  ("head_dim", 8, Outcome.OTHER_TENSORS),
  ("hidden_act", "relu", Outcome.OTHER_LOGITS),
  ("hidden_act", "nothing", Outcome.REFUSED),
  ("hidden_size", 64, Outcome.OTHER_TENSORS),
  ("intermediate_size", 32, Outcome.OTHER_TENSORS),
  ("max_position_embeddings", 0, Outcome.REFUSED),
  ("mlp_bias", True, Outcome.REFUSED),
  ("num_attention_heads", 2, Outcome.OTHER_TENSORS),
  ("num_attention_heads", 3, Outcome.REFUSED),
  ("num_hidden_layers", 2, Outcome.OTHER_TENSORS),
  ("num_key_value_heads", 4, Outcome.OTHER_TENSORS),
  ("num_key_value_heads", 3, Outcome.REFUSED),
  ("rms_norm_eps", 1e-2, Outcome.OTHER_LOGITS),
  ("rope_parameters", None, Outcome.OTHER_LOGITS),
  *(
    ("rope_parameters", {**_ROPE, key: value}, Outcome.OTHER_LOGITS)
    for key, value in {
      "factor": 4.0,
      "high_freq_factor": 2.0,
      "low_freq_factor": 2.0,
      "original_max_position_embeddings": 16,
      "rope_theta": 50.0,
    }.items()
  ),
  ("rope_parameters", {**_ROPE, "rope_type": "dynamic"}, Outcome.REFUSED),
  ("rope_parameters", {**_ROPE, "mscale": 2.0}, Outcome.REFUSED),
  ("tie_word_embeddings", False, Outcome.OTHER_TENSORS),
  ("vocab_size", 65, Outcome.OTHER_TENSORS),
)


@pytest.mark.parametrize(("field", "value", "outcome"), _CHANGES)
def test_every_field_counts(field, value, outcome):
  testing.check_sensitive(llama.FAMILY, "llama3", {field: value}, outcome)


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_left_out(case):
  testing.check_all_covered(case, {field for field, *_ in _CHANGES})
