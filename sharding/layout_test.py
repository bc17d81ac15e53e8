"""Tests for layouts, constraints and placement, on 8 fake devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.sharding import arrays, layout, logical, mesh, rules, variables


def _layout(text, rule_set=rules.DEFAULT_RULES):
  return layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(text)), rule_set)


def _spec(name, shape, axes):
  return variables.VariableSpec(
    name=name, shape=shape, dtype=jnp.dtype("float32"), axes=axes
  )


def _double(x):
  return logical.constrain(x * 2, ("batch", "activation_mlp"))


def test_constraint_reaches_the_compiled_program():
  compiled = _layout("fsdp=2,tensor=4").jit(_double).lower(np.ones((4, 8)))
  (sharding,) = jax.tree.leaves(compiled.compile().output_shardings)
  assert sharding.shard_shape((4, 8)) == (2, 2)


def test_each_layout_traces_separately():
  x = np.ones((8, 8), np.float32)
  shapes = [
    laid.jit(_double)(x).sharding.shard_shape((8, 8))
    for laid in (
      _layout("fsdp=8"),
      _layout("tensor=8"),
      _layout("tensor=8", (("batch", "tensor"), ("activation_mlp", None))),
    )
  ]
  assert shapes == [(1, 8), (8, 1), (1, 8)]


def test_constraint_outside_a_layout_does_nothing():
  x = jnp.ones((3, 5))
  np.testing.assert_array_equal(_double(x), x * 2)


def test_constraint_does_not_split_dimensions_of_size_one():
  y = _layout("fsdp=2,tensor=4").jit(_double)(np.ones((1, 8)))
  assert y.sharding.shard_shape((1, 8)) == (1, 2)


def test_constraint_that_does_not_divide_is_padded():
  x = np.arange(24.0).reshape(4, 6)
  laid = _layout("fsdp=2,tensor=4")
  total = laid.jit(lambda x: (jnp.sum(_double(x), axis=1), _double(x)))(x)
  np.testing.assert_array_equal(total[0], 2 * x.sum(axis=1))
  np.testing.assert_array_equal(total[1], 2 * x)
  with pytest.raises(ValueError, match=r"'batch' of size 3 does not divide"):
    laid.jit(_double)(np.ones((3, 8)))


def test_constraint_with_a_wrong_rank():
  with pytest.raises(ValueError, match=r"needs 2 logical axes, got \('batch'"):
    logical.constrain(jnp.ones((2, 2)), ("batch",))


def test_shardings_of_specs():
  laid = _layout("fsdp=4,tensor=2")
  specs = {"up": _spec("params/up", (8, 4), ("embed", "mlp"))}
  assert laid.shardings(specs)["up"].shard_shape((8, 4)) == (2, 2)
  assert laid.replicated.is_fully_replicated


def test_many_indivisible_axes_are_counted():
  specs = {f"{i}": _spec(f"params/{i}", (6,), ("experts",)) for i in range(9)}
  with pytest.raises(ValueError, match=r"params/4: .*; and 4 more$") as error:
    _layout("expert=8").shardings(specs)
  assert "params/5" not in str(error.value)


def test_storage_splits_a_dimension_that_divides():
  specs = {
    "a": _spec("params/a", (6, 4), ("embed", "mlp")),
    "b": _spec("params/b", (8, 3), ("embed", "mlp")),
    "c": _spec("params/c", (7, 3), ("embed", "mlp")),
  }
  found = _layout("fsdp=4,tensor=2").shardings(specs)
  assert {name: tuple(each.spec) for name, each in found.items()} == {
    "a": (None, "tensor"),
    "b": (("fsdp", "tensor"), None),
    "c": (None, None),
  }


def test_batch_is_split_by_sequences():
  laid = _layout("data=2,fsdp=2,tensor=2")
  host = {"inputs": np.arange(32).reshape(8, 4), "weight": np.ones(8)}
  batch = arrays.to_global(host, laid)
  assert laid.shards("batch") == 4
  assert batch["inputs"].sharding.shard_shape((8, 4)) == (2, 4)
  assert batch["weight"].sharding.shard_shape((8,)) == (2,)
  np.testing.assert_array_equal(batch["inputs"], host["inputs"])


def test_batch_that_does_not_divide():
  with pytest.raises(
    ValueError, match=r"global_batch_size \(6\) must be a mul"
  ):
    arrays.to_global({"inputs": np.ones((6, 4))}, _layout("data=8"))


def _constraints(partitioner):
  """Returns the partitions through which a table and its gradient pass."""
  specs = {"table": _spec("table", (9, 8), ("vocab", "embed"))}
  laid = layout.Layout(
    mesh.make_mesh(mesh.MeshSpec.parse("fsdp=2,tensor=4")),
    partitioner=partitioner,
  )

  def loss(values):
    return jnp.sum(logical.constrain_variables(values, specs)["table"] ** 2)

  def gradient(values):
    found = jax.grad(loss)(values)["table"]
    return logical.constrain_stored(found, specs["table"])

  jaxpr = laid.jit(gradient).trace({"table": jnp.ones((9, 8))}).jaxpr
  return [
    tuple(equation.params["sharding"].spec)
    for equation in jaxpr.eqns
    if equation.primitive.name == "sharding_constraint"
  ]


def test_variables_that_do_not_divide_are_moved_and_their_gradients_back():
  stored, computed = (None, ("fsdp", "tensor")), ("tensor", "fsdp")
  assert _constraints(None) == [stored, computed, computed, stored, stored]


def test_a_variable_that_the_partitioner_places_is_not_moved():
  assert _constraints(lambda spec, sizes: (None, "fsdp")) == [(None, "fsdp")]
  # This one leaves all to the rules.
  assert len(_constraints(lambda spec, sizes: None)) == 5
