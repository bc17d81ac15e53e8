"""Tests for families with mixtures of experts, against golden files."""

import pytest

from paxon.layers.models.hugging_face import golden_case, mixtures, testing

Outcome = testing.Outcome
LOGITS = Outcome.OTHER_LOGITS
TENSORS = Outcome.OTHER_TENSORS
REJECTED = Outcome.REJECTED

CASES = {
  "mixtral": mixtures.MIXTRAL,
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


_CHANGES = {
  "mixtral": (
    ("head_dim", 8, TENSORS),
    ("hidden_act", "relu", LOGITS),
    ("hidden_size", 64, TENSORS),
    ("intermediate_size", 32, TENSORS),
    ("max_position_embeddings", 0, REJECTED),
    ("num_attention_heads", 2, TENSORS),
    ("num_experts_per_tok", 1, LOGITS),
    ("num_experts_per_tok", 3, LOGITS),
    ("num_experts_per_tok", 7, REJECTED),
    ("num_hidden_layers", 1, TENSORS),
    ("num_key_value_heads", 1, TENSORS),
    ("num_local_experts", 4, TENSORS),
    ("num_local_experts", 0, REJECTED),
    ("rms_norm_eps", 0.01, LOGITS),
    ("rope_parameters", _rope("mixtral", rope_theta=100.0), LOGITS),
    ("router_aux_loss_coef", -0.1, REJECTED),
    ("router_jitter_noise", 0.1, REJECTED),
    ("sliding_window", None, LOGITS),
    ("tie_word_embeddings", True, TENSORS),
    ("vocab_size", 65, TENSORS),
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
