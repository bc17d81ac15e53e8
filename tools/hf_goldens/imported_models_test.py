"""Imported models generate, evaluate and train as transformers does."""

import json
import os

import numpy as np
import pytest
from safetensors import numpy as safetensors

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
