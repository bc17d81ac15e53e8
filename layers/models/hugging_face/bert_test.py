"""Tests for BERT, against golden files of transformers."""

from etils import epath
import jax
import numpy as np
import pytest
import safetensors.numpy

from paxon.layers.models.hugging_face import (
  bert,
  family,
)
from paxon.layers.models.hugging_face.files import weight_files
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

LOGITS = testing.Outcome.OTHER_LOGITS
TENSORS = testing.Outcome.OTHER_TENSORS
REJECTED = testing.Outcome.REJECTED
CASES = ("bert", "bert_classifier", "bert_encoder", "bert_untied")


def _run(config, *args):
  weights = testing.variables(bert.FAMILY.names(config))
  return np.asarray(
    testing.run(bert.FAMILY.model(config).apply, weights, *args)
  )


def _logits(of, config, ids):
  """Returns the logits of tokens, and what is stored where there is padding."""
  del ids
  return testing.logits(of, config, golden_case.read("bert").arrays)


@pytest.mark.parametrize("case", CASES)
def test_logits_with_padding_and_types(case):
  golden = golden_case.read(case)
  mask = golden.arrays["mask"].astype(bool)
  assert not mask.all()
  assert len(np.unique(golden.arrays["type_ids"][mask])) > 1
  found = _run(golden.config, *testing.model_args(golden.arrays))
  if found.ndim == 2:
    # Of a text, not of its tokens.
    mask = mask[:, 0]
  np.testing.assert_allclose(
    found[mask],
    golden.arrays["logits"][mask],
    rtol=0,
    atol=testing.TOLERANCE,
  )
  # What a head is for: the ids that it says for tokens.
  np.testing.assert_array_equal(
    found[mask].argmax(-1), golden.arrays["logits"][mask].argmax(-1)
  )


def test_packed():
  """Two texts in one row give the logits of each."""
  golden = golden_case.read("bert")
  arrays, mask = golden.arrays, golden.arrays["mask"].astype(bool)
  sizes = mask.sum(axis=1)
  # Both whole would be more than there are positions for.
  keep = [slice(0, 10), slice(0, sizes[1])]
  short = {name: x[:1, :10] for name, x in arrays.items()}
  alone = _run(golden.config, *testing.model_args(short))
  rows = [
    np.concatenate([arrays[name][i, keep[i]] for i in range(2)])
    for name in ("ids", "type_ids")
  ]
  positions = np.concatenate([np.arange(10), np.arange(sizes[1])])
  segments = np.repeat([1, 2], [10, sizes[1]])
  args = (rows[0], positions, segments, rows[1])
  found = _run(
    golden.config, *(jax.device_put(np.int32(x[None])) for x in args)
  )
  expected = np.concatenate([alone[0], arrays["logits"][1, keep[1]]])
  np.testing.assert_allclose(found[0], expected, rtol=0, atol=testing.TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_names(case):
  testing.check_names(bert.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_every_part_can_be_configured(case):
  testing.check_make(bert.FAMILY, case)


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case):
  testing.check_round_trip(bert.FAMILY, case)


_CHANGES = (
  ("hidden_act", "relu", LOGITS),
  ("hidden_act", "gelu_new", LOGITS),
  ("hidden_act", "other", REJECTED),
  ("hidden_size", 48, TENSORS),
  ("intermediate_size", 32, TENSORS),
  ("is_decoder", True, REJECTED),
  ("layer_norm_eps", 1e-2, LOGITS),
  ("max_position_embeddings", 30, TENSORS),
  ("num_attention_heads", 2, LOGITS),
  ("num_attention_heads", 5, REJECTED),
  ("num_hidden_layers", 1, TENSORS),
  ("position_embedding_type", "relative_key", REJECTED),
  ("tie_word_embeddings", False, TENSORS),
  ("type_vocab_size", 3, TENSORS),
  ("vocab_size", 65, TENSORS),
)


@pytest.mark.parametrize(("field", "value", "outcome"), _CHANGES)
def test_every_field_counts(field, value, outcome):
  testing.check_sensitive(bert.FAMILY, "bert", {field: value}, outcome, _logits)


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_left_out(case):
  fields = {field for field, *_ in _CHANGES}
  training = {"attention_probs_dropout_prob", "hidden_dropout_prob"}
  testing.check_all_covered(case, fields | training)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"position_embedding_type": "relative_key"},
      "position_embedding_type is 'relative_key'; .* supports only 'absolute'",
    ),
    ({"is_decoder": True}, "is_decoder is True; bert supports only False"),
    (
      {"num_attention_heads": 5},
      r"num_attention_heads is 5; .* a divisor of hidden_size \(32\)",
    ),
    (
      {"architectures": ["BertForTokenClassification"]},
      r"architectures is \['BertForTokenClassification'\]; .* \['BertForMa",
    ),
  ],
)
def test_unsupported_values_are_rejected(changes, message):
  config = {**golden_case.read("bert").config, **changes}
  with pytest.raises(family.UnsupportedConfigError, match=message):
    bert.FAMILY.names(config)


def _stored(config, folder, also=()):
  """Weight files with the names of the first versions, and more tensors."""
  names = bert.FAMILY.names(config)
  tensors = {
    name: golden_case.weight(name, tensor.shape)
    for name, tensor in names.tensors.items()
  }
  since = {"LayerNorm.weight": "gamma", "LayerNorm.bias": "beta"}
  former = {}
  for name, value in tensors.items():
    for ending, end in since.items():
      name = name.replace(ending, f"LayerNorm.{end}")
    former[name] = value
  assert sum(name.endswith("gamma") for name in former) == 6
  more = {name: np.ones((2, 2), np.float32) for name in also}
  safetensors.numpy.save_file(former | more, folder / "model.safetensors")
  return weight_files.find(epath.Path(folder), names=names), tensors


def test_files_of_the_first_versions_are_read(tmp_path):
  """They call factors of norms gamma and have weights of another task."""
  other = "bert.pooler.dense.weight", "cls.seq_relationship.weight"
  config = golden_case.read("bert").config
  files, tensors = _stored(config, tmp_path, other)
  files.check()
  for name, value in tensors.items():
    rows = files.read_rows(name, 0, len(value))
    np.testing.assert_array_equal(rows, value, err_msg=name)


def test_unknown_weights_are_rejected(tmp_path):
  config = golden_case.read("bert").config
  files, _ = _stored(config, tmp_path, ["classifier.weight"])
  message = "classifier.weight is not part of the model"
  with pytest.raises(weight_files.WeightsError, match=message):
    files.check()
