"""Tests for rules, and for recipes by name."""

import pytest

from paxon.quantization import matmuls, number_formats, recipes, rules

FP8 = recipes.find_recipe("fp8")


@pytest.mark.parametrize(
  ("target", "path", "its_roles", "wanted"),
  [
    ("feed_forward", "task.model.f", (matmuls.FEED_FORWARD,), True),
    ("feed_forward", "task.model.f", (matmuls.HEAD,), False),
    ("*.blocks[0].*", "task.stack.blocks[0].attention", (), True),
    ("*.blocks[0].*", "task.stack.blocks[1].attention", (), False),
    ("task.head", "task.head", (), True),
    ("task.head", "task.head.inner", (), False),
    (("head", "*.mlp"), "task.mlp", (), True),
  ],
)
def test_matches(target, path, its_roles, wanted):
  assert rules.Rule(target, FP8).matches(path, its_roles) is wanted


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (("feedforward", FP8), "did you mean 'feed_forward'"),
    (("kernel", None), "'kernel' is no role .*, no path"),
    (((), FP8), "must name a role or a path, got none"),
  ],
)
def test_wrong_rules(fields, message):
  with pytest.raises(ValueError, match=message):
    rules.Rule(*fields)


def test_a_name_is_no_recipe():
  # Of the shape checker in tests, of the rule itself elsewhere.
  with pytest.raises(TypeError, match="recipe"):
    rules.Rule("head", "fp8")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({}, "exempts nothing; set first, last, or both"),
    ({"last": -1}, "ExemptLayers.last must not be negative, got -1"),
  ],
)
def test_wrong_exemptions(fields, message):
  with pytest.raises(ValueError, match=message):
    rules.ExemptLayers(**fields)


def test_names_and_modes():
  assert recipes.parse("int8") == recipes.Choice("int8", recipes.Mode.TRAIN)
  choice = recipes.parse("int4:serve")
  assert choice.mode is recipes.Mode.SERVE
  assert choice.recipe is recipes.find_recipe("int4")
  formats = {
    name: [o and o.format.name for o in (r.lhs, r.rhs, r.gradient)]
    for name in recipes.NAMES
    for r in [recipes.find_recipe(name)]
  }
  e4m3, e5m2 = "fp8_e4m3", "fp8_e5m2"
  assert formats == {
    "fp8": [e4m3, e4m3, e5m2],
    "fp8_current": [e4m3, e4m3, e5m2],
    "fp8_channel": [e4m3] * 3,
    "fp8_block": [e4m3] * 3,
    "int8": ["int8"] * 3,
    "int4": ["int8", "int4", "int8"],
    "int4_group": [None, "int4", None],
    "int4_learned": [None, "int4", None],
    "int4_hqq": [None, "int4", None],
    "nf4": [None, "nf4", None],
    "int4_gptq": [None, "int4", None],
    "int4_awq": [None, "int4", None],
    "int8_smooth": ["int8"] * 3,
    "int8_static": ["int8"] * 3,
    "fp8_static": [e4m3] * 3,
    "mxfp8": [None, "fp8_e4m3", None],
    "mxfp4": [None, "fp4_e2m1", None],
    "nvfp4": [None, "fp4_e2m1", None],
    "wanda": [None, "float32", None],
    "sparsegpt": [None, "float32", None],
  }
  assert recipes.find_recipe("fp8").is_delayed
  assert recipes.find_recipe("int4").backward_rhs.format is number_formats.INT8


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("fp9", "no recipe is named 'fp9'; did you mean 'fp8'"),
    ("int8:serv", "no mode is named 'serv'; did you mean 'serve'"),
    ("int8:", "no mode is named ''; there are train, serve, convert"),
    ("float", "no recipe is named 'float'; there are fp8, "),
  ],
)
def test_unknown_names(text, message):
  with pytest.raises(ValueError, match=message):
    recipes.parse(text)
