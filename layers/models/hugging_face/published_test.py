"""Tests with the published configurations of 137 models.

`goldens/published.json` has, by name of the repository, the fields of its
`config.json`, the number of parameters in its files, and how many of them the
model does not use (the pooler and next sentence prediction of BERT, and the
copies of embedding and head in DeepSeek-V3's module of further tokens, all of
Qwen3-Next's, and the embedding of masked frames of wav2vec 2.0). They
were written down from copies of the files in public repositories, or from
memory; the numbers of parameters confirm every size.
"""

import json
import math

import pytest

from paxon.layers.models.hugging_face import (
  families,
  family,
)
from paxon.layers.models.hugging_face.golden_models import golden_case

_MODELS = json.loads((golden_case.FOLDER / "published.json").read_text())
_SMOL = "HuggingFaceTB/SmolLM2-135M"
_PHI = "microsoft/Phi-3-mini-4k-instruct"


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("name", _MODELS)
def test_published_models_are_read(name):
  entry = _MODELS[name]
  config = entry["config"]
  of = families.find(config)
  assert of.model(config) is not None
  tensors = of.names(config).tensors.values()
  total = sum(math.prod(each.shape) for each in tensors)
  assert total + entry.get("unused", 0) == entry["parameters"]


# Null is the default of these fields, of all families that have them.
_NULL = [
  "head_dim",
  "hidden_dropout",
  "layer_types",
  "max_window_layers",
  "pretraining_tp",
  "quantization_config",
  "rope_scaling",
  "use_cache",
]


@pytest.mark.parametrize("name", _MODELS)
def test_null_and_foreign_fields_change_nothing(name):
  config = _MODELS[name]["config"]
  foreign = {"unsloth_version": "1", "transformers.js_config": {}, "other": 3}
  changed = {**dict.fromkeys(_NULL), **foreign, **config}
  of = families.find(config)
  ignored = of.find_ignored(changed)
  assert sorted(ignored) == sorted([*of.find_ignored(config), "other"])
  assert of.model(changed) == of.model(config)
  assert of.names(changed) == of.names(config)


# Families of whose models no exact number of parameters was found.
_UNCONFIRMED = {
  "cwm",
  "glm4_moe_lite",
  "helium",
  "hunyuan_v1_dense",
  "internlm3",
  "ministral",
  "nemotron",
  "persimmon",
  "solar_open",
  "youtu",
}


def test_every_family_is_published():
  found = {each["config"]["model_type"] for each in _MODELS.values()}
  assert found | _UNCONFIRMED == set(families.list_supported())
  assert not found & _UNCONFIRMED


@pytest.mark.parametrize(
  ("name", "field", "value"),
  [
    (_SMOL, "is_llama_config", False),
    (_SMOL, "rope_interleaved", True),
    (_SMOL, "sliding_window", 4096),
    (_SMOL, "use_sliding_window", True),
    (_PHI, "attention_bias", True),
    (_PHI, "lm_head_bias", True),
    ("Qwen/Qwen2.5-3B", "use_mrope", True),
    ("mistralai/Mistral-7B-v0.1", "is_decoder", True),
    ("mistralai/Mistral-7B-v0.1", "mlp_bias", True),
  ],
)
def test_fields_are_only_ignored_where_they_change_nothing(name, field, value):
  config = {**_MODELS[name]["config"], field: value}
  with pytest.raises(
    family.UnsupportedConfigError, match=f"{field} is {value}; "
  ):
    families.find(config).model(config)


def test_pretraining_and_masked_models_of_bert_are_the_same():
  config = _MODELS["google-bert/bert-base-uncased"]["config"]
  other = {**config, "architectures": ["BertForPreTraining"]}
  of = families.find(config)
  assert of.model(other) == of.model(config)
  assert of.names(other) == of.names(config)
