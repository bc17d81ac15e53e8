"""Fields of `config.json` are those of transformers' classes, also if null.

Each field of a class is read, or without effect on the outputs, or rejected by
name. Run as `oracle_test`, and skipped where torch is not installed.
"""

import dataclasses
import importlib.util
import inspect
import json
import re

import numpy as np
import pytest

from paxon.layers.models.hugging_face import (
  families,
  family,
)
from paxon.layers.models.hugging_face.golden_models import (
  golden_case,
  golden_dense_cases,
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

# One of each class.
_CASES = [
  "bert",
  "clip",
  "deepseek_v2",
  "deepseek_v3",
  "gemma",
  "gemma2",
  "gemma3",
  "gpt2",
  "gpt_neox",
  "gpt_oss",
  "llama3",
  "mamba2",
  "mistral",
  "mixtral",
  "olmoe",
  "phi3",
  "qwen2",
  "qwen2_moe",
  "qwen3",
  "qwen3_moe",
  "qwen3_next",
  "siglip",
  "t5",
  "vit",
  "wav2vec2",
  "whisper",
]
_CASES += [case.name for case in golden_dense_cases.CASES]
# Without them the class has another kind of output, dtype, or kind of model.
_NO_VALUES = {"architectures", "dtype", "return_dict", "transformers_version"}
# With a value these are other models in transformers.
_NULL = {
  "deepseek_v2": {"q_lora_rank": None, "norm_topk_prob": None},
  "deepseek_v3": {"norm_topk_prob": None, "rope_interleave": None},
  "gemma3": {"rope_parameters": None, "layer_types": None},
  "gpt2": {"n_inner": None},
  # The class of the golden files has another default of the fraction.
  "gpt_neox": {"rope_parameters": None, "rotary_pct": 0.25},
  "gpt_oss": {"rope_parameters": None, "layer_types": None},
  "llama3": {
    "head_dim": None,
    "num_key_value_heads": None,
    "rope_parameters": None,
  },
  "mixtral": {"head_dim": None, "sliding_window": None},
  "phi3": {"sliding_window": None, "rope_parameters": None},
  "qwen3_moe": {"sliding_window": None, "mlp_only_layers": None},
}

_DYNAMIC = {"type": "dynamic", "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "beta_fast": None}
# Rotary positions as files spell them.
_ROPES = (
  ("llama3", _DYNAMIC, {"max_position_embeddings": 12, "rope_theta": 50}),
  ("llama3", _DYNAMIC, {"original_max_position_embeddings": 4}),
  ("llama3", {"type": "linear", "factor": 2, "finetuned": True}, {}),
  (
    "llama3",
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    {},
  ),
  # The ratio of the lengths, of which the outer one counts.
  (
    "llama3",
    {**_YARN, "factor": None, "original_max_position_embeddings": 32},
    {"original_max_position_embeddings": 16},
  ),
  (
    "qwen2",
    {**_YARN, "factor": 4.0, "original_max_position_embeddings": 16},
    {"partial_rotary_factor": None},
  ),
  ("qwen3", _DYNAMIC, {"max_position_embeddings": 8}),
  ("gpt_neox", _DYNAMIC, {"rotary_pct": 0.5, "max_position_embeddings": 12}),
  ("phi3", {"type": "longrope"}, {"original_max_position_embeddings": 16}),
  ("deepseek_v3", _DYNAMIC, {"max_position_embeddings": 12}),
  (
    "deepseek_v3",
    {"type": "linear", "factor": 4.0, "mscale_all_dim": 0.7},
    {},
  ),
  (
    "gemma3",
    None,
    {
      "max_position_embeddings": 12,
      "rope_parameters": {
        "full_attention": {**_DYNAMIC, "rope_type": "dynamic"},
        "sliding_attention": {
          **_YARN,
          "factor": 2.0,
          "truncate": False,
          "original_max_position_embeddings": 16,
        },
      },
    },
  ),
  (
    "gemma3",
    {"rope_type": "dynamic", "factor": 4.0},
    {"max_position_embeddings": 12, "rope_theta": 50},
  ),
)


def _config(case):
  """Returns the golden configuration with numbers as transformers has them."""
  config = dict(golden_case.read(case).config)
  limits = config.get("time_step_limit")
  return config | ({"time_step_limit": [0.0, np.inf]} if limits else {})


def _config_class(case):
  import transformers  # pyrefly: ignore[missing-import]

  (name,) = golden_case.read(case).config["architectures"]
  return getattr(transformers, name).config_class


def _names(case):
  cls = _config_class(case)
  return [field.name for field in dataclasses.fields(cls)]


def _logits(case, **changes):
  """Returns the logits of transformers for a changed configuration."""
  from paxon.layers.models.hugging_face.golden_models import make_goldens

  golden = golden_case.read(case)
  model = make_goldens.torch_model(case, **{**_config(case), **changes})
  return make_goldens.logits(model, golden.arrays)


def _runs(case, **changes):
  """Whether transformers accepts a configuration, and can run the model."""
  try:
    _logits(case, **changes)
  except Exception:  # Of any kind: it does not check all values.
    return False
  return True


@pytest.mark.parametrize("case", _CASES)
def test_null_is_what_it_is_in_transformers(case):
  config, cls = _config(case), _config_class(case)
  of = families.find(config)
  compared = 0
  for name in set(_names(case)) - _NO_VALUES:
    changed = config | {name: None}
    try:
      found = of.model(changed)
    except family.UnsupportedConfigError:
      assert not _runs(case, **{name: None}), name
      continue
    try:
      read = cls.from_dict(changed)
      full = json.loads(read.to_json_string(use_diff=False))
    except Exception:  # As above.
      continue
    assert of.names(changed) == of.names(full), name
    assert found == of.model(full), name
    compared += 1
  assert compared > 3


@pytest.mark.parametrize(("case", "changes"), _NULL.items())
def test_logits_of_null_fields(case, changes):
  golden = golden_case.read(case)
  config = {**golden.config, **changes}
  expected = _logits(case, **changes)
  found = testing.logits(families.find(config), config, golden.arrays)
  np.testing.assert_allclose(found, expected, rtol=0, atol=testing.TOLERANCE)
  assert np.abs(found - golden.arrays["logits"]).max() > 10 * testing.TOLERANCE


@pytest.mark.parametrize(("case", "scaling", "changes"), _ROPES)
def test_logits_of_rotary_positions(case, scaling, changes):
  golden = golden_case.read(case)
  if scaling is not None:
    scaling = dict(scaling)
    if scaling.get("type") == "longrope":
      # One for each of the rotated pairs.
      pairs = [1.0, 1.5]
      scaling |= {"short_factor": pairs, "long_factor": pairs[::-1]}
    changes = {"rope_parameters": None, "rope_scaling": scaling, **changes}
  config = {**golden.config, **changes}
  # It changes the objects that it is given.
  expected = _logits(case, **json.loads(json.dumps(changes)))
  found = testing.logits(families.find(config), config, golden.arrays)
  np.testing.assert_allclose(found, expected, rtol=0, atol=testing.TOLERANCE)
  assert np.abs(found - golden.arrays["logits"]).max() > 10 * testing.TOLERANCE


@pytest.mark.parametrize("case", _CASES)
def test_every_field_of_transformers_is_known(case):
  config, cls = _config(case), _config_class(case)
  of = families.find(config)
  old = re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', inspect.getsource(cls))
  names = {*_names(case), *cls.attribute_map, *old, *cls().to_dict()}
  for name in sorted(names):
    for value in (config.get(name), 1, True, "x"):
      try:
        ignored = of.find_ignored({**config, name: value})
      except family.UnsupportedConfigError:
        continue
      assert name not in ignored


def _change(name, value):
  """Returns another value of a field without effect."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return value + 1
  if isinstance(value, float):
    return value / 2 + 0.01
  return value


@pytest.mark.parametrize("case", sorted(set(_CASES) - {"clip", "siglip"}))
def test_ignored_fields_have_no_effect_in_transformers(case):
  golden = golden_case.read(case)
  of, config = families.find(golden.config), golden.config
  inert = (family.INERT | set(of.inert)) & set(_names(case)) - _NO_VALUES
  # A number of tokens that the length must be divisible by.
  inert -= {"chunk_size_feed_forward"}
  changes = {name: _change(name, config.get(name)) for name in inert}
  # Ids of tokens stay ids of the model.
  changes |= {name: 3 for name in inert if name.endswith("_token_id")}
  assert sum(changes[name] != config.get(name) for name in inert) > 3
  np.testing.assert_allclose(
    _logits(case, **changes),
    golden.arrays["logits"],
    rtol=0,
    atol=testing.TOLERANCE,
  )
