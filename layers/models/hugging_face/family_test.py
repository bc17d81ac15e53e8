"""Tests for families and reading `config.json`."""

import math

from flax import linen as nn
import jax
import numpy as np
import pytest

from paxon.layers import activations
from paxon.layers.models.hugging_face import (
  attention_layers,
  families,
  family,
  llama,
  mapping,
  rope,
)
from paxon.layers.models.hugging_face.golden_models import golden_case
from paxon.layers.positions import rotary_scaling

Error = family.UnsupportedConfigError


def _fields(**values):
  return family.Fields(
    {"model_type": "llama", **values}, architectures=("LlamaForCausalLM",)
  )


def test_values_and_defaults():
  fields = _fields(a=3, b=None, c=0.5, d=False, e="silu", f=[1])
  assert fields.size("a") == 3
  assert fields.size("missing", 7) == 7
  assert fields.optional_size("b", 4) is None
  assert fields.optional_size("missing", 4) == 4
  assert fields.number("c") == 0.5
  assert fields.flag("d", True) is False
  assert fields.map_value("e", "relu", {"silu": 1}) == 1
  assert fields.get("f") == [1]
  assert not fields.has("b")
  # Null is the default of a field.
  assert fields.size("b", 7) == 7
  assert fields.number("b", 0.5) == 0.5
  assert fields.map_value("b", "relu", {"relu": 2}) == 2
  assert fields.map_value("b", "relu", {"relu": 2, None: 3}) == 3
  assert fields.flag("b", False) is False
  assert fields.flag("b", True, null=False) is False
  assert not fields.has("missing")


@pytest.mark.parametrize(
  ("read", "message"),
  [
    (lambda f: f.size("text"), "text is 'x'; llama supports only a pos"),
    (lambda f: f.size("flag"), "flag is True; llama supports only a pos"),
    (lambda f: f.number("text"), "text is 'x'; llama supports only a pos"),
    (lambda f: f.flag("text"), "supports only true or false"),
    (lambda f: f.flag("null", True), "null is None; .* only true or false"),
    (lambda f: f.size("null"), "null is None; llama supports only a positive"),
    (
      lambda f: f.map_value("text", "a", {"a": 1, "b": 2}),
      "supports only 'a' or 'b'",
    ),
    (lambda f: f.map_value("list", "a", {"a": 1}), "supports only 'a'"),
    (lambda f: f.size("missing"), "missing is missing; llama needs it"),
  ],
)
def test_unsupported_values_are_rejected(read, message):
  with pytest.raises(Error, match=message):
    read(_fields(text="x", flag=True, list=[1], null=None))


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
def test_layers_have_a_limit(name):
  assert _fields(**{name: 10_000}).size(name) == 10_000
  # As many windows in a list would take 8 GB.
  with pytest.raises(Error, match=f"{name} is 1000000000; .* at most 10,000"):
    _fields(**{name: 10**9}).size(name)


def test_fields_of_other_programs_are_ignored():
  fields = _fields(a=3, torch_dtype="bfloat16", use_cache=True, eos_token_id=2)
  fields.size("a")
  assert fields.find_ignored() == ()
  assert _fields(c=3, b=2, d=None).find_ignored() == ("b", "c")


def test_other_names_of_fields():
  names = {"hidden_size": "n_embd"}
  for values in ({"hidden_size": 8}, {"hidden_size": 8, "n_embd": 8}):
    fields = family.Fields(values, architectures=("A",), aliases=names)
    assert fields.size("n_embd") == 8
    assert fields.find_ignored() == ()
  with pytest.raises(Error, match=r"hidden_size is 8; .* of n_embd \(4\)"):
    family.Fields(
      {"hidden_size": 8, "n_embd": 4}, architectures=("A",), aliases=names
    )


def test_decoders_have_no_encoder():
  for value in (False, None):
    assert _fields(is_encoder_decoder=value).find_ignored() == ()
  with pytest.raises(Error, match="is_encoder_decoder is True"):
    _fields(is_encoder_decoder=True).find_ignored()


def test_unsupported_fields_are_rejected():
  _fields(pruned_heads={}, quantization_config=None)
  with pytest.raises(Error, match=r"quantization_config is \{'bits': 4\}"):
    _fields(quantization_config={"bits": 4})
  with pytest.raises(Error, match=r"architectures is \['LlamaModel'\]"):
    _fields(architectures=["LlamaModel"])


