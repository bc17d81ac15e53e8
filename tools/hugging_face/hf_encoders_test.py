"""Tests of imported encoders, from the import to vectors and exports.

That the models compute what transformers computes is tested by the golden cases
`bert`, `bert_classifier` and `bert_encoder`.
"""

import json
import os

from etils import epath
import fiddle as fdl
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tokenizers

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)
from paxon.runner import user_error
from paxon.runner.evaluation import infer
from paxon.runner.training import train
from paxon.tasks.lm.params import hugging_face, hugging_face_texts
from paxon.tools.hugging_face import hf_main

_WORDS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"abcdefgh")
_POOLER = {"pooler.dense.weight": (32, 32), "pooler.dense.bias": (32,)}
_MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"))
# Steps that change nothing.
_STILL = {
  "num_train_steps": 1,
  "learning_rate": 1e-30,
  "warmup_steps": 0,
  "global_batch_size": 8,
  "checkpoint_every_steps": None,
  "eval_every_steps": None,
}


def _save_tokenizer(folder):
  vocabulary = {word: i for i, word in enumerate(_WORDS)}
  model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
  made = tokenizers.Tokenizer(model)
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens(list(_WORDS[:5]))
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
  )
  made.save(str(folder / "tokenizer.json"))


def _run(*argv):
  return hf_main.main([os.fspath(arg) for arg in argv])


