"""Tests for trees of arrays by logical names."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest

from paxon.runner.checkpoints import named_tree
from paxon.sharding import variables


def _spec(name, shape=(2, 3), dtype=jnp.float32):
  return variables.VariableSpec(
    name=name,
    shape=shape,
    dtype=jnp.dtype(dtype),
    axes=("embed", "mlp")[: len(shape)],
  )


def _check(stored, wanted):
  # Through JSON, as in a checkpoint.
  described = json.loads(json.dumps(named_tree.describe(stored)))
  named_tree.check(described, specs=wanted, where="The checkpoint x/7")


def test_equal_specs_fit():
  _check([_spec("params/a")], {"other": (_spec("params/a"),)})


def test_whole_collections_may_be_omitted():
  _check([_spec("params/a"), _spec("opt_state/mu/a")], [_spec("params/a")])


@pytest.mark.parametrize(
  ("stored", "wanted", "message"),
  [
    pytest.param(
      [_spec("params/a")],
      [_spec("params/a", (2, 4))],
      r"x/7 does not match the configuration: params/a has shape \(2, 3\) in"
      r" the checkpoint and \(2, 4\) in the configuration \(axes \('embed',",
      id="shape",
    ),
    pytest.param(
      [_spec("params/a")],
      [_spec("params/a", dtype=jnp.bfloat16)],
      r"params/a has dtype float32 in the checkpoint and bfloat16 in the conf",
      id="dtype",
    ),
    pytest.param(
      [_spec("params/block/kernel")],
      [_spec("params/block/kernels")],
      r"params/block/kernels \(2, 3\) is not in the checkpoint \(did you mean"
      r" params/block/kernel\?\)",
      id="missing",
    ),
    pytest.param(
      [_spec("params/a"), _spec("params/b")],
      [_spec("params/a")],
      r"params/b is in the checkpoint and not in the configuration",
      id="unused",
    ),
    pytest.param(
      [],
      [_spec(f"params/{i}") for i in range(9)],
      r"params/4 .*; and 4 more\.",
      id="many",
    ),
  ],
)
def test_mismatches_are_named(stored, wanted, message):
  with pytest.raises(named_tree.CheckpointMismatchError, match=message):
    _check(stored, wanted)


def test_rejects_another_format():
  with pytest.raises(
    named_tree.CheckpointMismatchError,
    match=r"x/7 has format version 3, but this program reads version 2 only",
  ):
    named_tree.check_version(3, where="x/7")


def test_names_replace_python_types():
  specs = {"x": (_spec("params/a/kernel"), [_spec("step")])}
  named = named_tree.to_named({"x": (1, [2])}, specs=specs)
  assert named == {"params": {"a": {"kernel": 1}}, "step": 2}
  assert named_tree.from_named(named, specs=specs) == {"x": (1, [2])}


def test_round_trip_of_an_optimizer_state():
  state = optax.adam(0.1).init({"a": jnp.ones(())})
  counter = iter(range(100))
  specs = jax.tree.map(lambda _: _spec(f"opt_state/{next(counter)}"), state)
  named = named_tree.to_named(state, specs=specs)
  restored = named_tree.from_named(named, specs=specs)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert jax.tree.leaves(restored) == jax.tree.leaves(state)


def test_other_names_are_omitted():
  named = {"params": {"a": 1, "b": 2}}
  specs = [_spec("params/b")]
  assert named_tree.from_named(named, specs=specs) == [2]


@pytest.mark.parametrize(
  ("names", "message"),
  [
    (("a/b", "a/b"), r"Two values have the name 'a/b'"),
    (("a", "a/b"), r"Another value's name is a prefix of 'a/b'"),
    (("a/b", "a"), r"Two values have the name 'a'"),
  ],
)
def test_rejects_names_that_collide(names, message):
  with pytest.raises(ValueError, match=message):
    named_tree.to_named([1, 2], specs=[_spec(name) for name in names])


def test_specs_are_leaves():
  assert dataclasses.is_dataclass(_spec("a"))
  assert jax.tree.leaves(_spec("a")) == [_spec("a")]
