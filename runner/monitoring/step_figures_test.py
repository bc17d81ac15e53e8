"""Tests for model FLOPs and MFU."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.monitoring import step_figures

WIDTH, ROWS = 64, 32


def _loss(w, x):
  # The policy saves nothing: the first product is computed twice.
  hidden = jax.checkpoint(lambda w, x: jnp.sin(x @ w[0]))(w, x)
  return jnp.sum(hidden @ w[1])


def _traced(dtype):
  w = jax.ShapeDtypeStruct((2, WIDTH, WIDTH), dtype)
  x = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
  return jax.jit(jax.grad(_loss)).trace(w, x)


def _figures(dtype, kind):
  return step_figures.of_step(
    _traced(dtype), length=ROWS, num_devices=4, device_kind=kind
  )


def test_forward_and_backward_count_and_recomputation_does_not():
  figures = _figures(jnp.bfloat16, "NVIDIA H200")
  # Two products forward; backward both kernels' and the second one's input.
  product = 2 * ROWS * WIDTH * WIDTH
  assert figures.flops == 5 * product
  seconds = 1e-6
  values = figures.values(seconds)
  rate = 5 * product / seconds / 4
  assert values["model_tflops_per_device"] == pytest.approx(rate / 1e12)
  # The data sheet: 1,979 TFLOP/s with sparsity, half of it without.
  assert values["mfu"] == pytest.approx(rate / 989.5e12, rel=1e-3)
  assert figures.note == "MFU is of 989 TFLOP/s (NVIDIA H200, bfloat16)"


def test_a_device_without_a_known_peak_has_no_mfu():
  figures = _figures(jnp.float32, "Abacus 3000")
  assert set(figures.values(1.0)) == {"model_tflops_per_device"}
  assert figures.note == (
    "the peak of 'Abacus 3000' is not known, so there is no MFU"
  )
  assert "so there is no MFU" in _figures(jnp.float32, "cpu").note


def test_a_program_without_products_has_no_figures():
  traced = jax.jit(jnp.sin).trace(jax.ShapeDtypeStruct((4,), jnp.float32))
  figures = step_figures.of_step(
    traced, length=1, num_devices=1, device_kind="cpu"
  )
  assert figures.values(1.0) == {}
  assert figures.note.startswith("no matrix product")


def test_no_time_is_no_division_by_zero():
  assert _figures(jnp.float32, "cpu").values(0.0) == {}