@pytest.fixture(name="base", scope="module")
def _base(tmp_path_factory):
  """Returns the folder of a sentence encoder, and that of its import."""
  parent = tmp_path_factory.mktemp("base")
  folder, run = parent / "model", parent / "run"
  folder.mkdir()
  config = golden_case.read("bert_encoder").config
  (folder / "config.json").write_text(json.dumps(config))
  names = families.find(config).names(config)
  shapes = {name: x.shape for name, x in names.tensors.items()} | _POOLER
  safetensors_numpy.save_file(
    {name: golden_case.weight(name, shape) for name, shape in shapes.items()},
    folder / "model.safetensors",
    metadata={"format": "pt"},
  )
  _save_tokenizer(folder)
  listed = [{"type": f"st.{kind}", "path": path} for kind, path in _MODULES]
  (folder / "modules.json").write_text(json.dumps(listed))
  (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
  (folder / "1_Pooling").mkdir()
  (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
  assert _run("import", folder, "--to", run) == 0
  return folder, run


def _write(path, rows):
  path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return str(path)


def _infer(experiment, run, capsys):
  """Returns the lines of the texts, and the line that names their file."""
  assert infer.run(fdl.build(experiment.job()), epath.Path(run)) == 0
  line = capsys.readouterr().out.splitlines()[-1]
  text = epath.Path(line.rpartition(": ")[2]).read_text()
  return [json.loads(each) for each in text.splitlines()], line


def _train(experiment, run):
  run.mkdir()
  config = experiment.job()
  train.run(fdl.build(config), config, epath.Path(run))
  return config


def _tensors(folder):
  return safetensors_numpy.load_file(folder / "model.safetensors")


@pytest.mark.nightly
def test_vectors_are_those_of_the_modules(base, tmp_path, capsys):
  _, run = base
  stored = json.loads((run / "settings.json").read_text())
  name = hugging_face_texts.HuggingFaceEmbeddings.import_path()
  assert stored["experiment"] == name
  texts = ["a b", "c", "a b c d e f g h"]
  path = _write(tmp_path / "texts.jsonl", [{"text": x} for x in texts])
  experiment = hugging_face_texts.HuggingFaceEmbeddings(
    weights=str(run), infer_files=path, global_batch_size=8
  )
  found, line = _infer(experiment, run, capsys)
  assert line.startswith("step 0: texts: 3 examples, 1 of them cut: ")

  config = golden_case.read("bert_encoder").config
  of = families.find(config)
  weights = testing.variables(of.names(config))
  for text, each in zip(texts, found, strict=True):
    words = ["[CLS]", *text.split()[:4], "[SEP]"]
    ids = np.asarray([[_WORDS.index(word) for word in words]], np.int32)
    args = testing.token_args(ids)
    states = testing.run(of.model(config).apply, weights, *args)
    mean = np.asarray(states[0], np.float64).mean(axis=0)
    expected = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(each["embedding"], expected, rtol=0, atol=1e-5)
  # Other texts under the same name are not taken for these.
  _write(tmp_path / "texts.jsonl", [{"text": x} for x in "abc"])
  with pytest.raises(user_error.UserError, match="another data"):
    _infer(experiment, run, capsys)


@pytest.mark.nightly
def test_a_classifier_is_trained_exported_and_imported(base, tmp_path, capsys):
  folder, imported = base
  rows = [{"text": x, "label": "no" if x in "ab" else "yes"} for x in "abcd"]
  path = _write(tmp_path / "texts.jsonl", rows)
  run, out, again = (tmp_path / name for name in ("run", "out", "again"))
  knobs = {"train_files": path, "validation_files": path, "length": 8}
  classifier = hugging_face_texts.HuggingFaceClassifier
  experiment = classifier(
    weights=str(imported), labels=("no", "yes"), **knobs, **_STILL
  )
  _train(experiment, run)
  assert _run("export", run, "--to", out) == 0
  config = json.loads((out / "config.json").read_text())
  assert config["architectures"] == ["BertForSequenceClassification"]
  assert config["id2label"] == {"0": "no", "1": "yes"}
  assert config["label2id"] == {"no": 0, "yes": 1}
  assert (out / "1_Pooling" / "config.json").exists()
  # The pooler is that of the import, and only the head is new.
  before, after = _tensors(folder), _tensors(out)
  for name, value in before.items():
    np.testing.assert_array_equal(after.pop(f"bert.{name}"), value)
  assert after.keys() == {"classifier.weight", "classifier.bias"}
  assert 0 < np.std(after["classifier.weight"]) < 0.03

  predictions, _ = _infer(experiment, run, capsys)
  assert {x["label"] for x in predictions} <= {"no", "yes"}
  sums = np.exp([x["log_probs"] for x in predictions]).sum(axis=1)
  np.testing.assert_allclose(sums, 1, rtol=1e-5)
  assert _run("import", out, "--to", again) == 0
  stored = json.loads((again / "settings.json").read_text())
  assert stored["experiment"] == classifier.import_path()
  # Labels are those of the files, and texts need none.
  alone = _write(tmp_path / "alone.jsonl", [{"text": x} for x in "abcd"])
  found, line = _infer(
    classifier(weights=str(again), infer_files=alone, length=8), again, capsys
  )
  assert "step 0: alone: 4 examples:" in line
  assert [x["label"] for x in found] == [x["label"] for x in predictions]
  np.testing.assert_allclose(
    [x["log_probs"] for x in found],
    [x["log_probs"] for x in predictions],
    rtol=1e-5,
  )


@pytest.mark.nightly
def test_masked_text_adds_a_head_to_an_encoder(base, tmp_path):
  folder, imported = base
  path = tmp_path / "own.txt"
  path.write_text("a b c d\n\n" + "e f g h " * 20)
  run, out = tmp_path / "run", tmp_path / "out"
  experiment = hugging_face.HuggingFaceBert(
    weights=str(imported), train_files=str(path), length=16, **_STILL
  )
  config = _train(experiment, run)
  masking = config.task.model.masking
  assert (masking.mask_id, masking.special_ids) == (3, (0, 1, 2, 3, 4))
  batch = fdl.build(config).train_input.get_next()
  assert {1, 2} <= set(batch["inputs"].ravel().tolist())
  np.testing.assert_array_equal(batch["inputs"], batch["targets"])
  assert _run("export", run, "--to", out) == 0
  stated = json.loads((out / "config.json").read_text())
  assert stated["architectures"] == ["BertForMaskedLM"]
  before, after = _tensors(folder), _tensors(out)
  for name in before.keys() - _POOLER.keys():
    np.testing.assert_array_equal(after.pop(f"bert.{name}"), before[name])
  assert {name.rpartition(".")[0] for name in after} == {
    "cls.predictions",
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
  }


@pytest.mark.nightly
def test_pairs_train_an_encoder(base, tmp_path):
  _, imported = base
  rows = [{"text": x, "other": f"{x} h"} for x in "abcdefg"]
  path = _write(tmp_path / "pairs.jsonl", rows)
  knobs = {**_STILL, "num_train_steps": 8, "learning_rate": 1e-2}
  experiment = hugging_face_texts.HuggingFaceEmbeddings(
    weights=str(imported),
    train_files=path,
    validation_files=path,
    pair_key="other",
    **{**knobs, "eval_every_steps": 4},
  )
  config = experiment.job()
  run = tmp_path / "run"
  run.mkdir()
  found = train.run(fdl.build(config), config, epath.Path(run)).evaluations
  losses = [found[step]["validation"]["loss"] for step in sorted(found)]
  assert losses[-1] < losses[0]
  assert _run("export", run, "--to", tmp_path / "out") == 0
  stated = json.loads((tmp_path / "out" / "config.json").read_text())
  assert stated["architectures"] == ["BertModel"]
  assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()


@pytest.mark.parametrize(
  ("cls", "knobs", "message"),
  [
    (
      "Classifier",
      {},
      r"labels is missing: .*--fdl.labels='\(\"no\",\"yes\"\)",
    ),
    ("Classifier", {"labels": ("no", "no")}, "two or more different names"),
    ("Classifier", {"labels": ("no",)}, "two or more different names"),
    ("Classifier", {"text_key": "body"}, "labels is missing"),
  ],
)
def test_mistakes_are_one_line(cls, knobs, message, base, tmp_path):
  rows = [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}]
  path = _write(tmp_path / "texts.jsonl", rows)
  made = getattr(hugging_face_texts, f"HuggingFace{cls}")
  with pytest.raises(user_error.UserError, match=message):
    made(weights=str(base[1]), train_files=path, **knobs).job()


def test_data_is_read_before_weights(base, tmp_path):
  rows = [{"text": "a", "label": "yes"}, {"text": "b", "label": "maybe"}]
  path = _write(tmp_path / "texts.jsonl", rows)
  experiment = hugging_face_texts.HuggingFaceClassifier(
    weights=str(base[1]), train_files=path, labels=("no", "yes"), length=8
  )
  config, run = experiment.job(), tmp_path / "run"
  run.mkdir()
  with pytest.raises(
    (user_error.UserError, ValueError), match=r"line 2.*maybe"
  ):
    train.run(fdl.build(config), config, epath.Path(run))


def test_a_folder_without_modules_says_its_pooling(base, tmp_path, capsys):
  folder, _ = base
  plain, run = tmp_path / "plain", tmp_path / "run"
  plain.mkdir()
  for name in ("config.json", "model.safetensors", "tokenizer.json"):
    (plain / name).write_bytes((folder / name).read_bytes())
  assert _run("import", plain, "--to", run) == 0
  made = hugging_face_texts.HuggingFaceEmbeddings
  path = tmp_path / "texts.txt"
  path.write_text("a b\n\nc\n")
  experiment = made(weights=str(run), infer_files=str(path))
  assert infer.run(fdl.build(experiment.job()), epath.Path(run)) == 0
  lines = capsys.readouterr().out.splitlines()
  assert "has no modules.json: vectors are the mean" in lines[-2]
  assert "texts: 2 examples:" in lines[-1]
  config = made(weights=str(run), pooling="cls", normalize=True).job()
  assert config.task.model.pooling == ("cls",)
  assert not config.notes
  assert len(config.task.model.steps) == 1
