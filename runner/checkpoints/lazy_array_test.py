"""Tests for arrays that are read when they are written."""

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer, lazy_array, stored_checkpoint
from paxon.sharding import variables


def _spec(name, array):
  return variables.VariableSpec(
    name, array.shape, jnp.dtype(array.dtype), (None,) * array.ndim
  )


def _lazy(array, read):
  return lazy_array.LazyArray(
    shape=array.shape, dtype=array.dtype, read=lambda: read(array)
  )


def test_lazy_arrays_are_restored_like_others(tmp_path):
  arrays = {
    "params/a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "params/b": np.ones((4,), jnp.bfloat16),
    "step": np.asarray(0, np.int32),
  }
  specs = {name: _spec(name, x) for name, x in arrays.items()}
  folder = epath.Path(tmp_path)
  alive = []

  def read(array):
    alive.append(array.shape)
    return array

  with checkpointer.Checkpointer(folder, lazy=True) as checkpoints:
    tree = {name: _lazy(x, read) for name, x in arrays.items()}
    checkpoints.save(0, tree, specs=specs, data={})
    # All are read, once, when `save` returns.
    assert sorted(alive) == sorted(x.shape for x in arrays.values())
  shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    checkpoints.verify(0)
    found = checkpoints.restore(
      0, specs=specs, shardings=dict.fromkeys(specs, shardings)
    ).tree
  stored = stored_checkpoint.find_checkpoint(folder)
  for name, x in arrays.items():
    np.testing.assert_array_equal(found[name], x)
    assert found[name].dtype == x.dtype
    again = stored_checkpoint.read_numpy(stored, [name])[name]
    np.testing.assert_array_equal(again, x)


def test_shape_and_dtype_of_the_array_are_checked(tmp_path):
  array = np.zeros((2,), np.float32)
  with checkpointer.Checkpointer(
    epath.Path(tmp_path), lazy=True
  ) as checkpoints:
    tree = {"params/a": _lazy(array, lambda x: x[:1])}
    specs = {"params/a": _spec("params/a", array)}
    with pytest.raises(
      checkpointer.SaveError, match=r"shape \(2,\) .* was read as \(1,\)"
    ):
      checkpoints.save(0, tree, specs=specs, data={})
