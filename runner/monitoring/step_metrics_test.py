"""Tests for model FLOPs, MFU and memory."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.monitoring import step_metrics

WIDTH, TOKENS = 64, 32


def _loss(w, x):
  # The policy saves nothing: the first matmul is computed twice.
  hidden = jax.checkpoint(lambda w, x: jnp.sin(x @ w[0]))(w, x)
  return jnp.sum(hidden @ w[1])


def _traced(dtype):
  w = jax.ShapeDtypeStruct((2, WIDTH, WIDTH), dtype)
  x = jax.ShapeDtypeStruct((TOKENS, WIDTH), dtype)
  return jax.jit(jax.value_and_grad(_loss)).trace(w, x)


def _cost(dtype, kind):
  return step_metrics.count_step(
    _traced(dtype), length=TOKENS, num_devices=4, device_kind=kind
  )


def test_forward_and_backward_count_and_recomputation_does_not():
  cost = _cost(jnp.bfloat16, "NVIDIA H200")
  # Two matmuls forward; backward two kernel gradients and one input gradient.
  matmul = 2 * TOKENS * WIDTH * WIDTH
  assert cost.flops == 5 * matmul
  seconds = 1e-6
  values = cost.values(seconds)
  rate = 5 * matmul / seconds / 4
  assert values["model_tflops_per_device"] == pytest.approx(rate / 1e12)
  # The data sheet: 1,979 TFLOP/s with sparsity, half of it without.
  assert values["mfu"] == pytest.approx(rate / 989.5e12, rel=1e-3)
  assert cost.note == "MFU is relative to 989 TFLOP/s (NVIDIA H200, bfloat16)"


def test_unknown_peak_has_no_mfu():
  cost = _cost(jnp.float32, "Abacus 3000")
  assert set(cost.values(1.0)) == {"model_tflops_per_device"}
  assert cost.note == ("no MFU: the peak of 'Abacus 3000' is unknown")


def test_a_cpu_has_no_mfu_and_no_note():
  cost = _cost(jnp.float32, "cpu")
  assert set(cost.values(1.0)) == {"model_tflops_per_device"}
  assert cost.note == ""


def test_program_without_matmuls_has_no_metrics():
  traced = jax.jit(jnp.sin).trace(jax.ShapeDtypeStruct((4,), jnp.float32))
  cost = step_metrics.count_step(
    traced, length=1, num_devices=1, device_kind="cpu"
  )
  assert cost.values(1.0) == {}
  assert cost.note.startswith("no MFU: the step contains no matmul")


def test_zero_seconds_is_no_division_by_zero():
  assert _cost(jnp.float32, "cpu").values(0.0) == {}


def test_maximum_over_devices():
  stats = [
    {"bytes_in_use": 5, "peak_bytes_in_use": 9},
    None,
    {"bytes_in_use": 7, "peak_bytes_in_use": 8, "bytes_limit": 100},
  ]
  assert step_metrics.max_over_devices(stats) == {
    "device_memory_bytes": 7.0,
    "device_memory_peak_bytes": 9.0,
  }
  assert step_metrics.max_over_devices([{"bytes_in_use": 3}]) == {
    "device_memory_bytes": 3.0
  }


def test_devices_without_statistics_use_the_compiler():
  step = {"step_memory_bytes": 12.0}
  assert step_metrics.device_memory(jax.devices("cpu"), step=step) == step
  assert step_metrics.device_memory(jax.devices("cpu")) == {}


def test_step_memory_is_arguments_results_and_temporaries():
  x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
  step = jax.jit(lambda x: x + 1)
  mebi = 2**20
  [whole] = step_metrics.step_memory(step.lower(x).compile()).values()
  assert whole == pytest.approx(8 * mebi, rel=0.01)
  donating = jax.jit(lambda x: x + 1, donate_argnums=0)
  [once] = step_metrics.step_memory(donating.lower(x).compile()).values()
  assert once == pytest.approx(4 * mebi, rel=0.01)


def test_host_memory_grows_with_allocations():
  before = step_metrics.host_memory()
  held = np.ones(8 * 2**20)
  after = step_metrics.host_memory()
  grown = after["host_memory_bytes"] - before["host_memory_bytes"]
  assert grown == pytest.approx(held.nbytes, rel=0.2)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  assert after["host_memory_peak_bytes"] == pytest.approx(peak, rel=0.1)


def test_status_of_linux():
  text = "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\nThreads:\t3\n"
  assert step_metrics.parse_status(text) == {
    "host_memory_bytes": 1024.0 * 1024,
    "host_memory_peak_bytes": 2048.0 * 1024,
  }
