"""Tests for CLIP and SigLIP, against golden files of transformers."""

import jax
import numpy as np
import pytest

from paxon.layers.models.hugging_face import family
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)
from paxon.layers.models.hugging_face.media import image_text

LOGITS = testing.Outcome.OTHER_LOGITS
TENSORS = testing.Outcome.OTHER_TENSORS
REJECTED = testing.Outcome.REJECTED
CASES = {
  "clip": image_text.CLIP,
  "clip_first": image_text.CLIP,
  "siglip": image_text.SIGLIP,
}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_embeddings_logits_and_loss(case):
  golden, of = golden_case.read(case), CASES[case]
  (batch,) = testing.model_args(golden.arrays)
  batch["example_weights"] = jax.numpy.ones((golden_case.BATCH,))
  model, weights = (
    of.model(golden.config),
    testing.variables(of.names(golden.config)),
  )

  def run(weights, batch):
    (total, count), _, outputs = model.apply(weights, batch, method="loss")
    logits = model.apply(weights, batch)
    return {**outputs, "logits": logits, "loss": total / count}

  found = testing.run(run, weights, batch)
  for name in ("image_embeddings", "text_embeddings", "logits", "loss"):
    np.testing.assert_allclose(
      found[name], golden.arrays[name], rtol=0, atol=testing.TOLERANCE
    )


@pytest.mark.parametrize("case", CASES)
def test_names_and_round_trip(case):
  testing.check_names(CASES[case], case)
  testing.check_make(CASES[case], case)
  testing.check_round_trip(CASES[case], case)


def _change(case, tower, **changes):
  config = golden_case.read(case).config
  return {tower: {**config[tower], **changes}} if tower else changes


def _logits(case):
  return lambda of, config, ids: testing.logits(
    of, config, golden_case.read(case).arrays
  )


_BOTH = (
  ("hidden_act", "relu", LOGITS),
  ("hidden_size", 48, TENSORS),
  ("intermediate_size", 32, TENSORS),
  ("layer_norm_eps", 1e-1, LOGITS),
  ("num_attention_heads", 2, LOGITS),
  ("num_attention_heads", 5, REJECTED),
  ("num_hidden_layers", 1, TENSORS),
)
_CHANGES = (
  *(("vision_config", *each) for each in _BOTH),
  *(("text_config", *each) for each in _BOTH),
  ("vision_config", "image_size", 16, TENSORS),
  ("vision_config", "num_channels", 1, TENSORS),
  ("vision_config", "patch_size", 6, TENSORS),
  ("vision_config", "model_type", "other", REJECTED),
  ("text_config", "max_position_embeddings", 30, TENSORS),
  ("text_config", "vocab_size", 65, TENSORS),
)
_OF_CLIP = (
  ("text_config", "eos_token_id", 2, LOGITS),
  ("text_config", "eos_token_id", [7], REJECTED),
  (None, "projection_dim", 12, TENSORS),
  (None, "text_config", "no", REJECTED),
)
_OF_SIGLIP = (
  ("text_config", "projection_size", 24, REJECTED),
  ("vision_config", "vision_use_head", False, REJECTED),
)


@pytest.mark.nightly(keep=9)
@pytest.mark.parametrize(
  ("case", "tower", "field", "value", "outcome"),
  [
    *(("clip", *each) for each in (*_CHANGES, *_OF_CLIP)),
    # The rest is code that both share.
    *(("siglip", *each) for each in _OF_SIGLIP),
  ],
)
def test_every_field_counts(case, tower, field, value, outcome):
  changes = _change(case, tower, **{field: value})
  testing.check_sensitive(CASES[case], case, changes, outcome, _logits(case))


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_left_out(case):
  towers = "vision_config", "text_config"
  inert = {"logit_scale_init_value", "projection_dim"}
  testing.check_all_covered(case, inert | set(towers))
  config = golden_case.read(case).config
  known = {field for _, field, *_ in (*_CHANGES, *_OF_CLIP, *_OF_SIGLIP)}
  for tower in towers:
    assert not set(config[tower]) - known - family.INERT


def test_ignored_fields_of_towers_are_listed():
  config = dict(golden_case.read("clip").config)
  for tower in ("vision_config", "text_config"):
    config |= {tower: {**config[tower], "unknown": 1, "layer_norm_eps": None}}
  assert set(CASES["clip"].find_ignored(config)) == {
    "vision_config.unknown",
    "text_config.unknown",
  }


def test_dictionaries_of_old_files_replace_the_configurations():
  config = golden_case.read("clip").config
  old = {
    **config,
    "vision_config_dict": config["vision_config"],
    "text_config_dict": config["text_config"],
    "vision_config": {"hidden_size": 20},
    "text_config": None,
  }
  of = image_text.CLIP
  assert of.model(old) == of.model(config)
  nothing = {**config, "vision_config_dict": None, "text_config_dict": None}
  assert of.model(nothing) == of.model(config)


@pytest.mark.parametrize(
  ("case", "changes", "message"),
  [
    ("clip", {"architectures": ["CLIPTextModel"]}, r"only \['CLIPModel'\]"),
    (
      "clip",
      _change("clip", "text_config", eos_token_id=[7]),
      r"eos_token_id is \[7\]; clip_text_model .* at least 0",
    ),
    (
      "siglip",
      _change("siglip", "text_config", projection_size=24),
      r"projection_size is 24; .* hidden_size of images \(32\)",
    ),
    (
      "siglip",
      _change("siglip", "vision_config", vision_use_head=False),
      r"vision_use_head is False; siglip_vision_model supports only True",
    ),
  ],
)
def test_unsupported_values_are_rejected(case, changes, message):
  config = {**golden_case.read(case).config, **changes}
  with pytest.raises(family.UnsupportedConfigError, match=message):
    CASES[case].names(config)
