"""Tests for Gemma 1, 2 and 3, against golden files of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.models.hugging_face import (
  family,
  gemma,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

LOGITS = testing.Outcome.OTHER_LOGITS
TENSORS = testing.Outcome.OTHER_TENSORS
REJECTED = testing.Outcome.REJECTED
CASES = {
  "gemma": gemma.GEMMA,
  "gemma_untied": gemma.GEMMA,
  "gemma2": gemma.GEMMA2,
  "gemma3": gemma.GEMMA3,
  "gemma3_period": gemma.GEMMA3,
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
  testing.check_logits(CASES[case], case)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("case", ["gemma", "gemma2", "gemma3"])
def test_greedy(case):
  testing.check_greedy(CASES[case], case)


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_packed(case):
  testing.check_packed(CASES[case], case)


@pytest.mark.parametrize("case", CASES)
def test_names(case):
  testing.check_names(CASES[case], case)


@pytest.mark.parametrize("case", CASES)
def test_every_part_can_be_configured(case):
  testing.check_make(CASES[case], case)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case):
  testing.check_round_trip(CASES[case], case)


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_ROPE = {
  case: golden_case.read(case).config["rope_parameters"] for case in CASES
}
# Of all three.
_COMMON = (
  ("attention_bias", True, TENSORS),
  ("head_dim", 8, TENSORS),
  ("hidden_size", 64, TENSORS),
  ("intermediate_size", 32, TENSORS),
  ("max_position_embeddings", 0, REJECTED),
  ("num_attention_heads", 2, TENSORS),
  ("num_hidden_layers", 0, REJECTED),
  ("num_key_value_heads", 4, TENSORS),
  ("tie_word_embeddings", False, TENSORS),
  ("use_bidirectional_attention", True, REJECTED),
  ("vocab_size", 65, TENSORS),
)
# Of layers with windows, which list their kinds.
_WINDOWED = (
  ("hidden_activation", "relu", LOGITS),
  ("hidden_activation", "other", REJECTED),
  ("layer_types", [_LOCAL], REJECTED),
  ("layer_types", [], REJECTED),
  ("layer_types", _LOCAL, REJECTED),
  ("num_attention_heads", 7, REJECTED),
  ("num_hidden_layers", 4, REJECTED),
  ("num_key_value_heads", 3, REJECTED),
  ("query_pre_attn_scalar", 12, LOGITS),
  ("rms_norm_eps", 1e-2, LOGITS),
  ("sliding_window", 3, LOGITS),
  ("sliding_window", None, REJECTED),
)
_CHANGES = {
  "gemma": (
    *_COMMON,
    ("hidden_act", "relu", LOGITS),
    ("hidden_act", "other", REJECTED),
    ("num_hidden_layers", 1, TENSORS),
    ("rms_norm_eps", 1e-2, LOGITS),
    ("rope_parameters", {"rope_theta": 100.0}, LOGITS),
  ),
  "gemma2": (
    *_COMMON,
    *_WINDOWED,
    ("attn_logit_softcapping", 3.0, LOGITS),
    ("attn_logit_softcapping", None, LOGITS),
    ("final_logit_softcapping", 4.0, LOGITS),
    ("layer_types", [_LOCAL, _GLOBAL, _GLOBAL], LOGITS),
    ("rope_parameters", {"rope_theta": 100.0}, LOGITS),
  ),
  "gemma3": (
    *_COMMON,
    *_WINDOWED,
    ("attn_logit_softcapping", 3.0, REJECTED),
    ("final_logit_softcapping", None, LOGITS),
    ("layer_types", [_LOCAL, _LOCAL], LOGITS),
    *(
      (
        "rope_parameters",
        {**_ROPE["gemma3"], kind: {**_ROPE["gemma3"][kind], key: value}},
        outcome,
      )
      for kind, key, value, outcome in (
        (_GLOBAL, "factor", 2.0, LOGITS),
        (_GLOBAL, "rope_theta", 500.0, LOGITS),
        (_LOCAL, "rope_theta", 50.0, LOGITS),
        (_LOCAL, "rope_type", "dynamic", REJECTED),
      )
    ),
    ("rope_parameters", {"rope_theta": 50.0}, REJECTED),
  ),
}


@pytest.mark.nightly(keep=14)
@pytest.mark.parametrize(
  ("case", "field", "value", "outcome"),
  [(case, *each) for case, changes in _CHANGES.items() for each in changes],
)
def test_every_field_counts(case, field, value, outcome):
  testing.check_sensitive(CASES[case], case, {field: value}, outcome)


@pytest.mark.parametrize("case", _CHANGES)
def test_no_field_is_left_out(case):
  fields = {field for field, *_ in _CHANGES[case]}
  # Only repeats what `layer_types` says.
  testing.check_all_covered(case, fields | {"_sliding_window_pattern"})


def _config(case, *without, **changes):
  config = {**golden_case.read(case).config, **changes}
  return {k: v for k, v in config.items() if k not in without}


@pytest.mark.parametrize(
  ("case", "changes", "message"),
  [
    (
      "gemma",
      {"hidden_act": "gelu", "hidden_activation": "relu"},
      "hidden_activation is 'relu'; .* null or the value of hidden_act",
    ),
    (
      "gemma2",
      {"hidden_act": "relu"},
      "hidden_act is 'relu'; .* null or the value of hidden_activation",
    ),
    (
      "gemma2",
      {"layer_types": ["chunked_attention"] * 3},
      "layer_types is .*chunked.* 3 times 'sliding_attention' or 'full_atten",
    ),
    (
      "gemma2",
      {"sliding_window": None},
      "sliding_window is None; .* a positive integer with 'sliding_attenti",
    ),
    (
      "gemma2",
      {"sliding_window_size": 6},
      r"sliding_window_size is 6; .* supports only sliding_window \(5\)",
    ),
    (
      "gemma3",
      {"sliding_window_pattern": 4},
      "sliding_window_pattern is 4; .* a period that agrees with layer_types",
    ),
    (
      "gemma3",
      {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
      "rope_scaling is .* null with rope_parameters",
    ),
    (
      "gemma3",
      {"rope_parameters": {"rope_theta": 10.0}},
      "rope_parameters is .* objects for full_attention and sliding_attention",
    ),
    (
      "gemma3",
      {"attn_logit_softcapping": 50.0},
      "attn_logit_softcapping is 50.0; .* supports only None",
    ),
  ],
)
def test_unsupported_values_are_rejected(case, changes, message):
  with pytest.raises(family.UnsupportedConfigError, match=message):
    CASES[case].model(_config(case, **changes))


def test_files_of_older_versions_of_gemma():
  old = {"rope_theta": 10_000.0, "hidden_activation": None}
  for activation in ("gelu", "gelu_pytorch_tanh"):
    config = _config("gemma", "rope_parameters", hidden_act=activation, **old)
    assert gemma.GEMMA.model(config) == gemma.GEMMA.model(_config("gemma"))


def test_files_of_older_versions_of_gemma2():
  old = {
    "cache_implementation": "hybrid",
    "hidden_act": "gelu_pytorch_tanh",
    "rope_theta": 10_000.0,
    "sliding_window_size": 5,
  }
  config = _config("gemma2", "rope_parameters", "layer_types", **old)
  assert gemma.GEMMA2.model(config) == gemma.GEMMA2.model(_config("gemma2"))


def test_files_of_older_versions_of_gemma3():
  old = {
    "cache_implementation": "hybrid",
    "rope_theta": 1000.0,
    "rope_local_base_freq": 10.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
  }
  left_out = "rope_parameters", "layer_types", "_sliding_window_pattern"
  config = _config("gemma3_period", *left_out, **old)
  expected = gemma.GEMMA3.model(_config("gemma3_period"))
  assert gemma.GEMMA3.model(config) == expected
  assert gemma.GEMMA3.model({**config, "sliding_window_pattern": 6}) == expected
  assert gemma.GEMMA3.model({**config, "sliding_window_pattern": 3}) != expected


def test_layers_of_a_published_size():
  """26 layers: four periods of five local layers and a global one, and two."""
  left_out = "layer_types", "_sliding_window_pattern"
  config = _config("gemma3", *left_out, num_hidden_layers=26)
  stack = gemma.GEMMA3.model(config).stack
  assert [b.attention.mask.window for b in stack.blocks] == [4] * 5 + [None]
  tensors = gemma.GEMMA3.names(config).tensors
  blocks = {}
  for layer in (0, 11, 23, 24, 25):
    name = f"model.layers.{layer}.self_attn.q_norm.weight"
    (part,) = tensors[name].slices
    blocks[layer] = part.leaf.split("/attention/")[0], part.index
  assert blocks == {
    0: ("params/stack/layers/blocks_0", (0,)),
    11: ("params/stack/layers/blocks_5", (1,)),
    23: ("params/stack/layers/blocks_5", (3,)),
    24: ("params/stack/layers_24", ()),
    25: ("params/stack/layers_25", ()),
  }


def test_embedded_tokens_are_scaled_by_a_rounded_root():
  """The root of 3072 is 55.4256; models in bfloat16 were trained with 55.5."""
  config = _config("gemma", hidden_size=3072)
  table = gemma.GEMMA.model(config).embedding.clone(dtype=jnp.bfloat16)
  values = np.random.default_rng(0).standard_normal((64, 3072), np.float32)
  ids = jax.device_put(np.int32([[3, 60]]))
  found = table.apply({"params": {"table": values}}, ids)
  assert found.dtype == jnp.bfloat16
  rows = jax.device_put(np.asarray(values[[3, 60]], jnp.bfloat16))
  expected = (rows.astype(jnp.float32) * 55.5).astype(jnp.bfloat16)
  np.testing.assert_array_equal(found[0], expected)
