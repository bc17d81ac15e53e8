"""Tests for the data of experiments."""

import gzip
import json

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs import unset_input
from paxon.inputs.tokenizers import training
from paxon.runner import epochs, knobs, user_error
from paxon.runner.configuration import dump, overrides, resolving
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.planning import job_lint
from paxon.runner.training import train
from paxon.tasks.lm import lm_data, transformer_lm_spmd


def _train_files(files):
  return overrides.Override("train_files", files)


class _Model(transformer_lm_spmd.TransformerLmSpmd):
  global_batch_size = 8
  num_layers = 2
  embed_dim = 32
  head_dim = 8
  learning_rate = 1e-3
  length = 16


class _Text(lm_data.Text, _Model):
  """Text from files."""


class _Synthetic(lm_data.Synthetic, _Model):
  """Synthetic tokens."""


def _write(folder, name, documents):
  rows = "".join(json.dumps({"text": text}) + "\n" for text in documents)
  (folder / name).write_bytes(gzip.compress(rows.encode()))


def test_reads_text_from_files(tmp_path):
  _write(tmp_path, "train-0.json.gz", ["one", "two"])
  _write(tmp_path, "train-1.json.gz", ["three"])
  _write(tmp_path, "held-out.json.gz", ["four"])
  job = _Text(
    train_files=str(tmp_path / "train-*.json.gz"),
    validation_files=str(tmp_path / "held-out.json.gz"),
  ).job()
  train_input = fdl.build(job.train_input)
  held_out = fdl.build(job.eval_inputs["validation"])
  assert len(train_input.examples.source) == 3
  batch = train_input.get_next()
  text = train_input.tokenizer.decode(np.ravel(batch["inputs"]))
  for word in ("one", "two", "three"):
    assert word in text
  assert "four" not in text
  assert sum(int(b["target_bytes"].sum()) for b in held_out) == len("four")


def test_no_evaluation_without_validation_files(tmp_path):
  _write(tmp_path, "train.json.gz", ["one"])
  job = _Text(train_files=str(tmp_path / "train.json.gz")).job()
  assert job.eval_inputs == {}


def test_without_files_only_training_raises(tmp_path):
  config = _Text(mesh="fsdp=-1").job()
  job = fdl.build(config)
  assert isinstance(job.train_input, unset_input.UnsetInput)
  assert job.train_input.length == 16
  errors = [f for f in job_lint.check(job, num_devices=8) if f.is_error]
  assert errors == []
  message = (
    r"train_files is not set\. Set it to files, such as --fdl\.train_files="
  )
  with pytest.raises(ValueError, match=message) as caught:
    train.run(job, config, epath.Path(tmp_path))
  # One line on the command line, with the location.
  refusal = resolving.explain_error(caught.value, config)
  assert refusal is not None
  assert refusal.endswith("(at train_input).")


def test_toy_needs_no_files():
  job = fdl.build(_Text().shrink().job())
  batch = job.train_input.get_next()
  assert batch["target_bytes"].sum() > 0
  assert not job.eval_inputs["validation"].is_endless


def test_synthetic_tokens_are_ones_or_random():
  ones = fdl.build(_Synthetic().job())
  assert set(np.ravel(ones.train_input.get_next()["inputs"])) == {1}
  assert len(list(ones.eval_inputs["validation"])) == 1
  random = fdl.build(_Synthetic(random_seed=1, vocab_size=100).job())
  tokens = random.train_input.get_next()["inputs"]
  assert len(np.unique(tokens)) > 30
  assert tokens.max() < 100


@pytest.fixture(scope="module", name="vocabularies")
def make_vocabularies(tmp_path_factory):
  """Two tokenizers of 280 ids with different merges."""
  folder = tmp_path_factory.mktemp("vocabularies")
  for name, text in (("a", "the cat sat on the mat "), ("b", "0123456789 ")):
    words = [f"{text} {i}".encode() for i in range(300)]
    training.train(
      words, str(folder / name), kind=training.Kind.BPE, vocab_size=280
    )
  return folder


def _tokenized(tmp_path, **knobs):
  _write(tmp_path, "train.json.gz", ["the cat sat on the mat " * 40] * 8)
  files = str(tmp_path / "train.json.gz")
  shared = {"vocab_size": 288, "eval_every_steps": 2, "num_train_steps": 2}
  config = _Text(
    **{"train_files": files, "validation_files": files, **shared, **knobs}
  ).job()
  return fdl.build(config), config


def test_a_tokenizer_is_used_for_training_and_text(vocabularies, tmp_path):
  job, _ = _tokenized(tmp_path, tokenizer=str(vocabularies / "a"))
  batch = job.train_input.get_next()
  tokenizer = job.task.tokenizer
  assert tokenizer.vocab_size == 280
  assert (batch["target_bytes"] > 1).any()
  assert "the cat sat" in tokenizer.decode(batch["targets"][0])


def test_a_vocabulary_larger_than_the_model_is_rejected(vocabularies, tmp_path):
  knobs = {"tokenizer": str(vocabularies / "a"), "vocab_size": 272}
  with pytest.raises(ValueError, match="does not embed: it has 272 ids"):
    train.run(*_tokenized(tmp_path, **knobs), epath.Path(tmp_path))


