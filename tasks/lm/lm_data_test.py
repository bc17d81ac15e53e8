"""Tests for the data of experiments."""

import gzip
import json

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs import unset_input
from paxon.runner.configuration import resolving
from paxon.runner.planning import job_lint
from paxon.runner.training import train
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
