"""Tests of experiments on texts of encoders; see also `hf_encoders_test`."""

import json

import fiddle as fdl
import pytest

from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.runner import knobs, user_error
from paxon.tasks.lm.params import hugging_face, hugging_face_texts


def _write_config(folder, case, **changes):
  config = {**golden_case.read(case).config, **changes}
  (folder / "hugging_face").mkdir()
  (folder / "hugging_face" / "config.json").write_text(json.dumps(config))
  return str(folder)


@pytest.mark.parametrize(
  ("cls", "case", "kind"),
  [
    (hugging_face.HuggingFaceLm, "bert_encoder", "decoders"),
    (hugging_face.HuggingFaceLm, "bert_classifier", "decoders"),
    (hugging_face_texts.HuggingFaceEmbeddings, "llama3", "encoders"),
    (hugging_face_texts.HuggingFaceEmbeddings, "bert_classifier", "encoders"),
    (hugging_face_texts.HuggingFaceClassifier, "gpt2", "encoders"),
  ],
)
def test_models_of_another_kind_are_rejected(cls, case, kind, tmp_path):
  weights = _write_config(tmp_path, case)
  with pytest.raises(user_error.UserError, match=f"is for {kind} alone"):
    cls(weights=weights).job()


@pytest.mark.parametrize(
  "changes",
  [
    {"id2label": {"0": "score"}},
    {"problem_type": "multi_label_classification"},
  ],
)
def test_other_kinds_of_labels_are_rejected(changes, tmp_path):
  weights = _write_config(tmp_path, "bert_classifier", **changes)
  experiment = hugging_face_texts.HuggingFaceClassifier(weights=weights)
  with pytest.raises(user_error.UserError, match="single_label_classification"):
    experiment.job()


def test_labels_of_a_classifier_are_kept_or_replaced(tmp_path):
  weights = _write_config(tmp_path, "bert_classifier")
  made = hugging_face_texts.HuggingFaceClassifier
  own = made(weights=weights, tokenizer="bytes").job()
  assert own.task.predictions.labels == ("no", "maybe", "yes")
  assert own.warm_start.patterns == ()
  other = made(weights=weights, tokenizer="bytes", labels=("a", "b")).job()
  assert other.task.model.head.output_dim == 2
  assert other.warm_start.patterns == ((r"params/head/.*", None),)


def test_unknown_poolings_are_rejected():
  made = hugging_face_texts.HuggingFaceEmbeddings
  with pytest.raises(knobs.KnobError, match=r"pooling: .*'cls'.* got 'middle'"):
    made(pooling="middle")
  with pytest.raises(user_error.UserError, match="pair_key is missing"):
    made(train_files="pairs.jsonl").job()
  assert fdl.build(made().job()).task.model.pooling == ("mean",)


@pytest.mark.parametrize(
  ("config", "file", "first"),
  [
    ({"decoder_start_token_id": 7}, {}, 7),
    ({"decoder_start_token_id": 7}, {"bos_token_id": 1}, 7),
    ({"decoder_start_token_id": 7}, {"decoder_start_token_id": 1}, 1),
    ({"decoder_start_token_id": None}, {"bos_token_id": 1}, 1),
    ({"decoder_start_token_id": None}, {}, 4),
  ],
)
def test_the_first_token_of_t5_is_that_of_generate(
  config, file, first, tmp_path
):
  # As `generate` of transformers 5.23 continues such folders.
  config = {"pad_token_id": 4, **config}
  folder = tmp_path / "hugging_face"
  weights = _write_config(tmp_path, "t5_v1_1", **config)
  (folder / "generation_config.json").write_text(json.dumps(file))
  words = {"</s>": 1, "[PAD]": 4, "[GO]": 7, "w": 9}
  model = {"type": "WordLevel", "vocab": words, "unk_token": "w"}
  (folder / "tokenizer.json").write_text(
    json.dumps({"version": "1.0", "added_tokens": [], "model": model})
  )
  names = json.dumps({"eos_token": "</s>", "pad_token": "[PAD]"})
  (folder / "tokenizer_config.json").write_text(names)
  made = hugging_face.HuggingFaceT5(weights=weights)
  assert fdl.build(made.get_data_fields()["tokenizer"]).begin_id == first
