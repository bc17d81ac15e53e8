"""Tests for functions that are mapped over shards, on eight devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.sharding import axes, layout, logical, mesh, shards

AXES = (axes.BATCH, axes.LENGTH)
X = jax.device_put(np.float32(np.arange(8 * 4 * 3).reshape(8, 4, 3)))


def _layout(text):
  return layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(text)))


def _fn(x):
  doubled = logical.constrain(
    2 * x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)
  )
  return jnp.sum(x, axis=(0, 1)), doubled


@pytest.mark.parametrize(
  "text",
  ["data=8", "data=2,fsdp=2,tensor=2", "data=2,sequence=4", "tensor=8"],
)
def test_sums_and_outputs_match_the_unsharded_function(text):
  where = _layout(text)
  run = where.jit(lambda x: shards.map_shards(_fn, x, axes=AXES))
  total, doubled = run(jax.device_put(X, where.batch_sharding(3)))
  np.testing.assert_array_equal(total, np.sum(X, axis=(0, 1)))
  np.testing.assert_array_equal(doubled, 2 * X)
  assert doubled.sharding.is_equivalent_to(where.batch_sharding(3), 3)


def test_a_shard_is_local_to_a_device():
  seen = []

  def fn(x):
    seen.append(x.shape)
    return jnp.sum(x), x

  _layout("data=2,sequence=2,tensor=2").jit(
    lambda x: shards.map_shards(fn, x, axes=AXES)
  ).lower(X)
  assert seen == [(4, 2, 3)]
  shards.map_shards(fn, X, axes=AXES)
  assert seen[1:] == [X.shape]


@pytest.mark.parametrize("mapped", [True, False])
def test_sums_of_a_loop_are_reduced_once(mapped):
  def summed(x):
    def step(total, row):
      return total + jnp.einsum("BD,BE->DE", row, row), None

    rows = jnp.moveaxis(x, 1, 0)
    total, _ = jax.lax.scan(step, jnp.zeros((3, 3)), rows)
    return total, x

  def whole(x):
    run = shards.map_shards(summed, x, axes=AXES) if mapped else summed(x)
    return run[0]

  where = _layout("data=8")
  text = (
    where.jit(
      whole,
      in_shardings=where.batch_sharding(3),
      out_shardings=where.replicated,
    )
    .lower(X)
    .compile()
    .as_text()
  )
  computations = re.split(r"\n\n", text)
  places = [c for c in computations if re.search(r" all-reduce[-(]", c)]
  assert len(places) == 1
  assert places[0].strip().startswith("ENTRY") == mapped


def test_a_dimension_of_size_one_is_not_split():
  run = _layout("data=8").jit(lambda x: shards.map_shards(_fn, x, axes=AXES))
  total, _ = run(X[:1])
  np.testing.assert_array_equal(total, np.sum(X[:1], axis=(0, 1)))


def test_rejects_an_axis_that_does_not_divide():
  run = _layout("data=8").jit(lambda x: shards.map_shards(_fn, x, axes=AXES))
  with pytest.raises(ValueError, match=r"axis 'batch' .*\(6, 4, 3\) .* 8 shar"):
    run(X[:6])
