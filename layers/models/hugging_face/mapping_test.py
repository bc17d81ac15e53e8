"""Tests for the mapping between tensors and variables."""

import numpy as np
import pytest

from paxon.layers.models.hugging_face import mapping

_TABLE = mapping.rule("table", "params/table", "V D -> V D")


def _names(*rules, **stack):
  stack = {"stack": "params/stack", "num_layers": 5, "period": 2} | stack
  return mapping.Names(
    sizes={"V": 3, "D": 2, "F": 4, "E": 3},
    rules=(_TABLE,),
    stacks=(mapping.StackRules(rules=rules, **stack),),
  )


def test_layers_are_entries_of_stacked_variables():
  names = _names(mapping.rule("layers.{}.w", "w", "F D -> D F"))
  places = {
    tensor.name: (tensor.slices[0].leaf, tensor.slices[0].index)
    for tensor in names.tensors.values()
  }
  assert places == {
    "table": ("params/table", ()),
    "layers.0.w": ("params/stack/layers/blocks_0/w", (0,)),
    "layers.1.w": ("params/stack/layers/blocks_1/w", (0,)),
    "layers.2.w": ("params/stack/layers/blocks_0/w", (1,)),
    "layers.3.w": ("params/stack/layers/blocks_1/w", (1,)),
    # The layer of an incomplete period is not stacked.
    "layers.4.w": ("params/stack/layers_4/w", ()),
  }
  shapes = {leaf.name: leaf.shape for leaf in names.leaves.values()}
  assert shapes == {
    "params/table": (3, 2),
    "params/stack/layers/blocks_0/w": (2, 2, 4),
    "params/stack/layers/blocks_1/w": (2, 2, 4),
    "params/stack/layers_4/w": (2, 4),
  }


def test_experts_are_entries_of_a_stack():
  names = _names(
    mapping.rule("layers.{}.experts.{expert}.w", "w", "F D -> D F"),
    mapping.rule("layers.{}.dense", "dense", "F D -> D F", layers=(1, 3)),
  )
  (part,) = names.tensors["layers.2.experts.1.w"].slices
  assert (part.leaf, part.index) == ("params/stack/layers/blocks_0/w", (1, 1))
  (part,) = names.tensors["layers.4.experts.2.w"].slices
  assert (part.leaf, part.index) == ("params/stack/layers_4/w", (2,))
  shapes = {leaf.name: leaf.shape for leaf in names.leaves.values()}
  assert shapes == {
    "params/table": (3, 2),
    "params/stack/layers/blocks_0/w": (2, 3, 2, 4),
    "params/stack/layers/blocks_1/w": (2, 3, 2, 4),
    "params/stack/layers_4/w": (3, 2, 4),
    "params/stack/layers/blocks_1/dense": (2, 2, 4),
  }
  tensors = {
    name: np.full(tensor.shape, i)
    for i, (name, tensor) in enumerate(names.tensors.items())
  }
  stacked = names.leaves["params/stack/layers/blocks_1/w"].from_tensors(
    lambda name, start, stop: tensors[name][start:stop]
  )
  expected = [
    [tensors[f"layers.{layer}.experts.{i}.w"][0, 0] for i in range(3)]
    for layer in (1, 3)
  ]
  np.testing.assert_array_equal(stacked[:, :, 0, 0], expected)


def test_scalars_and_merged_dimensions_of_variables():
  names = mapping.Names(
    sizes={"C": 2, "D": 3, "R": 2, "S": 2},
    rules=(
      mapping.rule("scale", "params/scale", "() ->"),
      mapping.rule("one", "params/one", "(1:0) ->"),
      mapping.rule("patch", "params/kernel", "D C R S -> (R S C) D"),
    ),
  )
  shapes = [each.shape for each in names.tensors.values()]
  assert shapes == [(), (1,), (3, 2, 2, 2)]
  shapes = [leaf.shape for leaf in names.leaves.values()]
  assert shapes == [(), (), (8, 3)]
  tensor = np.arange(24.0).reshape(3, 2, 2, 2)
  leaf = names.leaves["params/kernel"]
  kernel = leaf.from_tensors(lambda name, start, stop: tensor[start:stop])
  for d, c, r, s in np.ndindex(3, 2, 2, 2):
    assert kernel[(r * 2 + s) * 2 + c, d] == tensor[d, c, r, s]
  ((_, _, rows, _),) = leaf.to_tensors(kernel)
  np.testing.assert_array_equal(rows, tensor)
  scale = names.leaves["params/scale"]
  value = scale.from_tensors(lambda *_: np.asarray([7.0]))
  assert (value.shape, float(value)) == ((), 7.0)
  ((_, _, rows, _),) = scale.to_tensors(value)
  np.testing.assert_array_equal(rows, [7.0])


