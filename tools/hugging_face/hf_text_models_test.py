"""The language model of a model of images and texts is imported alone."""

import json
import os

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models.hugging_face import families
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.tools.hugging_face import hf_main

_FILE = "model.safetensors"
_TOWER = {"vision_tower.x.weight": (3,), "multi_modal_projector.y": (2, 3)}
# Prefixes of the layers and of the head, and of everything else.
_LAYOUTS = {
  "old": ("language_model.model.", "language_model.", ""),
  "new": ("model.language_model.", "", "model."),
}


def _run(*argv):
  return hf_main.main([os.fspath(arg) for arg in argv])


def _save(folder, config, tensors):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  safetensors_numpy.save_file(
    tensors, folder / _FILE, metadata={"format": "pt"}
  )


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize(
  ("whole", "architecture", "case"),
  [
    # A tied and an untied head; Mistral's file says neither.
    ("gemma3", "Gemma3ForConditionalGeneration", "gemma3"),
    ("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
  ],
)
def test_the_language_model_is_that_of_its_own_files(
  layout, whole, architecture, case, tmp_path, capsys
):
  text = {**golden_case.read(case).config, "dtype": "float32"}
  tensors = {
    name: golden_case.weight(name, tensor.shape)
    for name, tensor in families.find(text).names(text).tensors.items()
  }
  _save(tmp_path / "text", text, tensors)
  at, head, other = _LAYOUTS[layout]
  moved = {
    at + name.removeprefix("model.")
    if name.startswith("model.")
    else head + name: value
    for name, value in tensors.items()
  }
  moved |= {
    other + name: golden_case.weight(name, shape)
    for name, shape in _TOWER.items()
  }
  config = {
    "architectures": [architecture],
    "model_type": whole,
    "torch_dtype": "float32",
    "eos_token_id": [3, 4],
    "text_config": {
      **{k: v for k, v in text.items() if k != "architectures"},
      "tie_word_embeddings": None,
      "unsloth": 1,
    },
    "vision_config": {"hidden_size": 3},
  }
  _save(tmp_path / "whole", config, moved)
  assert _run("import", tmp_path / "whole", "--to", tmp_path / "run") == 0
  lines = capsys.readouterr().out.splitlines()
  name = families.find(text).architecture
  assert (
    f"{whole}: imported the language model, which is exported as {name}; left"
    " out multi_modal_projector, vision_tower (2 tensors)"
  ) in lines
  assert sum("ignored" in line and "unsloth" in line for line in lines) == 1
  assert _run("export", tmp_path / "run", "--to", tmp_path / "back") == 0
  back = json.loads((tmp_path / "back" / "config.json").read_text())
  assert back["architectures"] == [name]
  assert back["model_type"] == text["model_type"]
  assert back["eos_token_id"] == [3, 4]
  assert back["tie_word_embeddings"] == (case == "gemma3")
  assert families.find(back).model(back) == families.find(text).model(text)
  expected = (tmp_path / "text" / _FILE).read_bytes()
  assert (tmp_path / "back" / _FILE).read_bytes() == expected
  if case == "gemma3":
    like = ["--like", tmp_path / "whole", "--to", tmp_path / "like"]
    assert _run("export", tmp_path / "run", *like) == 0
    text = (tmp_path / "like" / "config.json").read_text()
    assert json.loads(text) == back
    assert (tmp_path / "like" / _FILE).read_bytes() == expected


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"architectures": ["Gemma3Model"]},
      "architectures is ['Gemma3Model']; gemma3 supports only"
      " ['Gemma3ForConditionalGeneration']",
    ),
    ({"text_config": 3}, "text_config is '3'; it must be an object"),
    (
      {"model_type": "llava", "text_config": {"model_type": "cohere2"}},
      "text_config.model_type 'cohere2' is not supported in llava",
    ),
    ({"model_type": "paligemma"}, "'paligemma' is not supported"),
    ({"text_config": {"hidden_act": "x"}}, "hidden_act is 'x'"),
  ],
)
def test_other_models_are_rejected(changes, message, tmp_path, capsys):
  config = {"model_type": "gemma3", "text_config": {}, **changes}
  _save(tmp_path / "whole", config, {"x": np.zeros(3, np.float32)})
  assert _run("import", tmp_path / "whole", "--to", tmp_path / "run") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
