"""Tests for sharding rules."""

import itertools
import math

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


def _mesh(**sizes):
  return dict.fromkeys(axes.MESH_AXES, 1) | sizes


def _fit(fit, shape, names, **mesh):
  spec = fit(shape, names, rules=rules.DEFAULT_RULES, mesh=_mesh(**mesh))
  sizes = _mesh(**mesh)
  return tuple(
    tuple(name for name in rules.as_tuple(entry) if sizes[name] > 1)
    for entry in spec
  )


@pytest.mark.parametrize(
  ("shape", "names", "mesh", "stored", "computed"),
  [
    # The vocabulary of GPT-2; the width of the residual stream takes it.
    (
      (50_257, 768),
      (axes.VOCAB, axes.EMBED),
      {"tensor": 8},
      ((), ("tensor",)),
      (("tensor",), ()),
    ),
    (
      (50_257, 768),
      (axes.VOCAB, axes.EMBED),
      {"fsdp": 4, "tensor": 2},
      ((), ("fsdp", "tensor")),
      (("tensor",), ("fsdp",)),
    ),
    # Heads, in a stack: layers are never split instead.
    (
      (8, 64, 6, 16),
      (axes.LAYERS, axes.EMBED, axes.HEADS, axes.HEAD_DIM),
      {"tensor": 4},
      ((), ("tensor",), (), ()),
      ((), (), ("tensor",), ()),
    ),
    # `embed` is split only to store it, so no program needs it split.
    (
      (20, 80),
      (axes.EMBED, axes.MLP),
      {"fsdp": 8},
      ((), ("fsdp",)),
      ((), ("fsdp",)),
    ),
    ((7, 9), (axes.EMBED, axes.MLP), {"fsdp": 4}, ((), ()), ((), ())),
    # Sizes that divide keep the rules.
    (
      (64, 80),
      (axes.EMBED, axes.MLP),
      {"fsdp": 4, "tensor": 2},
      (("fsdp",), ("tensor",)),
      (("fsdp",), ("tensor",)),
    ),
  ],
)
def test_partitions(shape, names, mesh, stored, computed):
  assert _fit(rules.fit_stored, shape, names, **mesh) == stored
  assert _fit(rules.fit_computed, shape, names, **mesh) == computed


def test_what_is_stored_always_divides():
  names = (axes.EMBED, axes.HEADS, axes.HEAD_DIM)
  for shape in itertools.product((1, 6, 7, 12, 64), repeat=3):
    for fsdp, tensor in itertools.product((1, 2, 3, 4, 8), repeat=2):
      mesh = {"fsdp": fsdp, "tensor": tensor}
      found = _fit(rules.fit_stored, shape, names, **mesh)
      used = [name for entry in found for name in entry]
      assert len(used) == len(set(used))
      for size, entry in zip(shape, found, strict=True):
        assert size % math.prod(mesh[name] for name in entry) == 0
      # A mesh axis is idle only if no dimension can take it.
      for name in {n for n, size in mesh.items() if size > 1} - set(used):
        for size, entry in zip(shape, found, strict=True):
          parts = math.prod(mesh[k] for k in (*entry, name))
          assert size % parts, (shape, mesh, found)
