"""Language models of models of images and texts give transformers' logits.

Run as `oracle_test`, and skipped where torch is not installed.
"""

import importlib.util
import json

from etils import epath
from flax import traverse_util
import jax
import numpy as np
import pytest

from paxon.layers.models.hugging_face import (
  families,
  text_configs,
)
from paxon.layers.models.hugging_face.files import (
  safetensors_file,
  weight_files,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  testing,
)

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or importlib.util.find_spec("transformers") is None,
    reason="torch and transformers are not here; --config=oracle brings them",
  ),
  pytest.mark.filterwarnings("ignore"),
]

_TEXT = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "pad_token_id": 0,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
_IMAGE = {
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "image_size": 16,
  "patch_size": 8,
}
_QWEN_IMAGE = {
  "depth": 1,
  "embed_dim": 16,
  "hidden_size": 32,
  "out_hidden_size": 32,
  "intermediate_size": 16,
  "num_heads": 2,
  "patch_size": 8,
  "num_position_embeddings": 16,
  "deepstack_visual_indexes": [0],
  "fullatt_block_indexes": [0],
}
_AXES = {"mrope_section": [1, 1, 2], "rope_theta": 50.0}
# Fields of the language model, and of the images.
_CASES = {
  "gemma3": (
    {"head_dim": 12, "sliding_window": 4, "num_hidden_layers": 7},
    _IMAGE,
  ),
  "idefics3": ({"model_type": "llama"}, _IMAGE),
  "internvl": (
    {"model_type": "qwen2"},
    {**_IMAGE, "image_size": [16, 16], "patch_size": [8, 8]},
  ),
  "llava": (
    {"model_type": "mistral", "sliding_window": 5},
    {**_IMAGE, "model_type": "clip_vision_model"},
  ),
  "llava_next": ({}, {**_IMAGE, "model_type": "clip_vision_model"}),
  "llava_onevision": (
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {**_IMAGE, "model_type": "siglip_vision_model"},
  ),
  "mistral3": (
    {"model_type": "mistral", "head_dim": 12},
    {**_IMAGE, "model_type": "pixtral", "head_dim": 8},
  ),
  "qwen2_vl": (
    {"rope_scaling": {"type": "mrope", **_AXES}, "tie_word_embeddings": True},
    _QWEN_IMAGE,
  ),
  "qwen2_5_vl": (
    {"rope_parameters": {"rope_type": "default", **_AXES}},
    _QWEN_IMAGE,
  ),
  "qwen3_vl": (
    {
      "head_dim": 8,
      "rope_parameters": {
        **_AXES,
        "rope_type": "default",
        "mrope_interleaved": True,
      },
    },
    _QWEN_IMAGE,
  ),
  "smolvlm": ({"model_type": "llama"}, _IMAGE),
}


# Their classes tie by default, and files have their own heads.
_UNTIED = ("internvl", "mistral3")


def _make(case):
  """Returns a model of transformers with random weights."""
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  text, image = _CASES[case]
  whole = text_configs.list_architectures()[case]
  cls = getattr(transformers, whole)
  text = json.loads(json.dumps({**_TEXT, **text}))
  config = cls.config_class(text_config=text, vision_config=dict(image))
  if case in _UNTIED:
    config.tie_word_embeddings = False
  torch.manual_seed(0)
  model = cls(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
  return model


def _logits(model, ids):
  import torch  # pyrefly: ignore[missing-import]

  with torch.no_grad():
    found = model(input_ids=torch.from_numpy(ids).long(), use_cache=False)
  return found.logits.numpy()


def _read(folder):
  """Returns the family, the language model's configuration, and weights."""
  config = json.loads((folder / "config.json").read_text())
  of, text = families.find(config), text_configs.extract(config)
  names = of.names(config)
  files = weight_files.find(epath.Path(folder), names=names)
  files.check()
  weights = {
    name: jax.device_put(leaf.from_tensors(files.read_rows))
    for name, leaf in names.leaves.items()
  }
  model = of.model(config)
  assert families.find(text).model(text) == model
  return model, text, files, traverse_util.unflatten_dict(weights, sep="/")


@pytest.mark.parametrize("case", _CASES)
def test_language_model_is_that_of_transformers(case, tmp_path):
  import torch  # pyrefly: ignore[missing-import]
  import transformers  # pyrefly: ignore[missing-import]

  ids = golden_case.ids(case, vocab_size=64)[:, :10]
  theirs = _make(case)
  expected = _logits(theirs, ids)
  theirs.save_pretrained(tmp_path / "old")
  model, text, files, weights = _read(tmp_path / "old")
  found = testing.run(model.apply, weights, *testing.token_args(ids))
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  # The names of parameters are those of the layout of transformers 5.
  state = {k: v for k, v in theirs.state_dict().items() if v.is_floating_point}
  new = tmp_path / "new"
  new.mkdir()
  (new / "config.json").write_text((tmp_path / "old/config.json").read_text())
  if theirs.config.tie_word_embeddings:
    state.pop("lm_head.weight")
  shapes = {k: (np.float32, tuple(v.shape)) for k, v in state.items()}
  path = epath.Path(new) / weight_files.WEIGHTS
  with safetensors_file.Writer(path, shapes) as writer:
    for name, value in state.items():
      writer.write_rows(name, 0, np.atleast_1d(value.numpy()))
  for name, value in traverse_util.flatten_dict(_read(new)[-1]).items():
    same = traverse_util.flatten_dict(weights)[name]
    np.testing.assert_array_equal(value, same, err_msg=str(name))
  # An export is a model of the language model's class.
  out = tmp_path / "out"
  out.mkdir()
  of = families.find(text)
  text = {**text, "architectures": [of.architecture], "dtype": "float32"}
  (out / "config.json").write_text(json.dumps(text))
  tensors = of.names(text).tensors
  shapes = {name: (np.float32, each.shape) for name, each in tensors.items()}
  path = epath.Path(out) / weight_files.WEIGHTS
  with safetensors_file.Writer(path, shapes) as writer:
    for name, tensor in tensors.items():
      rows = files.read_rows(name, 0, tensor.shape[0])
      writer.write_rows(name, 0, rows)
  again = transformers.AutoModelForCausalLM.from_pretrained(
    out, dtype=torch.float32
  )
  assert type(again).__name__ == of.architecture
  np.testing.assert_allclose(
    _logits(again.eval(), ids), expected, rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize("case", ["gemma3", "mistral3", "llava", "qwen2_vl"])
def test_missing_fields_are_those_of_transformers(case):
  import transformers  # pyrefly: ignore[missing-import]

  whole = text_configs.list_architectures()[case]
  cls = getattr(transformers, whole).config_class
  for text in ({}, None):
    config = {"model_type": case, "text_config": text}
    full = json.loads(cls(text_config=text).to_json_string(use_diff=False))
    full["architectures"] = None
    if case == "qwen2_vl" and text is None:
      continue
    of = families.find(config)
    assert of.model(config) == families.find(full).model(full)
