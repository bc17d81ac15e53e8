"""Tests for trees by logical names."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from paxon.runner.checkpoints import named_tree
from paxon.sharding import variables


def _spec(name):
  return variables.VariableSpec(
    name=name, shape=(), dtype=jnp.dtype(jnp.float32), axes=()
  )


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


def test_names_not_asked_for_are_left_out():
  named = {"params": {"a": 1, "b": 2}}
  specs = [_spec("params/b")]
  assert named_tree.from_named(named, specs=specs) == [2]


@pytest.mark.parametrize(
  ("names", "message"),
  [
    (("a/b", "a/b"), r"Two values have the name 'a/b'"),
    (("a", "a/b"), r"The name 'a/b' continues another one's"),
    (("a/b", "a"), r"Two values have the name 'a'"),
  ],
)
def test_rejects_names_that_collide(names, message):
  with pytest.raises(ValueError, match=message):
    named_tree.to_named([1, 2], specs=[_spec(name) for name in names])


def test_specs_are_leaves():
  assert dataclasses.is_dataclass(_spec("a"))
  assert jax.tree.leaves(_spec("a")) == [_spec("a")]
