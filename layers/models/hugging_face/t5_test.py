"""Tests for T5, against golden files of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.decoding import generate, model_steps, samplers
from paxon.layers.models.hugging_face import (
  family,
  t5,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

LOGITS = testing.Outcome.OTHER_LOGITS
TENSORS = testing.Outcome.OTHER_TENSORS
REJECTED = testing.Outcome.REJECTED
CASES = ("t5", "t5_v1_1")
_ENCODER = "encoder_inputs", "encoder_positions", "encoder_segment_ids"


def _source(golden):
  """The source of both rows, as arguments of `prefill`."""
  args = testing.model_args(golden.arrays)
  return dict(zip(_ENCODER, args[3:], strict=True))


def _logits(case):
  """Returns logits of a configuration, for the inputs of a case."""
  arrays = golden_case.read(case).arrays
  return lambda of, config, ids: testing.logits(of, config, arrays)


@pytest.mark.parametrize("case", CASES)
def test_logits_with_padded_sources(case):
  golden = golden_case.read(case)
  assert not golden.arrays["encoder_mask"].all()
  found = testing.logits(t5.FAMILY, golden.config, golden.arrays)
  np.testing.assert_allclose(
    found, golden.arrays["logits"], rtol=0, atol=testing.TOLERANCE
  )


@pytest.mark.parametrize("case", CASES)
def test_greedy(case):
  golden = golden_case.read(case)
  model = t5.FAMILY.model(golden.config)
  start = jnp.full((golden_case.BATCH, 1), 0, jnp.int32)

  def generated(weights, source):
    return generate.generate(
      model_steps.make_prefill(model, weights, **source),
      model_steps.make_decode_step(model, weights),
      start,
      jnp.ones((golden_case.BATCH,), jnp.int32),
      sampler=samplers.Greedy(),
      key=jax.random.key(0),
      max_new_tokens=golden_case.NEW_IDS,
    ).ids

  weights = testing.variables(t5.FAMILY.names(golden.config))
  found = testing.run(generated, weights, _source(golden))
  assert golden.config["decoder_start_token_id"] == 0
  np.testing.assert_array_equal(found, golden.arrays["greedy"])


def test_packed():
  """Two pairs in one row, and padding, give the logits of each pair."""
  golden = golden_case.read("t5")
  arrays = golden.arrays
  lengths = arrays["encoder_mask"].sum(axis=1)
  sizes = np.asarray([8, 9])

  def packed(ids, sizes):
    padding = 3
    row = [*(x[:n] for x, n in zip(ids, sizes, strict=True)), [5] * padding]
    segments = np.repeat([1, 2, 0], [*sizes, padding])
    positions = [np.arange(n) for n in (*sizes, padding)]
    each = np.concatenate(row), np.concatenate(positions), segments
    return [jax.device_put(np.int32(x[None])) for x in each]

  args = *packed(arrays["ids"], sizes), *packed(arrays["encoder_ids"], lengths)
  model = t5.FAMILY.model(golden.config)
  weights = testing.variables(t5.FAMILY.names(golden.config))
  found = np.asarray(testing.run(model.apply, weights, *args))
  expected = [arrays["logits"][i, : sizes[i]] for i in range(2)]
  np.testing.assert_allclose(
    found[0, : sizes.sum()],
    np.concatenate(expected),
    rtol=0,
    atol=testing.TOLERANCE,
  )


@pytest.mark.parametrize("case", CASES)
def test_names(case):
  testing.check_names(t5.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_every_part_can_be_configured(case):
  testing.check_make(t5.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case):
  testing.check_round_trip(t5.FAMILY, case)


# Which of both cases, too.
_CHANGES = (
  ("t5", "d_ff", 32, TENSORS),
  ("t5", "d_kv", 12, TENSORS),
  ("t5", "d_model", 48, TENSORS),
  ("t5", "dense_act_fn", "silu", REJECTED),
  ("t5", "feed_forward_proj", "gated-relu", REJECTED),
  ("t5", "is_decoder", True, REJECTED),
  ("t5", "is_encoder_decoder", False, REJECTED),
  ("t5", "is_gated_act", True, REJECTED),
  ("t5", "layer_norm_epsilon", 1e-2, LOGITS),
  ("t5", "layer_norm_epsilon", 0, REJECTED),
  ("t5", "num_decoder_layers", 3, TENSORS),
  ("t5", "num_heads", 2, TENSORS),
  ("t5", "num_layers", 2, TENSORS),
  ("t5", "relative_attention_max_distance", 12, LOGITS),
  ("t5", "relative_attention_max_distance", 4, REJECTED),
  ("t5", "relative_attention_num_buckets", 12, TENSORS),
  ("t5", "relative_attention_num_buckets", 10, REJECTED),
  ("t5", "scale_decoder_outputs", False, TENSORS),
  ("t5", "tie_word_embeddings", "no", REJECTED),
  ("t5", "vocab_size", 65, TENSORS),
  ("t5_v1_1", "is_gated_act", False, REJECTED),
)


@pytest.mark.parametrize(("case", "field", "value", "outcome"), _CHANGES)
def test_every_field_counts(case, field, value, outcome):
  testing.check_sensitive(
    t5.FAMILY, case, {field: value}, outcome, _logits(case)
  )


@pytest.mark.parametrize(
  ("case", "kind", "activation", "outcome"),
  [
    ("t5", "gelu", "gelu", LOGITS),
    ("t5", "gated-relu", "relu", TENSORS),
    ("t5_v1_1", "gated-silu", "silu", LOGITS),
  ],
)
def test_every_activation_counts(case, kind, activation, outcome):
  changes = {
    "feed_forward_proj": kind,
    "dense_act_fn": activation,
    "is_gated_act": kind.startswith("gated"),
  }
  testing.check_sensitive(t5.FAMILY, case, changes, outcome, _logits(case))


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_left_out(case):
  fields = {field for _, field, *_ in _CHANGES}
  # Of training.
  testing.check_all_covered(case, fields | {"dropout_rate"})


def _config(case, *without, **changes):
  config = {**golden_case.read(case).config, **changes}
  return {k: v for k, v in config.items() if k not in without}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"dense_act_fn": "silu"},
      "dense_act_fn is 'silu'; .* supports only 'relu', as",
    ),
    (
      {"is_gated_act": True},
      "is_gated_act is True; .* supports only False, as in feed_",
    ),
    (
      {"feed_forward_proj": "double-gelu"},
      "feed_forward_proj is 'double-gelu'; .* 'gelu' or 'gated-gelu' or",
    ),
    (
      {"relative_attention_num_buckets": 10},
      "relative_attention_num_buckets is 10; .* a multiple of 4",
    ),
    (
      {"relative_attention_max_distance": 4},
      r"max_distance is 4; .* more than half of relative_.*_buckets \(8\)",
    ),
    ({"is_encoder_decoder": False}, "is_encoder_decoder is False; .* True"),
  ],
)
def test_unsupported_values_are_rejected(changes, message):
  with pytest.raises(family.UnsupportedConfigError, match=message):
    t5.FAMILY.names(_config("t5", **changes))


def test_files_of_older_versions():
  new = "dense_act_fn", "is_gated_act", "scale_decoder_outputs"
  old = {"n_positions": 512, "output_past": True}
  config = _config("t5", *new, "tie_word_embeddings", **old)
  assert t5.FAMILY.model(config) == t5.FAMILY.model(_config("t5"))
  # Its head is one of its own because it is not tied, and not scaled either.
  config = _config("t5_v1_1", *new, tie_word_embeddings=False, **old)
  expected = t5.FAMILY.model(_config("t5_v1_1"))
  assert t5.FAMILY.model(config) == expected
  assert expected.head is not None
  assert expected.embedding.attend_scale == 1