@pytest.mark.nightly
def test_a_run_is_bound_to_its_tokenizer(vocabularies, tmp_path):
  folder = epath.Path(tmp_path / "run")
  folder.mkdir()
  job, config = _tokenized(tmp_path, tokenizer=str(vocabularies / "a"))
  train.run(job, config, folder)
  message = "trained by a tokenizer with probe .*; use the tokenizer of the run"
  other = {"tokenizer": str(vocabularies / "b"), "num_train_steps": 4}
  for use in (
    lambda job, config: train.run(job, config, folder),
    lambda job, _: evaluate.run(job, folder),
    lambda job, _: decode.run(job, folder, "the"),
  ):
    with pytest.raises(user_error.UserError, match=message):
      use(*_tokenized(tmp_path, **other))


def test_a_run_copies_the_files_of_its_tokenizer(tmp_path):
  for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
    (tmp_path / name).write_text("{}")
  names = ("tokenizer.json", "tokenizer_config.json")
  expected = {f"tokenizer/{name}": str(tmp_path / name) for name in names}
  for given in (tmp_path, tmp_path / "tokenizer.json"):
    assert _Text(tokenizer=str(given)).run_files() == expected
  assert _Text(tokenizer=str(tmp_path / "none")).run_files() == {}
  assert _Text().run_files() == {}


def _count_examples(train_files, **knobs):
  job = _Text(train_files=train_files, **knobs).job()
  return len(fdl.build(job.train_input).examples.source)


def test_files_are_a_list_or_have_alternatives(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  for name, count in (("a", 1), ("b", 2), ("c", 4)):
    _write(tmp_path, f"{name}.json.gz", [f"{name}{i}" for i in range(count)])
  assert _count_examples("~/{a,c}.json.gz") == 5
  assert _count_examples(("~/a.json.gz", str(tmp_path / "[bc].json.gz"))) == 7
  config = _Text(train_files="~/{a,none}.json.gz").job()
  with pytest.raises(FileNotFoundError, match=r"the name '~/none\.json\.gz'"):
    fdl.build(config.train_input).get_next()


def test_a_column_of_parquet_is_text(tmp_path):
  arrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  table = arrow.table({"body": ["one", "two"], "other": [1, 2]})
  parquet.write_table(table, tmp_path / "a.parquet")
  files = {"train_files": str(tmp_path / "*.parquet"), "text_key": "body"}
  train_input = fdl.build(_Text(**files).job().train_input)
  batch = train_input.get_next()
  text = train_input.tokenizer.decode(np.ravel(batch["inputs"]))
  assert "one" in text
  assert "two" in text
  assert train_input.examples.name(1).endswith("a.parquet, group 0, row 1")
  wrong = fdl.build(_Text(**files | {"text_key": "text"}).job().train_input)
  with pytest.raises(ValueError, match=r"a\.parquet"):
    wrong.get_next()
  mixed = (files["train_files"], "b.jsonl")
  with pytest.raises(
    user_error.UserError, match=r"JSON lines or Parquet, not both: .*'b\.jsonl'"
  ):
    _Text(train_files=mixed).job()


def test_epochs_set_the_steps_and_the_schedule(tmp_path):
  _write(tmp_path, "a.json.gz", [f"document {i}" * i for i in range(1, 30)])
  files = str(tmp_path / "a.json.gz")
  name = f"{_Text.__module__}.{_Text.__qualname__}"

  def resolve(*texts):
    given = [overrides.Override(*text.split("=")) for text in texts]
    return resolving.resolve(name, [*given, _train_files(files)]), given

  found, given = resolve("num_epochs=3")
  sizes = [len(f"document {i}" * i) + 1 for i in range(1, 30)]
  # Of each document all bytes and END are targets; 8 sequences of 16.
  steps = -(-3 * sum(sizes) // (8 * 16))
  assert found.config.num_train_steps == steps
  stored = epochs.fix_num_steps(given, found.experiment, found.config)
  assert [str(each) for each in stored] == [f"--fdl.num_train_steps={steps}"]
  by_steps, _ = resolve(f"num_train_steps={steps}")
  assert dump.to_text(found.config) == dump.to_text(by_steps.config)
  for texts, message in (
    (("num_epochs=3", "num_train_steps=4"), "are both set; set one"),
    (("num_epochs=3", "train_input.length=8"), "counts the batches without it"),
    (("num_epochs=0",), "num_epochs must be positive, got 0"),
  ):
    with pytest.raises(user_error.UserError, match=message):
      resolve(*texts)
  with pytest.raises(
    knobs.KnobError, match=r"counted: .*none\.json.* Or set nu"
  ):
    _Text(train_files="none.json", num_epochs=2).job()
  with pytest.raises(knobs.KnobError, match=r"train_files is not set"):
    _Text(num_epochs=2).job()
  with pytest.raises(knobs.KnobError, match=r"no known number of examples"):
    _Synthetic(num_epochs=2).job()