def test_heads_divide():
  sizes = {"hidden_size": 32, "num_attention_heads": 4}
  found = attention_layers.read_heads(
    _fields(**sizes), kv_heads=None, head_dim=None
  )
  assert found == {
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
  }
  with pytest.raises(Error, match=r"num_key_value_heads is 3; .* divisor of"):
    attention_layers.read_heads(
      _fields(**sizes, num_key_value_heads=3), kv_heads=None, head_dim=None
    )
  sizes["num_attention_heads"] = 5
  with pytest.raises(Error, match=r"num_attention_heads is 5; .* divisor of"):
    attention_layers.read_heads(_fields(**sizes), kv_heads=None, head_dim=None)


def _rope(**values):
  return rope.read(_fields(**values), head_dim=16, max_length=32, partial=1.0)


def test_rope_of_older_files():
  new = _rope(rope_parameters={"rope_theta": 50.0, "rope_type": "default"})
  assert _rope(rope_theta=50.0) == new
  assert _rope(rope_theta=50.0, rope_scaling=None) == new
  scaling = {"type": "linear", "factor": 2.0}
  new = _rope(
    rope_parameters={"rope_theta": 9.0, "rope_type": "linear", "factor": 2.0}
  )
  assert _rope(rope_theta=9.0, rope_scaling=scaling) == new
  assert _rope(partial_rotary_factor=0.5).rotary_dim == 8
  assert _rope(partial_rotary_factor=1.0).rotary_dim is None


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"rope_scaling": {"type": "axial"}}, "rope_type 'default' or 'linear'"),
    ({"rope_scaling": {"type": "dynamic"}}, "a number as factor"),
    ({"rope_scaling": 3}, "an object or null"),
    ({"rope_scaling": {"type": "linear"}}, "a number as factor"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, "a positive factor"),
    ({"partial_rotary_factor": 2}, "in \\(0, 1\\]"),
    ({"partial_rotary_factor": 0.2}, "an even number of rotated features"),
    (
      {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}},
      "truncate of true or false",
    ),
    (
      {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0}},
      "a positive attention_factor",
    ),
    (
      {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
      "a short_factor of 8 numbers",
    ),
  ],
)
def test_unsupported_rope_is_rejected(values, message):
  with pytest.raises(Error, match=message):
    _rope(**values)


_SCALINGS = {
  "default": {},
  "linear": {"factor": 2.0},
  "dynamic": {"factor": 2.0},
  "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
  "llama3": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
  },
  "yarn": {
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 0.1 * math.log(2.0) + 1.0,
    "original_max_position_embeddings": 16,
  },
  "longrope": {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
    "factor": 2.0,
    "attention_factor": 1.1,
  },
}
_BROKEN = (
  *("x", True, [], {}, [1.0], {"a": 1}),
  *(-1, 0, 0.5, 1, 1e30, math.nan, math.inf),
  *(["a"] * 8, [0.0] * 8, [math.nan] * 8, [True] * 8, [None] * 8),
)


def _rope_error(**values):
  """Returns the error of broken fields; what is accepted can be built."""
  try:
    found = _rope(**values)
  except Error as error:
    return str(error)
  found.build(lambda cls, **fields: cls(**fields))
  return None


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", _SCALINGS)
def test_broken_rope_is_read_or_rejected(name, kind):
  good = {"rope_type": kind, "rope_theta": 100.0, **_SCALINGS[kind]}
  assert _rope_error(**{name: good}) is None
  errors = [
    _rope_error(**{name: {**good, key: value}})
    for key in (*good, "partial_rotary_factor")
    for value in _BROKEN
  ]
  found = [error for error in errors if error is not None]
  assert len(found) > 20
  assert all(each.startswith(f"config.json: {name} is ") for each in found)


@pytest.mark.parametrize(
  "field",
  ["rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"],
)
def test_broken_fields_of_rope_are_named(field):
  errors = [_rope_error(**{field: value}) for value in _BROKEN]
  found = [error for error in errors if error is not None]
  assert len(found) > 8
  assert all(each.startswith(f"config.json: {field} is ") for each in found)


