"""Tests for layout-free initial values."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.sharding import initialization, layout, mesh, variables

NORMAL = nn.initializers.normal(1.0)


def _spec(name, shape, *, axes=None, stacked=(), initializer=NORMAL):
  return variables.VariableSpec(
    name=name,
    shape=shape,
    dtype=jnp.dtype("float32"),
    axes=axes or (None,) * len(shape),
    initializer=initializer,
    stacked=stacked,
  )


def _stack(length, *, slot=0, period=1):
  return _spec(
    f"params/stack/layers/blocks_{slot}/kernel",
    (length, 4, 2),
    stacked=(("layers", period),),
  )


def _value(spec, seed=0):
  return np.asarray(initialization.initial_values({"v": spec}, seed)["v"])


def test_layer_depends_on_its_index_only():
  long, short = _value(_stack(6)), _value(_stack(3))
  np.testing.assert_array_equal(long[:3], short)
  assert len({layer.tobytes() for layer in long}) == 6


def test_period_of_the_pattern_does_not_matter():
  whole = _value(_stack(6))
  even = _value(_stack(3, slot=0, period=2))
  odd = _value(_stack(3, slot=1, period=2))
  np.testing.assert_array_equal(whole[0::2], even)
  np.testing.assert_array_equal(whole[1::2], odd)


def test_remainder_layer_is_the_layer_of_that_index():
  single = _value(_spec("params/stack/layers_5/kernel", (4, 2)))
  np.testing.assert_array_equal(_value(_stack(6))[5], single)


def test_matches_the_definition():
  spec = _stack(3, slot=1, period=2)
  digest = initialization.hashlib.sha256(b"params/stack/layers/kernel").digest()
  name = int.from_bytes(digest[:4], "big") >> 1
  key = jax.random.fold_in(jax.random.key(7), name)
  for group in range(3):
    layer = jax.random.fold_in(key, 2 * group + 1)
    expected = NORMAL(layer, (4, 2), jnp.float32)
    np.testing.assert_array_equal(_value(spec, seed=7)[group], expected)


def test_nested_stacks_fold_both_indices():
  name = "params/outer/layers/blocks_0/inner/layers/blocks_0/kernel"
  stacked = (("layers", 1), ("layers", 1))
  nested = _value(_spec(name, (2, 3, 4), stacked=stacked))
  assert len({row.tobytes() for row in nested.reshape(6, 4)}) == 6
  shorter = _value(_spec(name, (2, 2, 4), stacked=stacked))
  np.testing.assert_array_equal(nested[:, :2], shorter)


def test_seed_and_name_change_values():
  assert (_value(_stack(2)) != _value(_stack(2), seed=1)).any()
  a, b = _spec("params/a", (4,)), _spec("params/b", (4,))
  assert (_value(a) != _value(b)).any()


def test_mesh_does_not_change_a_bit():
  spec = _spec(
    "params/stack/layers/blocks_0/kernel",
    (3, 8, 4),
    axes=("layers", "embed", "mlp"),
    stacked=(("layers", 1),),
    initializer=nn.initializers.truncated_normal(0.02),
  )
  values = []
  for text, count in [("data=1", 1), ("fsdp=4,tensor=2", 8)]:
    made = mesh.make_mesh(
      mesh.MeshSpec.parse(text), devices=jax.devices()[:count]
    )
    laid = layout.Layout(made)
    run = laid.jit(
      lambda: initialization.initial_values({"v": spec}, 3),
      out_shardings=laid.shardings({"v": spec}),
    )
    value = run()["v"]
    assert len(value.sharding.device_set) == count
    values.append(np.asarray(value))
  np.testing.assert_array_equal(values[0], values[1])


def test_foreign_variables_come_from_the_fallback():
  foreign = _spec("params/dense/kernel", (2,), initializer=None)
  specs = {"own": _spec("params/own", (2,)), "foreign": foreign}
  others = {"own": jnp.zeros(2), "foreign": jnp.arange(2.0)}
  values = initialization.initial_values(specs, 0, fallback=lambda: others)
  np.testing.assert_array_equal(values["foreign"], [0.0, 1.0])
  assert (np.asarray(values["own"]) != 0).all()


def test_foreign_variable_without_fallback():
  foreign = _spec("params/dense/kernel", (2,), initializer=None)
  with pytest.raises(ValueError, match="params/dense/kernel has no initial"):
    initialization.initial_values({"v": foreign}, 0)
