"""Tests of forecasts of whole, small programs."""

import time

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan import hardware
from paxon.runner.plan.memory import forecast

LAYERS, ROWS, WIDTH = 4, 64, 32
_CUDA = hardware.Platform.CUDA


def _forecast(*, devices=1, layers=LAYERS, platform=_CUDA):
  mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
  weights = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
  rows = jax.NamedSharding(mesh, jax.P("fsdp"))

  def loss(w, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
    return jnp.sum(x)

  def step(w, x):
    return w - jax.grad(loss)(w, x)

  inputs = (
    jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32, sharding=weights),
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=rows),
  )
  jitted = jax.jit(step, donate_argnums=0, out_shardings=weights)
  with jax.set_mesh(mesh):
    traced = jitted.trace(*inputs)
  return forecast.forecast(
    traced, inputs=inputs, mesh=mesh, arguments=1000, platform=platform
  )


def test_the_parts_are_those_of_the_program():
  found = _forecast()
  stack, matrix = 4 * ROWS * WIDTH * LAYERS, 4 * WIDTH * WIDTH
  assert found.gradients == LAYERS * matrix
  # The input of each layer, and the derivative of its tanh.
  assert found.saved["layer inputs"] == stack
  assert sum(found.saved.values()) >= 2 * stack
  together = 1000 + sum(found.saved.values()) + found.gradients
  assert together <= found.peak <= 1.5 * together
  assert found.peak == together + found.workspace
  assert found.at[0].startswith("scan")


def test_more_layers_need_more():
  less, more = _forecast(), _forecast(layers=2 * LAYERS)
  assert more.saved["layer inputs"] == 2 * less.saved["layer inputs"]
  assert more.peak - 1000 > 1.7 * (less.peak - 1000)


@pytest.mark.parametrize("platform", list(hardware.Platform))
def test_a_mesh_divides(platform):
  one = _forecast(platform=platform)
  four = _forecast(devices=4, platform=platform)
  assert four.saved["layer inputs"] == one.saved["layer inputs"] // 4
  assert four.gradients == one.gradients // 4
  assert four.peak < one.peak


def test_the_order_that_hides_communication_needs_no_less():
  cpu = _forecast(devices=4, platform=hardware.Platform.CPU)
  assert cpu.peak <= _forecast(devices=4).peak


def test_the_number_of_layers_costs_no_time():
  _forecast()
  begin = time.monotonic()
  _forecast(layers=10_000)
  assert time.monotonic() - begin < 2