def test_broken_rope_of_gemma3_is_rejected():
  config = {**golden_case.read("gemma3").config}
  for value in (3, "x", [1], True):
    config["rope_parameters"] = {"full_attention": value}
    with pytest.raises(Error, match="an object for full_attention"):
      families.find(config).model(config)


def test_keys_of_other_types_are_ignored():
  values = {"type": "default", "factor": 2.0, "finetuned": True, "mscale": None}
  fields = _fields(rope_scaling=values)
  found = rope.read(fields, head_dim=16, max_length=32)
  assert found == rope.read(_fields(), head_dim=16, max_length=32)
  assert fields.find_ignored() == (
    "rope_scaling.factor",
    "rope_scaling.finetuned",
  )


def test_families_without_partial_rotation_reject_it():
  fields = _fields(partial_rotary_factor=0.5)
  with pytest.raises(Error, match="rotation of all features"):
    rope.read(fields, head_dim=16, max_length=32)


def test_long_rope():
  with pytest.raises(
    ValueError, match=r"PairScaling\.factors must be positive"
  ):
    rotary_scaling.PairScaling(factors=(1.0, 0.0))
  pairs = rotary_scaling.PairScaling(factors=(1.0,))
  other = rotary_scaling.PairScaling(factors=(1.0,), wave_factor=2.0)
  with pytest.raises(ValueError, match=r"wave_factor 1\.0 and long 2\.0"):
    rotary_scaling.LongScaling(short=pairs, long=other, original_length=4)
  with pytest.raises(ValueError, match="original_length must be positive"):
    rotary_scaling.LongScaling(short=pairs, long=pairs, original_length=0)
  assert rope.find_wave_factor(factor=1.0, original_length=4096) == 1.0
  # Phi-3-mini-128k: sqrt(1 + ln(32) / ln(4096)).
  found = rope.find_wave_factor(factor=32.0, original_length=4096)
  assert found == pytest.approx(1.190238)


def test_periods():
  assert mapping.find_period([7, 7, 7]) == (7,)
  assert mapping.find_period([1, 2, 1, 2, 1]) == (1, 2)
  assert mapping.find_period([1, 1, 2]) == (1, 1, 2)
  assert mapping.find_period([]) == ()


def _windows(**values):
  return llama.read_windows(_fields(num_hidden_layers=3, **values))


def test_windows():
  assert _windows() == (None, None, None)
  assert _windows(sliding_window=5) == (None, None, None)
  assert _windows(use_sliding_window=True, max_window_layers=1) == (
    None,
    4096,
    4096,
  )
  used = {"use_sliding_window": True, "sliding_window": 5}
  kinds = ["sliding_attention", "full_attention", "sliding_attention"]
  assert _windows(**used, layer_types=kinds) == (5, None, 5)
  with pytest.raises(Error, match="without sliding_window"):
    _windows(layer_types=kinds)
  with pytest.raises(Error, match="a list of 3 types"):
    _windows(**used, layer_types=kinds[:2])
  with pytest.raises(Error, match="an integer of at least 0"):
    _windows(**used, max_window_layers=-1)


def test_activations():
  x = np.linspace(-3, 3, 7)
  phi = np.array([(1 + math.erf(each / math.sqrt(2))) / 2 for each in x])
  inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  sigmoid = 1 / (1 + np.exp(-x))
  expected = {
    activations.gelu_exact: x * phi,
    activations.gelu_tanh: x * (1 + np.tanh(inner)) / 2,
    activations.gelu_sigmoid: x / (1 + np.exp(-1.702 * x)),
    activations.squared_relu: np.maximum(x, 0) ** 2,
    nn.relu: np.maximum(x, 0),
    nn.silu: x * sigmoid,
    nn.tanh: np.tanh(x),
  }
  assert set(family.ACTIVATIONS.values()) == set(expected)
  for function, values in expected.items():
    found = function(jax.device_put(np.float32(x)))
    np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)


def test_families_are_found_by_their_type():
  assert families.find({"model_type": "llama"}).model_type == "llama"
  for name in families.list_supported():
    assert families.find({"model_type": name}).model_type == name
  with pytest.raises(
    ValueError, match=r"'mamba' is not supported; use one of .*gpt2"
  ):
    families.find({"model_type": "mamba"})
  with pytest.raises(ValueError, match="model_type None"):
    families.find({})
