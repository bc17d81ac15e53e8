"""Tests for the small programs that are measured."""

import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner.plan.estimate import microbenchmarks

_TINY = microbenchmarks.Sizes(
  products=(32, 64), memory_bytes=2**16, link_bytes=2**12, repetitions=2
)


def test_measures_all_devices_at_once():
  devices = jax.devices()
  found = microbenchmarks.measure(devices, sizes=_TINY, dtypes=("float32",))
  assert set(found.products) == {"float32"}
  assert 0 < found.products["float32"] <= found.best_products["float32"]
  assert found.memory > 0
  assert found.link > 0
  assert found.overhead >= 0
  # There is no attention kernel for CPUs.
  assert found.attention is None
  assert microbenchmarks.kind_of(devices).name == "cpu"


def test_one_device_has_no_link():
  found = microbenchmarks.measure(
    jax.devices()[:1], sizes=_TINY, dtypes=("float32",)
  )
  assert found.link is None


def test_the_programs_compute_what_is_timed():
  mesh = jax.sharding.Mesh(jax.devices(), ("device",))
  seen = []

  def timer(run):
    seen.append(np.asarray(run()))
    return 0.5

  rate = microbenchmarks._products(mesh, 32, "float32", 3, timer)
  # Three products of 2 x 32^3 FLOPs in half a second, and ones stay ones.
  assert rate == 3 * 2 * 32**3 / 0.5
  np.testing.assert_array_equal(seen[-1], np.ones((8, 32, 32)))
  assert microbenchmarks._memory(mesh, 4096, timer) == 2 * 4096 / 0.5
  np.testing.assert_array_equal(seen[-1], np.full((8, 1024), 2.0))
  rate = microbenchmarks._link(mesh, 4096, timer)
  assert rate == 2 * 7 / 8 * 4096 / 0.5
  np.testing.assert_array_equal(seen[-1], np.full((8, 1024), 8.0))


def test_the_slowest_does_not_count():
  x = jnp.ones(())
  calls = []

  def run():
    calls.append(0)
    return x

  seconds = microbenchmarks._fastest(run, repetitions=4)
  assert len(calls) == 1 + 4
  assert 0 <= seconds < 1
