"""Tests for rule sets by name."""

import pathlib

import pytest

from paxon.sharding import axes, lint, rule_sets, rules

_KERNEL = (axes.EMBED, axes.MLP)
_EXPERTS = (axes.EXPERTS, axes.EMBED, axes.MLP)
_HIDDEN = (axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP)
_STREAM = (axes.BATCH, axes.ACTIVATION_LENGTH, axes.ACTIVATION_EMBED)
_ROWS = ("data", "fsdp", "expert")

# A kernel, one of experts, an activation inside of a layer and one between.
_EXPECTED = {
  "default": (
    ("fsdp", "tensor"),
    ("expert", "fsdp", "tensor"),
    (_ROWS, "sequence", "tensor"),
    (_ROWS, "sequence", None),
  ),
  "data": (
    (None, None),
    (None, None, None),
    (_ROWS, None, None),
    (_ROWS, None, None),
  ),
  "fsdp": (
    ("fsdp", None),
    (None, "fsdp", None),
    (_ROWS, None, None),
    (_ROWS, None, None),
  ),
  "tensor": (
    (None, "tensor"),
    (None, None, "tensor"),
    (_ROWS, None, "tensor"),
    (_ROWS, None, None),
  ),
  "sequence": (
    ("sequence", None),
    (None, "sequence", None),
    (_ROWS, "sequence", None),
    (_ROWS, "sequence", None),
  ),
  "expert": (
    ("expert", None),
    ("expert", None, None),
    (_ROWS, None, None),
    (_ROWS, None, None),
  ),
  "2d": (
    ("fsdp", "tensor"),
    ("expert", "fsdp", "tensor"),
    (_ROWS, "sequence", "tensor"),
    (_ROWS, "sequence", "tensor"),
  ),
  "megatron_sequence": (
    ("fsdp", "tensor"),
    ("expert", "fsdp", "tensor"),
    (_ROWS, "sequence", "tensor"),
    (_ROWS, ("sequence", "tensor"), None),
  ),
  "weight_stationary": (
    ("fsdp", "tensor"),
    ("expert", "fsdp", "tensor"),
    (("data", "expert"), "sequence", "tensor"),
    (("data", "expert"), "sequence", "fsdp"),
  ),
  "replicated": (
    (None, None),
    (None, None, None),
    (axes.MESH_AXES, None, None),
    (axes.MESH_AXES, None, None),
  ),
  "fsdp+tensor": (
    ("fsdp", "tensor"),
    (None, "fsdp", "tensor"),
    (_ROWS, None, "tensor"),
    (_ROWS, None, None),
  ),
  "tensor + fsdp+sequence+expert": (
    (("fsdp", "sequence", "expert"), "tensor"),
    ("expert", ("fsdp", "sequence"), "tensor"),
    (_ROWS, "sequence", "tensor"),
    (_ROWS, "sequence", None),
  ),
}


@pytest.mark.parametrize("name", _EXPECTED)
def test_partition_specs(name):
  found = rule_sets.find_rules(name)
  arrays = (_KERNEL, _EXPERTS, _HIDDEN, _STREAM)
  assert (
    tuple(
      tuple(rules.to_partition_spec(names, rules=found)) for names in arrays
    )
    == _EXPECTED[name]
  )


def test_each_set_is_documented_and_has_a_rule_for_every_axis():
  page = pathlib.Path(__file__).with_name("README.md").read_text()
  for name in rule_sets.NAMES:
    assert f"\n| `{name}` " in page, name
    found = rule_sets.find_rules(name)
    assert [logical for logical, _ in found] == [
      logical for logical, _ in rules.DEFAULT_RULES
    ]
    mesh = dict.fromkeys(axes.MESH_AXES, 1)
    assert lint.check({}, batch={}, mesh=mesh, rules=found) == []


def test_default_is_default_rules():
  assert rule_sets.find_rules(rule_sets.DEFAULT) == rules.DEFAULT_RULES


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("fsdpp", r"no rule set 'fsdpp'; did you mean 'fsdp'\? Rule sets"),
    ("fsdp+", r"rules 'fsdp\+': there is no rule set ''\. Rule sets"),
    ("fsdp+2d", r"'2d' cannot be combined; those that can are data, fsdp, "),
  ],
)
def test_rejects_unknown_names(name, message):
  with pytest.raises(ValueError, match=message):
    rule_sets.find_rules(name)


def test_rejects_replacing_a_missing_rule():
  with pytest.raises(ValueError, match="did you mean 'embed'"):
    rules.replace(rules.DEFAULT_RULES, {"embedd": "fsdp"})
