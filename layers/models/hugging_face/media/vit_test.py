"""Tests for ViT, against golden files of transformers."""

import numpy as np
import pytest

from paxon.layers.models.hugging_face import family
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)
from paxon.layers.models.hugging_face.media import vit

LOGITS = testing.Outcome.OTHER_LOGITS
TENSORS = testing.Outcome.OTHER_TENSORS
REJECTED = testing.Outcome.REJECTED
CASES = ("vit", "vit_unbiased")


def _logits(of, config, ids):
  del ids
  return testing.logits(of, config, golden_case.read("vit").arrays)


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
  golden = golden_case.read(case)
  found = testing.logits(vit.FAMILY, golden.config, golden.arrays)
  expected = golden.arrays["logits"]
  np.testing.assert_allclose(found, expected, rtol=0, atol=testing.TOLERANCE)
  assert found.shape == (2, 5 if case == "vit" else 2)


@pytest.mark.parametrize("case", CASES)
def test_names_and_round_trip(case):
  testing.check_names(vit.FAMILY, case)
  testing.check_make(vit.FAMILY, case)
  testing.check_round_trip(vit.FAMILY, case)


_CHANGES = (
  ("hidden_act", "relu", LOGITS),
  ("hidden_act", "other", REJECTED),
  ("hidden_size", 48, TENSORS),
  ("id2label", {"0": "a", "1": "b"}, TENSORS),
  ("image_size", 16, TENSORS),
  ("image_size", [12, 16], TENSORS),
  ("image_size", 13, REJECTED),
  ("image_size", [12, 12, 12], REJECTED),
  ("intermediate_size", 32, TENSORS),
  ("layer_norm_eps", 1e-2, LOGITS),
  ("num_attention_heads", 2, LOGITS),
  ("num_attention_heads", 5, REJECTED),
  ("num_channels", 1, TENSORS),
  ("num_hidden_layers", 1, TENSORS),
  ("patch_size", 6, TENSORS),
  ("patch_size", [4, 6], REJECTED),
  ("qkv_bias", False, TENSORS),
)


@pytest.mark.parametrize(("field", "value", "outcome"), _CHANGES)
def test_every_field_counts(field, value, outcome):
  testing.check_sensitive(vit.FAMILY, "vit", {field: value}, outcome, _logits)


def test_no_field_is_left_out():
  fields = {field for field, *_ in _CHANGES}
  testing.check_all_covered("vit", fields | set(vit.FAMILY.inert))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"patch_size": [4, 6]}, r"patch_size is \[4, 6\]; vit .* only squares"),
    ({"image_size": 13}, r"image_size is 13; .* multiples of patch_size \(4\)"),
    ({"image_size": [8]}, r"image_size is \[8\]; .* integer, or a pair"),
    ({"architectures": ["ViTModel"]}, r"architectures is \['ViTModel'\]"),
  ],
)
def test_unsupported_values_are_rejected(changes, message):
  config = {**golden_case.read("vit").config, **changes}
  with pytest.raises(family.UnsupportedConfigError, match=message):
    vit.FAMILY.names(config)


def test_patches_that_are_not_square_images():
  """A grid of 3 x 4 patches has 13 positions."""
  config = {**golden_case.read("vit").config, "image_size": [12, 16]}
  shape = (
    vit.FAMILY.names(config).leaves["params/encoder/positions/table"].shape
  )
  assert shape == (13, 32)
