"""Tests for Mistral, Qwen, Phi-3, GPT-2 and GPT-NeoX, against golden files."""

import pytest

from paxon.layers.models.hugging_face import (
  golden_case,
  gpt2,
  gpt_neox,
  mistral,
  phi3,
  qwen2,
  qwen3,
  testing,
)

Outcome = testing.Outcome
LOGITS = Outcome.OTHER_LOGITS
TENSORS = Outcome.OTHER_TENSORS
REFUSED = Outcome.REFUSED

CASES = {
  "mistral": mistral.FAMILY,
  "qwen2": qwen2.FAMILY,
  "qwen3": qwen3.FAMILY,
  "phi3": phi3.FAMILY,
  "phi3_longrope": phi3.FAMILY,
  "gpt2": gpt2.FAMILY,
  "gpt2_scaled": gpt2.FAMILY,
  "gpt_neox": gpt_neox.FAMILY,
  "gpt_neox_sequential": gpt_neox.FAMILY,
}
_ALL = pytest.mark.parametrize("case", CASES)


@_ALL
def test_logits(case):
  testing.check_logits(CASES[case], case)


# One of each family: compiling a whole generation takes seconds.
@pytest.mark.parametrize(
  "case", ["mistral", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox"]
)
def test_greedy(case):
  testing.check_greedy(CASES[case], case)


@_ALL
def test_names(case):
  testing.check_names(CASES[case], case)


@_ALL
def test_round_trip(case):
  testing.check_round_trip(CASES[case], case)


def _rope(case, **changes):
  return golden_case.read(case).config["rope_parameters"] | changes


# What changes the shapes of tensors in all families but the GPTs.
_SIZES = (
  ("hidden_size", 64, TENSORS),
  ("intermediate_size", 32, TENSORS),
  ("num_attention_heads", 2, TENSORS),
  ("num_hidden_layers", 1, TENSORS),
  ("num_key_value_heads", 1, TENSORS),
  ("tie_word_embeddings", None, REFUSED),
  ("vocab_size", 65, TENSORS),
  # Changes nothing but where scalings begin.
  ("max_position_embeddings", "long", REFUSED),
  ("hidden_act", "relu", LOGITS),
  ("rms_norm_eps", 0.01, LOGITS),
)
_CHANGES = {
  "mistral": (
    *_SIZES,
    ("head_dim", 8, TENSORS),
    ("rope_parameters", _rope("mistral", rope_theta=100.0), LOGITS),
    ("sliding_window", 8, LOGITS),
    ("sliding_window", None, LOGITS),
    ("sliding_window", 0, REFUSED),
    ("tie_word_embeddings", True, TENSORS),
  ),
  "qwen2": (
    *(each for each in _SIZES if each[0] != "num_hidden_layers"),
    ("num_hidden_layers", 3, REFUSED),
    ("layer_types", ["full_attention"] * 4, LOGITS),
    ("layer_types", ["full_attention"] * 3, REFUSED),
    ("layer_types", ["chunked_attention"] * 4, REFUSED),
    ("max_window_layers", -1, REFUSED),
    ("rope_parameters", _rope("qwen2", factor=3.0), LOGITS),
    ("sliding_window", 4, LOGITS),
    ("use_sliding_window", False, REFUSED),
    ("tie_word_embeddings", False, TENSORS),
  ),
  "qwen3": (
    *(each for each in _SIZES if each[0] != "num_hidden_layers"),
    ("num_hidden_layers", 2, REFUSED),
    ("attention_bias", True, TENSORS),
    ("head_dim", 8, TENSORS),
    ("layer_types", ["sliding_attention"] * 3, LOGITS),
    ("max_window_layers", -1, REFUSED),
    ("rope_parameters", _rope("qwen3", factor=3.0), LOGITS),
    ("rope_parameters", _rope("qwen3", beta_fast=8.0), LOGITS),
    ("rope_parameters", _rope("qwen3", beta_slow=0.5), LOGITS),
    ("rope_parameters", _rope("qwen3", truncate=False), REFUSED),
    ("rope_parameters", _rope("qwen3", attention_factor=2.0), REFUSED),
    ("sliding_window", 5, LOGITS),
    ("use_sliding_window", False, REFUSED),
    ("tie_word_embeddings", True, TENSORS),
  ),
  "phi3": (
    *_SIZES,
    ("original_max_position_embeddings", 0, REFUSED),
    ("rope_parameters", _rope("phi3", partial_rotary_factor=1.0), LOGITS),
    ("rope_parameters", _rope("phi3", partial_rotary_factor=0.2), REFUSED),
    ("sliding_window", 8, LOGITS),
    ("tie_word_embeddings", True, TENSORS),
  ),
  "phi3_longrope": (
    ("original_max_position_embeddings", 16, LOGITS),
    ("rope_parameters", _rope("phi3_longrope", rope_theta=50.0), LOGITS),
    (
      "rope_parameters",
      _rope("phi3_longrope", short_factor=[1.0, 1.5, 2.0, 2.5]),
      LOGITS,
    ),
    ("rope_parameters", _rope("phi3_longrope", short_factor=[1.0]), REFUSED),
    ("rope_parameters", _rope("phi3_longrope", long_factor=[1.0]), REFUSED),
    ("tie_word_embeddings", False, TENSORS),
  ),
  "gpt2_scaled": (
    ("activation_function", "relu", LOGITS),
    ("add_cross_attention", True, REFUSED),
    ("layer_norm_epsilon", 0.01, LOGITS),
    ("n_embd", 64, TENSORS),
    ("n_head", 2, LOGITS),
    ("n_head", 3, REFUSED),
    ("n_inner", 64, TENSORS),
    ("n_layer", 2, TENSORS),
    ("n_positions", 32, TENSORS),
    ("scale_attn_by_inverse_layer_idx", False, LOGITS),
    ("scale_attn_weights", False, LOGITS),
    ("tie_word_embeddings", True, TENSORS),
    ("vocab_size", 65, TENSORS),
  ),
  "gpt_neox": (
    ("attention_bias", False, TENSORS),
    ("hidden_act", "relu", LOGITS),
    ("hidden_size", 64, TENSORS),
    ("intermediate_size", 64, TENSORS),
    ("layer_norm_eps", 0.01, LOGITS),
    ("max_position_embeddings", 0, REFUSED),
    ("num_attention_heads", 2, LOGITS),
    ("num_attention_heads", 3, REFUSED),
    ("num_hidden_layers", 1, TENSORS),
    ("rope_parameters", _rope("gpt_neox", rope_theta=50.0), LOGITS),
    ("rope_parameters", _rope("gpt_neox", partial_rotary_factor=1.0), LOGITS),
    ("tie_word_embeddings", True, TENSORS),
    ("use_parallel_residual", False, LOGITS),
    ("vocab_size", 65, TENSORS),
  ),
}


@pytest.mark.parametrize(
  ("case", "field", "value", "outcome"),
  [(case, *change) for case, each in _CHANGES.items() for change in each],
)
def test_every_field_counts(case, field, value, outcome):
  testing.check_sensitive(CASES[case], case, {field: value}, outcome)


@pytest.mark.parametrize("case", set(_CHANGES) - {"phi3_longrope"})
def test_no_field_is_left_out(case):
  # The share of rotated features stands in `rope_parameters` once more, which
  # goes before; and a decoder is one whatever `is_decoder` says.
  fields = {"partial_rotary_factor", "is_decoder"}
  fields |= {field for field, *_ in _CHANGES[case]}
  testing.check_all_covered(case, fields)
