"""Tests for Whisper, against golden files of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.decoding import generate, model_steps, samplers
from paxon.layers.models.hugging_face import family
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)
from paxon.layers.models.hugging_face.media import whisper

LOGITS = testing.Outcome.OTHER_LOGITS
TENSORS = testing.Outcome.OTHER_TENSORS
REJECTED = testing.Outcome.REJECTED
CASES = ("whisper", "whisper_untied")
_ENCODER = "encoder_inputs", "encoder_positions", "encoder_segment_ids"


def _logits(case):
  """Returns logits of a configuration, for the inputs of a case."""
  arrays = golden_case.read(case).arrays
  return lambda of, config, ids: testing.logits(of, config, arrays)


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
  golden = golden_case.read(case)
  found = testing.logits(whisper.FAMILY, golden.config, golden.arrays)
  np.testing.assert_allclose(
    found, golden.arrays["logits"], rtol=0, atol=testing.TOLERANCE
  )


@pytest.mark.parametrize("case", CASES)
def test_greedy_transcription(case):
  golden = golden_case.read(case)
  model = whisper.FAMILY.model(golden.config)
  first = golden.config["decoder_start_token_id"]
  start = jnp.full((golden_case.BATCH, 1), first, jnp.int32)

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

  weights = testing.variables(whisper.FAMILY.names(golden.config))
  args = testing.model_args(golden.arrays)
  source = dict(zip(_ENCODER, args[3:], strict=True))
  found = testing.run(generated, weights, source)
  np.testing.assert_array_equal(found, golden.arrays["greedy"])


@pytest.mark.parametrize("case", CASES)
def test_names(case):
  testing.check_names(whisper.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_every_part_can_be_configured(case):
  testing.check_make(whisper.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case):
  testing.check_round_trip(whisper.FAMILY, case)


_CHANGES = (
  ("activation_function", "relu", LOGITS),
  ("activation_function", "hardswish", REJECTED),
  ("d_model", 48, TENSORS),
  ("d_model", 33, REJECTED),
  ("decoder_attention_heads", 2, LOGITS),
  ("decoder_attention_heads", 5, REJECTED),
  ("decoder_ffn_dim", 40, TENSORS),
  ("decoder_layers", 3, TENSORS),
  ("encoder_attention_heads", 2, LOGITS),
  ("encoder_attention_heads", 5, REJECTED),
  ("encoder_ffn_dim", 40, TENSORS),
  ("encoder_layers", 3, TENSORS),
  ("is_encoder_decoder", False, REJECTED),
  ("max_source_positions", 16, TENSORS),
  ("max_target_positions", 30, TENSORS),
  ("num_mel_bins", 8, TENSORS),
  ("scale_embedding", True, REJECTED),
  ("tie_word_embeddings", False, TENSORS),
  ("vocab_size", 65, TENSORS),
)


@pytest.mark.nightly(keep=11)
@pytest.mark.parametrize(("field", "value", "outcome"), _CHANGES)
def test_every_field_counts(field, value, outcome):
  testing.check_sensitive(
    whisper.FAMILY, "whisper", {field: value}, outcome, _logits("whisper")
  )


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_left_out(case):
  fields = {field for field, *_ in _CHANGES}
  testing.check_all_covered(case, fields | set(whisper.FAMILY.inert))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"d_model": 33}, r"d_model is 33; whisper supports only an even number"),
    (
      {"decoder_attention_heads": 5},
      r"decoder_attention_heads is 5; .* a divisor of d_model \(32\)",
    ),
    ({"architectures": ["WhisperModel"]}, r"architectures is \['WhisperModel"),
  ],
)
def test_unsupported_values_are_rejected(changes, message):
  config = {**golden_case.read("whisper").config, **changes}
  with pytest.raises(family.UnsupportedConfigError, match=message):
    whisper.FAMILY.names(config)


def test_shorter_audio_has_fewer_positions():
  """The encoder reads less than its window, which transformers does not."""
  golden = golden_case.read("whisper")
  arrays = dict(golden.arrays)
  arrays["features"] = arrays["features"][:, :16]
  found = testing.logits(whisper.FAMILY, golden.config, arrays)
  assert found.shape == golden.arrays["logits"].shape
  assert np.isfinite(found).all()
