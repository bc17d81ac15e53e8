"""Tests for sharding rules."""

from jax.sharding import PartitionSpec
import pytest

from paxon.sharding import axes, rules


def test_default_rules_name_every_logical_axis():
  assert {name for name, _ in rules.DEFAULT_RULES} == set(axes.LOGICAL_AXES)


def test_default_rules_use_only_mesh_axes():
  used = set()
  for _, mesh_axes in rules.DEFAULT_RULES:
    used |= {mesh_axes} if isinstance(mesh_axes, str) else set(mesh_axes or ())
  assert used <= set(axes.MESH_AXES)


@pytest.mark.parametrize(
  ("names", "expected"),
  [
    (("embed", "mlp"), PartitionSpec("fsdp", "tensor")),
    (("mlp", "embed"), PartitionSpec("tensor", "fsdp")),
    (("vocab", "embed"), PartitionSpec("tensor", "fsdp")),
    (("layers", "embed", "heads", "head_dim"), (None, "fsdp", "tensor", None)),
    (
      ("batch", "length", "activation_embed"),
      PartitionSpec(("data", "fsdp", "expert"), "sequence", None),
    ),
    # The batch keeps fsdp: an axis is used once per array.
    (("batch", "embed"), PartitionSpec(("data", "fsdp", "expert"), None)),
    ((None, "mlp"), PartitionSpec(None, "tensor")),
    ((), PartitionSpec()),
  ],
)
def test_default_rules(names, expected):
  spec = rules.to_partition_spec(names, rules=rules.DEFAULT_RULES)
  assert tuple(spec) == tuple(expected)


def test_earlier_rules_win_a_mesh_axis():
  order = (("a", "tensor"), ("b", ("data", "tensor")))
  spec = rules.to_partition_spec(("b", "a"), rules=order)
  assert tuple(spec) == ("data", "tensor")


def test_second_dimension_of_one_name_is_not_split():
  spec = rules.to_partition_spec(("mlp", "mlp"), rules=rules.DEFAULT_RULES)
  assert tuple(spec) == ("tensor", None)


def test_unknown_axis_names_the_closest():
  with pytest.raises(ValueError, match=r"'embd'.*did you mean 'embed'\?"):
    rules.to_partition_spec(("embd",), rules=rules.DEFAULT_RULES)


def test_rules_of_before_split_the_residual_stream_by_length():
  """Rule tuples of users that have no entry for `activation_length`."""
  before = tuple(
    (name, mesh_axes)
    for name, mesh_axes in rules.DEFAULT_RULES
    if name != axes.ACTIVATION_LENGTH
  )
  names = (axes.BATCH, axes.ACTIVATION_LENGTH, axes.ACTIVATION_EMBED)
  assert rules.to_partition_spec(names, rules=before) == PartitionSpec(
    ("data", "fsdp", "expert"), "sequence", None
  )
  kept = rules.keep_lengths(before)
  assert rules.to_partition_spec(names, rules=kept)[1] is None
