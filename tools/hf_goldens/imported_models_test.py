"""Imported models generate, evaluate and train as transformers does."""

import json
import os

import numpy as np
import pytest
from safetensors import numpy as safetensors

from paxon.tasks.lm.params import hugging_face
from paxon.tools.hf_goldens import imported_models


# All others in `oracle_test`.
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_equals_transformers(name, tmp_path):
  run, tuned = imported_models.check(tmp_path, name)
  # The run can be used from any directory.
  settings = json.loads((tuned / "settings.json").read_text())
  (weights,) = (
    each.partition("=")[2]
    for each in settings["overrides"]
    if each.startswith("--fdl.weights=")
  )
  assert os.path.isabs(weights)
  assert os.path.samefile(weights, run)
  for source, target in ((run, "same"), (tuned, "tuned_export")):
    to = os.fspath(tmp_path / target)
    imported_models.convert("export", os.fspath(source), "--to", to)
  original, same, trained = (
    safetensors.load_file(tmp_path / folder / "model.safetensors")
    for folder in ("original", "same", "tuned_export")
  )
  assert original.keys() == same.keys() == trained.keys()
  for key, value in original.items():
    np.testing.assert_array_equal(same[key], value)
    assert np.isfinite(trained[key]).all()
  assert any((trained[key] != value).any() for key, value in original.items())
  # With it, transformers can use the exported folder.
  for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
    assert (tmp_path / "tuned_export" / each).exists()


def test_a_tokenizer_that_does_not_fit_is_one_clear_error(tmp_path):
  config = imported_models.read_goldens()["qwen3"]["config"]
  run = imported_models.import_model(
    tmp_path, "qwen3", {**config, "vocab_size": 300}
  )
  decode = ("--mode=decode", f"--job_log_dir={run}", "--prompt=a fox")
  evaluate = ("--mode=eval", f"--job_log_dir={run}", f"--eval_file={__file__}")
  train = (
    f"--exp={hugging_face.HuggingFaceLm.import_path()}",
    f"--fdl.weights={run}",
    f"--fdl.train_files={tmp_path}/train.jsonl",
    f"--job_log_dir={tmp_path}/trained",
  )
  commands = decode, (*decode, "--chat"), evaluate, train
  for command in commands:
    printed = imported_models.call(*command, status=2)
    assert "vocabulary of 336 ids, and the model has 300" in printed
  tokenizer = run / "hugging_face" / "tokenizer.json"
  tokenizer.write_text("{")
  for command in commands:
    printed = imported_models.call(*command, status=2)
    assert f"{tokenizer} is not JSON" in printed
  tokenizer.unlink()
  for command in commands:
    printed = imported_models.call(*command, status=2)
    assert f"{run}/hugging_face" in printed
    assert "--fdl.tokenizer=PATH" in printed
