"""Tests for the figures of memory."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.monitoring import memory


def test_the_fullest_device_counts():
  stats = [
    {"bytes_in_use": 5, "peak_bytes_in_use": 9},
    None,
    {"bytes_in_use": 7, "peak_bytes_in_use": 8, "bytes_limit": 100},
  ]
  assert memory.fullest(stats) == {
    "device_memory_bytes": 7.0,
    "device_memory_peak_bytes": 9.0,
  }
  assert memory.fullest([{"bytes_in_use": 3}]) == {"device_memory_bytes": 3.0}


def test_devices_that_do_not_count_leave_it_to_the_compiler():
  step = {"step_memory_bytes": 12.0}
  assert memory.device_memory(jax.devices("cpu"), step=step) == step
  assert memory.device_memory(jax.devices("cpu")) == {}


def test_memory_of_a_step_is_arguments_results_and_what_lies_between():
  x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
  step = jax.jit(lambda x: x + 1)
  mebi = 2**20
  [whole] = memory.step_memory(step.lower(x).compile()).values()
  assert whole == pytest.approx(8 * mebi, rel=0.01)
  donating = jax.jit(lambda x: x + 1, donate_argnums=0)
  [once] = memory.step_memory(donating.lower(x).compile()).values()
  assert once == pytest.approx(4 * mebi, rel=0.01)


def test_host_memory_grows_with_what_is_held():
  before = memory.host_memory()
  held = np.ones(8 * 2**20)
  after = memory.host_memory()
  grown = after["host_memory_bytes"] - before["host_memory_bytes"]
  assert grown == pytest.approx(held.nbytes, rel=0.2)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  assert after["host_memory_peak_bytes"] == pytest.approx(peak, rel=0.1)


def test_status_of_linux():
  text = "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\nThreads:\t3\n"
  assert memory.parse_status(text) == {
    "host_memory_bytes": 1024.0 * 1024,
    "host_memory_peak_bytes": 2048.0 * 1024,
  }
