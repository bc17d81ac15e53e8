"""Tests for tables of names."""

import numpy as np
import pytest

from paxon.layers.models.hugging_face import conversion, families, family

_TABLE = family.rule("table", "params/table", "V D -> V D")


def _names(*rules, **stack):
  stack = {"stack": "params/stack", "num_layers": 5, "period": 2} | stack
  return family.Names(
    sizes={"V": 3, "D": 2, "F": 4},
    rules=(_TABLE,),
    stacks=(family.StackRules(rules=rules, **stack),),
  )


def test_layers_have_the_places_of_a_stack():
  names = _names(family.rule("layers.{}.w", "w", "F D -> D F"))
  places = {
    tensor.name: (tensor.pieces[0].leaf, tensor.pieces[0].layer)
    for tensor in names.tensors.values()
  }
  assert places == {
    "table": ("params/table", None),
    "layers.0.w": ("params/stack/layers/blocks_0/w", 0),
    "layers.1.w": ("params/stack/layers/blocks_1/w", 0),
    "layers.2.w": ("params/stack/layers/blocks_0/w", 1),
    "layers.3.w": ("params/stack/layers/blocks_1/w", 1),
    # What fills no period is not stacked.
    "layers.4.w": ("params/stack/layers_4/w", None),
  }
  shapes = {leaf.name: leaf.shape for leaf in names.leaves.values()}
  assert shapes == {
    "params/table": (3, 2),
    "params/stack/layers/blocks_0/w": (2, 2, 4),
    "params/stack/layers/blocks_1/w": (2, 2, 4),
    "params/stack/layers_4/w": (2, 4),
  }


def test_parts_of_one_tensor_are_read_by_their_rows_alone():
  names = _names(
    family.fused("layers.{}.ab", ("a", "F D -> D F"), ("b", "V D -> V D")),
    num_layers=1,
    period=1,
  )
  assert names.tensors["layers.0.ab"].shape == (7, 2)
  theirs = np.arange(14).reshape(7, 2)
  asked = []

  def read_rows(name, start, stop):
    asked.append((name, start, stop))
    return theirs[start:stop]

  leaf = names.leaves["params/stack/layers/blocks_0/b"]
  b = conversion.to_leaf(leaf, read_rows)
  assert asked == [("layers.0.ab", 4, 7)]
  np.testing.assert_array_equal(b, theirs[None, 4:])
  ((name, start, rows),) = conversion.to_rows(leaf, b)
  assert (name, start) == ("layers.0.ab", 4)
  np.testing.assert_array_equal(rows, theirs[4:])


def test_values_are_cast_on_request():
  leaf = _names().leaves["params/table"]
  values = np.ones((3, 2), np.float32)
  found = conversion.to_leaf(leaf, lambda *_: values, np.float16)
  assert found.dtype == np.float16


def test_a_name_stands_once():
  names = _names(family.rule("table", "w", "F D -> D F"))
  with pytest.raises(ValueError, match="Two rules name the tensor table"):
    _ = names.tensors
  names = family.Names(
    sizes={"V": 3, "D": 2},
    rules=(_TABLE, family.rule("other", "params/table", "V D -> V D")),
  )
  with pytest.raises(ValueError, match="Two rules name the leaf params/table"):
    _ = names.leaves


def test_families_are_found_by_their_type():
  assert families.find({"model_type": "llama"}).model_type == "llama"
  for name in families.served():
    assert families.find({"model_type": name}).model_type == name
  with pytest.raises(ValueError, match=r"'mamba'; those served are .*gpt2"):
    families.find({"model_type": "mamba"})
  with pytest.raises(ValueError, match="model_type is None"):
    families.find({})
