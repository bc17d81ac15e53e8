"""Tests for the data of experiments."""

import gzip
import json

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs import unset_input
from paxon.inputs.tokenizers import training
from paxon.runner import user_error
from paxon.runner.configuration import resolving
from paxon.runner.planning import job_lint
from paxon.runner.training import decode, evaluate, train
from paxon.tasks.lm import lm_data, transformer_lm_spmd


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
  with pytest.raises(ValueError, match="280 ids, and the model has 272"):
    train.run(*_tokenized(tmp_path, **knobs), epath.Path(tmp_path))


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
