"""Tests for wav2vec 2.0, against golden files of transformers."""

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from paxon.layers.models.hugging_face import family
from paxon.layers.models.hugging_face.files import weight_files
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)
from paxon.layers.models.hugging_face.media import wav2vec2

LOGITS = testing.Outcome.OTHER_LOGITS
TENSORS = testing.Outcome.OTHER_TENSORS
REJECTED = testing.Outcome.REJECTED
CASES = ("wav2vec2", "wav2vec2_stable")


def _logits(case):
  """Returns logits of a configuration, for the inputs of a case."""
  arrays = golden_case.read(case).arrays
  return lambda of, config, ids: testing.logits(of, config, arrays)


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
  golden = golden_case.read(case)
  found = testing.logits(wav2vec2.FAMILY, golden.config, golden.arrays)
  np.testing.assert_allclose(
    found, golden.arrays["logits"], rtol=0, atol=testing.TOLERANCE
  )


@pytest.mark.parametrize("case", CASES)
def test_masks_texts_and_padding(case):
  """Frames are real where their samples are, and padding changes nothing."""
  golden = golden_case.read(case)
  model = wav2vec2.FAMILY.model(golden.config)
  weights = testing.variables(wav2vec2.FAMILY.names(golden.config))
  audio, short = golden.arrays["audio"], 59
  lengths = np.asarray([audio.shape[1], short], np.int32)
  dirty = audio.copy()
  dirty[1, short:] = np.nan

  def run(audio, lengths):
    batch = {
      "audio": jnp.asarray(audio),
      "audio_lengths": jnp.asarray(lengths, jnp.int32),
    }
    return testing.run(
      lambda w, b: (model.apply(w, b), model.apply(w, b, method="predict")),
      weights,
      batch,
    )

  (logits, is_real), texts = run(dirty, lengths)
  # (n - window) // stride + 1 of each convolution.
  expected = []
  for n in lengths.tolist():
    for window, stride in ((5, 3), (3, 2), (2, 2)):
      n = (n - window) // stride + 1
    expected.append(n)
  assert is_real.sum(1).tolist() == expected
  (alone, _), _ = run(audio[1:, :short], lengths[1:])
  np.testing.assert_allclose(
    logits[1, : expected[1]], alone[0], rtol=0, atol=testing.TOLERANCE
  )
  blank = golden.config["pad_token_id"]
  best = np.argmax(np.asarray(logits[1, : expected[1]]), axis=-1)
  merged = [b for i, b in enumerate(best) if i == 0 or b != best[i - 1]]
  count = int(texts["label_lengths"][1])
  found = np.asarray(texts["labels"])[1, :count].tolist()
  assert found == [int(b) for b in merged if b != blank]


@pytest.mark.parametrize("case", CASES)
def test_names(case):
  testing.check_names(wav2vec2.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_every_part_can_be_configured(case):
  testing.check_make(wav2vec2.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case):
  testing.check_round_trip(wav2vec2.FAMILY, case)


_CHANGES = (
  ("adapter_attn_dim", 8, REJECTED),
  ("add_adapter", True, REJECTED),
  ("conv_bias", True, TENSORS),
  ("conv_dim", [8, 7, 10], TENSORS),
  ("conv_dim", [8, 7, 0], REJECTED),
  ("conv_kernel", [4, 3, 2], TENSORS),
  ("conv_kernel", [4, 3], REJECTED),
  ("conv_stride", "3", REJECTED),
  ("do_stable_layer_norm", True, LOGITS),
  ("feat_extract_activation", "relu", LOGITS),
  ("feat_extract_norm", "layer", TENSORS),
  ("feat_extract_norm", "batch", REJECTED),
  ("hidden_act", "relu", LOGITS),
  ("hidden_size", 48, TENSORS),
  ("intermediate_size", 24, TENSORS),
  ("layer_norm_eps", 0.1, LOGITS),
  ("num_attention_heads", 2, LOGITS),
  ("num_attention_heads", 5, REJECTED),
  ("num_conv_pos_embedding_groups", 4, TENSORS),
  ("num_conv_pos_embedding_groups", 5, REJECTED),
  ("num_conv_pos_embeddings", 6, TENSORS),
  ("num_feat_extract_layers", 4, REJECTED),
  ("num_hidden_layers", 3, TENSORS),
  ("pad_token_id", 12, REJECTED),
  ("pad_token_id", -1, REJECTED),
  ("vocab_size", 13, TENSORS),
)


@pytest.mark.nightly(keep=13)
@pytest.mark.parametrize(("field", "value", "outcome"), _CHANGES)
def test_every_field_counts(field, value, outcome):
  changes = {field: value}
  testing.check_sensitive(
    wav2vec2.FAMILY, "wav2vec2", changes, outcome, _logits("wav2vec2")
  )


def test_strides_change_the_number_of_frames():
  golden = golden_case.read("wav2vec2")
  config = {**golden.config, "conv_stride": [3, 2, 1]}
  model = wav2vec2.FAMILY.model(config)
  weights = testing.variables(wav2vec2.FAMILY.names(config))
  args = testing.model_args(golden.arrays)
  logits, _ = jax.eval_shape(model.apply, weights, *args)
  frames = golden.arrays["logits"].shape[1]
  assert logits.shape[1] > 1.5 * frames


def test_the_blank_is_the_padding_id():
  golden = golden_case.read("wav2vec2_stable")
  assert wav2vec2.FAMILY.model(golden.config).blank_id == 3


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_left_out(case):
  fields = {field for field, *_ in _CHANGES}
  testing.check_all_covered(case, fields | set(wav2vec2.FAMILY.inert))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"conv_kernel": [4, 3]},
      r"conv_kernel is \[4, 3\]; .* a list of 3 integers, as conv_dim",
    ),
    (
      {"num_conv_pos_embedding_groups": 5},
      r"_groups is 5; .* a divisor of hidden_size \(32\)",
    ),
    ({"pad_token_id": 12}, r"pad_token_id is 12; .* below vocab_size \(12\)"),
    ({"architectures": ["Wav2Vec2Model"]}, r"architectures is \['Wav2Vec2Mo"),
  ],
)
def test_unsupported_values_are_rejected(changes, message):
  config = {**golden_case.read("wav2vec2").config, **changes}
  with pytest.raises(family.UnsupportedConfigError, match=message):
    wav2vec2.FAMILY.names(config)


def test_both_names_of_weight_norm_are_read(tmp_path):
  """Transformers 5 writes those of torch's parametrizations."""
  config = golden_case.read("wav2vec2").config
  names = wav2vec2.FAMILY.names(config)
  tensors = {
    name: golden_case.weight(name, tensor.shape)
    for name, tensor in names.tensors.items()
  }
  ours = {".weight_g": "original0", ".weight_v": "original1"}
  stored = {"wav2vec2.masked_spec_embed": np.ones(32, np.float32)}
  for name, value in tensors.items():
    for end, new in ours.items():
      name = name.replace(end, f".parametrizations.weight.{new}")
    stored[name] = value
  assert sum("parametrizations" in name for name in stored) == 2
  safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
  files = weight_files.find(epath.Path(tmp_path), names=names)
  files.check()
  for name, value in tensors.items():
    rows = files.read_rows(name, 0, len(value))
    np.testing.assert_array_equal(rows, value, err_msg=name)
