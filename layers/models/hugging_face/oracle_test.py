"""Makes the golden files anew by transformers, where it is installed.

  bazel test --config=oracle //layers/models/hugging_face:oracle_test

Elsewhere everything here is skipped, and says so: what transformers computed
is in the golden files, with which the other tests compare.
"""

import importlib.util

import jax
import numpy as np
import pytest

from paxon.layers.models.hugging_face import (
  families,
  family,
)
from paxon.layers.models.hugging_face.golden_models import golden_case

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("torch") is None
  or importlib.util.find_spec("transformers") is None,
  reason="torch and transformers are not here; --config=oracle brings them",
)

# What two versions of torch, and two processors, may differ in, for each unit
# of the largest value.
_TOLERANCE = 1e-5
_CASES = sorted(path.stem for path in golden_case.FOLDER.glob("*.npz"))
# Sizes that a file always gives; every other field has its default.
_SIZES = {
  "hidden_size": 512,
  "intermediate_size": 48,
  "num_attention_heads": 32,
  # More than a period of any family.
  "num_hidden_layers": 7,
  "vocab_size": 40_000,
}


def _make_goldens():
  from paxon.layers.models.hugging_face.golden_models import make_goldens

  return make_goldens


def test_every_case_is_stored():
  assert sorted(_make_goldens().names()) == _CASES


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.filterwarnings("ignore")
def test_golden_files_are_what_transformers_computes(name):
  stored, made = golden_case.read(name), _make_goldens().make(name)
  assert dict(stored.config) | {"transformers_version": ""} == dict(
    made.config
  ) | {"transformers_version": ""}
  assert set(stored.arrays) == set(made.arrays)
  for key, expected in made.arrays.items():
    if expected.dtype == np.float32:
      largest = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
      np.testing.assert_allclose(
        stored.arrays[key], expected, rtol=0, atol=_TOLERANCE * largest
      )
    else:
      np.testing.assert_array_equal(stored.arrays[key], expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
  "model_type",
  [
    "bloom",
    "falcon",
    "gpt_bigcode",
    "mpt",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "arcee",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jais2",
    "minimax_m2",
    "ministral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "persimmon",
    "phi",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
  ],
)
def test_defaults_are_those_of_transformers(model_type):
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": model_type})
  minimal = {"model_type": model_type, **_SIZES}
  cls = getattr(transformers, of.architecture).config_class
  full = cls(**_SIZES).to_dict()
  assert len(full) > len(minimal)
  assert of.model(minimal) == of.model(full)


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_gpt2():
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": "gpt2"})
  full = transformers.GPT2Config().to_dict()
  assert of.model({"model_type": "gpt2"}) == of.model(full)


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_mamba2():
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": "mamba2"})
  full = transformers.Mamba2Config().to_dict()
  assert of.model({"model_type": "mamba2"}) == of.model(full)


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_t5():
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": "t5"})
  sizes = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
  }
  for changes in ({}, {"tie_word_embeddings": False}):
    full = transformers.T5Config(**changes).to_dict()
    minimal = {"model_type": "t5", **sizes, **changes}
    assert of.model(minimal) == of.model(full)


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_bert():
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": "bert"})
  full = transformers.BertConfig().to_dict()
  minimal = {"model_type": "bert", "vocab_size": 30522}
  assert of.model(minimal) == of.model(full)


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_vit():
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": "vit"})
  full = transformers.ViTConfig().to_dict()
  assert of.model({"model_type": "vit"}) == of.model(full)


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_whisper():
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": "whisper"})
  full = transformers.WhisperConfig().to_dict()
  assert of.model({"model_type": "whisper"}) == of.model(full)


@pytest.mark.filterwarnings("ignore")
def test_defaults_of_wav2vec2():
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": "wav2vec2"})
  full = transformers.Wav2Vec2Config().to_dict()
  assert of.model({"model_type": "wav2vec2"}) == of.model(full)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["clip", "siglip"])
def test_defaults_of_image_text_models(model_type):
  import transformers  # pyrefly: ignore[missing-import]

  of = families.find({"model_type": model_type})
  full = getattr(transformers, of.architecture).config_class().to_dict()
  assert of.model({"model_type": model_type}) == of.model(full)


@pytest.mark.parametrize("name", family.ACTIVATIONS)
def test_activations(name):
  import torch  # pyrefly: ignore[missing-import]
  from transformers import (  # pyrefly: ignore[missing-import]
    activations as theirs,
  )

  x = np.linspace(-4, 4, 33, dtype=np.float32)
  expected = theirs.ACT2FN[name](torch.from_numpy(x)).numpy()
  found = family.ACTIVATIONS[name](jax.device_put(x))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
