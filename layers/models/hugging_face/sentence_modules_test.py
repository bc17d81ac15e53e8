"""Tests of the modules of sentence-transformers in a folder."""

import json

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paxon.layers.models import sentence_encoder
from paxon.layers.models.hugging_face import family, sentence_modules

# Types of sentence-transformers 2 and 6.
_OLD = "sentence_transformers.models."
_NEW = "sentence_transformers.base.modules."
_POOLING = {
  "word_embedding_dimension": 4,
  "pooling_mode_cls_token": True,
  "pooling_mode_mean_tokens": False,
  "pooling_mode_max_tokens": True,
}


def _write(folder, kinds, *, prefix=_OLD, **files):
  """Writes `modules.json` and further files; returns the folder."""
  listed = [
    {
      "idx": i,
      "type": f"{prefix}{kind}",
      "path": f"{i}_{kind.rpartition('.')[2]}" if i else "",
    }
    for i, kind in enumerate(kinds)
  ]
  (folder / "modules.json").write_text(json.dumps(listed))
  for name, content in files.items():
    path = folder / f"{name.replace('__', '/')}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
  return epath.Path(folder)


def test_a_folder_without_modules_has_the_mean(tmp_path):
  found = sentence_modules.read(epath.Path(tmp_path))
  assert found == sentence_modules.SentenceModules()
  assert not found.is_described
  assert sentence_modules.find_folders(epath.Path(tmp_path)) == ()


def test_files_of_old_and_new_versions_are_read(tmp_path):
  kinds = ("Transformer", "Pooling", "Normalize")
  folder = _write(
    tmp_path,
    kinds,
    sentence_bert_config={"max_seq_length": 20, "do_lower_case": True},
    **{"1_Pooling__config": _POOLING},
  )
  expected = sentence_modules.SentenceModules(
    is_described=True,
    pooling=("cls", "max"),
    normalized=(0,),
    max_length=20,
    lower_case=True,
  )
  assert sentence_modules.read(folder) == expected
  assert sentence_modules.find_folders(folder) == ("1_Pooling",)

  kinds = "transformer.Transformer", "pooling.Pooling", "dense.Dense"
  folder = _write(
    tmp_path,
    (*kinds, "normalize.Normalize"),
    prefix=_NEW,
    sentence_bert_config={"processor_kwargs": {"model_max_length": 9}},
    config_sentence_transformers={
      "default_prompt_name": "query",
      "prompts": {"query": "query: "},
    },
    **{"1_Pooling__config": {"pooling_mode": "weightedmean"}},
  )
  assert sentence_modules.read(folder) == sentence_modules.SentenceModules(
    is_described=True,
    pooling=("weightedmean",),
    dense=("2_Dense",),
    normalized=(1,),
    max_length=9,
    prompt="query: ",
  )


def _dense(folder, **changes):
  folder.mkdir()
  random = np.random.default_rng(0)
  weights = {
    "linear.weight": random.normal(size=(3, 4)).astype(np.float32),
    "linear.bias": random.normal(size=3).astype(np.float32),
  }
  safetensors_numpy.save_file(weights, folder / "model.safetensors")
  fields = {
    "in_features": 4,
    "out_features": 3,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
  }
  (folder / "config.json").write_text(json.dumps({**fields, **changes}))
  return weights


def test_dense_layers_and_norms_keep_their_order(tmp_path):
  weights = _dense(tmp_path / "dense")
  modules = sentence_modules.SentenceModules(dense=("dense",), normalized=(0,))
  make = sentence_modules.make_steps
  steps = make(modules, str(tmp_path), lambda cls, **fields: cls(**fields))
  assert steps[0] is sentence_encoder.normalize
  x = np.random.default_rng(1).normal(size=(2, 4))
  found = jnp.asarray(x, jnp.float32)
  for step in steps:
    found = step(found)
  unit = x / np.linalg.norm(x, axis=1, keepdims=True)
  kernel, bias = weights["linear.weight"], weights["linear.bias"]
  expected = np.tanh(unit @ kernel.T.astype(np.float64) + bias)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  last = make(modules, "", lambda cls, **fields: cls, normalize=True)[-1]
  assert last is sentence_encoder.normalize


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"activation_function": "torch.nn.Mish"}, "is 'torch.nn.Mish'; .* Tanh"),
    ({"use_residual": True}, "use_residual is 'True'"),
    ({"out_features": 5}, r"linear.weight must have the shape \[5, 4\]"),
  ],
)
def test_other_dense_layers_are_rejected(changes, message, tmp_path):
  _dense(tmp_path / "dense", **changes)
  layer = sentence_modules.Dense(folder=str(tmp_path / "dense"))
  with pytest.raises(family.UnsupportedConfigError, match=message):
    layer(jnp.ones((1, 4)))


@pytest.mark.parametrize(
  ("kinds", "files", "message"),
  [
    (("Transformer", "CNN"), {}, "lists Transformer, CNN; supported is a"),
    (("Transformer", "Pooling", "LSTM"), {}, "lists the module LSTM"),
    (
      ("Transformer", "Pooling"),
      {"1_Pooling__config": {"pooling_mode": "middle"}},
      "pooling_mode is 'middle'; supported is cls, max",
    ),
    (
      ("Transformer", "Pooling"),
      {"sentence_bert_config": {"max_seq_length": "many"}},
      "max_seq_length is 'many'; supported is a positive integer",
    ),
    (
      ("Transformer", "Pooling"),
      {
        "1_Pooling__config": {"include_prompt": False},
        "config_sentence_transformers": {
          "default_prompt_name": "q",
          "prompts": {"q": "q: "},
        },
      },
      "include_prompt is 'False'",
    ),
  ],
)
def test_what_is_not_supported_is_named(kinds, files, message, tmp_path):
  folder = _write(tmp_path, kinds, **files)
  with pytest.raises(family.UnsupportedConfigError, match=message):
    sentence_modules.read(folder)


@pytest.mark.parametrize("path", ["../other", "..", "/etc"])
def test_folders_elsewhere_are_rejected(path, tmp_path):
  listed = [{"type": "a.Transformer", "path": path}]
  (tmp_path / "modules.json").write_text(json.dumps(listed))
  with pytest.raises(family.UnsupportedConfigError, match="same folder"):
    sentence_modules.find_folders(epath.Path(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "3", '[{"type": "a.Pooling"}]'])
def test_damaged_files_are_errors(text, tmp_path):
  (tmp_path / "modules.json").write_text(text)
  with pytest.raises(family.UnsupportedConfigError, match=r"modules\.json"):
    sentence_modules.read(epath.Path(tmp_path))