def test_only_the_rows_of_a_variable_are_read():
  names = _names(
    mapping.fused_rule(
      "layers.{}.ab", ("a", "F D -> D F"), ("b", "V D -> V D")
    ),
    num_layers=1,
    period=1,
  )
  assert names.tensors["layers.0.ab"].shape == (7, 2)
  tensor = np.arange(14).reshape(7, 2)
  asked = []

  def read_rows(name, start, stop):
    asked.append((name, start, stop))
    return tensor[start:stop]

  leaf = names.leaves["params/stack/layers/blocks_0/b"]
  b = leaf.from_tensors(read_rows)
  assert asked == [("layers.0.ab", 4, 7)]
  np.testing.assert_array_equal(b, tensor[None, 4:])
  ((name, start, rows, _),) = leaf.to_tensors(b)
  assert (name, start) == ("layers.0.ab", 4)
  np.testing.assert_array_equal(rows, tensor[4:])


def test_values_are_cast_on_request():
  leaf = _names().leaves["params/table"]
  values = np.ones((3, 2), np.float32)
  found = leaf.from_tensors(lambda *_: values, np.float16)
  assert found.dtype == np.float16


def test_duplicate_names_are_rejected():
  names = _names(mapping.rule("table", "w", "F D -> D F"))
  with pytest.raises(ValueError, match="Two rules name the tensor table"):
    _ = names.tensors
  names = mapping.Names(
    sizes={"V": 3, "D": 2},
    rules=(_TABLE, mapping.rule("other", "params/table", "V D -> V D")),
  )
  with pytest.raises(ValueError, match="Two rules name the leaf params/table"):
    _ = names.leaves


_SIZES = {"N": 2, "H": 3, "D": 5, "C": 4}


def test_layout_splits_and_transposes():
  found = mapping.Layout("(N C H) D -> D C N H", _SIZES)
  assert found.tensor_shape == (24, 5)
  assert found.variable_shape == (5, 4, 2, 3)
  tensor = np.arange(120).reshape(24, 5)
  variable = found.to_variable(tensor)
  assert variable.shape == found.variable_shape
  for n, c, h, d in np.ndindex(2, 4, 3, 5):
    assert variable[d, c, n, h] == tensor[(n * 4 + c) * 3 + h, d]
  np.testing.assert_array_equal(found.to_tensor(variable), tensor)


def test_layout_of_a_vector():
  found = mapping.Layout("(N H) -> N H", _SIZES)
  assert found.to_variable(np.arange(6)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_layout_needs_the_same_dimensions_on_both_sides():
  with pytest.raises(ValueError, match="'N D -> D' must have the same"):
    mapping.Layout("N D -> D", _SIZES)


def test_layout_needs_all_sizes():
  with pytest.raises(ValueError, match=r"needs the size of 'F'.*\['C', 'D'"):
    mapping.Layout("F D -> F D", _SIZES)


def test_variables_share_the_rows_of_each_head():
  both = mapping.fused_rule(
    "layers.{}.kv",
    ("key", "(V F+D) E -> E V F"),
    ("value", "(V F+D) E -> E V D"),
  )
  names = _names(both, num_layers=1, period=1)
  assert names.tensors["layers.0.kv"].shape == (18, 3)
  tensor = np.arange(54).reshape(18, 3)
  back = np.full_like(tensor, -1)
  by_head = tensor.reshape(3, 6, 3)
  expected = {"key": by_head[:, :4], "value": by_head[:, 4:]}
  for end, values in expected.items():
    leaf = names.leaves[f"params/stack/layers/blocks_0/{end}"]
    found = leaf.from_tensors(lambda _, start, stop: tensor[start:stop])
    np.testing.assert_array_equal(found[0], values.transpose(2, 0, 1))
    for _, start, rows, columns in leaf.to_tensors(found):
      assert (back[start : start + len(rows)][..., columns] == -1).all()
      back[start : start + len(rows)][..., columns] = rows
  np.testing.assert_array_equal(back, tensor)


def test_short_lines_stand_for_weight_and_bias():
  table = """
    query  query       (N H) D -> D N H + bias
    head   out/kernel  V D -> D V + bias
    norm   norm        norm
  """
  assert mapping.parse_rules(table, at="a.", to="b/") == tuple(
    mapping.rule(f"a.{tensor}", f"b/{leaf}", pattern)
    for tensor, leaf, pattern in (
      ("query.weight", "query", "(N H) D -> D N H"),
      ("query.bias", "query_bias", "(N H) -> N H"),
      ("head.weight", "out/kernel", "V D -> D V"),
      ("head.bias", "out/bias", "(V) -> V"),
      ("norm.weight", "norm/scale", "D -> D"),
      ("norm.bias", "norm/bias", "D -> D"),
    )
  )
