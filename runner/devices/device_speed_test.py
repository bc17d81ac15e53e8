"""Tests for the measurements of devices and their known results."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.devices import device_speed

_SIZES = device_speed.Sizes(matmul=128, memory=1000, ring=100, calls=2)
_NAMES = ("matmul", "memory", "ring", "all-reduce")
# The third device of eight.
_WRONG = 2


def _flip_one_bit(wrong):
  """Changes the last element of one program's result on one device."""

  def alter(name, result):
    if name != wrong:
      return result
    is_here = (jax.lax.axis_index("all") == _WRONG).astype(result.dtype)
    flat = result.reshape(-1)
    return flat.at[-1].add(is_here).reshape(result.shape)

  return alter


def test_right_devices_have_rates_and_no_wrong_result():
  found = device_speed.measure(_SIZES)
  assert [each.device for each in found] == [
    f"cpu:{device.id}" for device in jax.devices()
  ]
  for each in found:
    assert each.wrong == ()
    assert not each.is_across
    for rate in (each.matmul, each.memory, each.ring):
      assert 0 < rate < math.inf


@pytest.mark.parametrize("name", _NAMES)
def test_one_wrong_element_is_found(name):
  found = device_speed.measure(_SIZES, alter=_flip_one_bit(name))
  assert [each.wrong for each in found] == [
    (name,) if index == _WRONG else () for index in range(len(found))
  ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_expected_matmul_is_that_of_integers(dtype):
  program = device_speed._make_matmul(256, dtype)
  x, y = program.make()
  assert (x.dtype, x.shape) == (dtype, (256, 256))
  exact = np.asarray(x, np.int64) @ np.asarray(y, np.int64)
  assert np.abs(exact).max() < 2**24
  np.testing.assert_array_equal(program.expect(), exact)
  np.testing.assert_array_equal(program.run(x, y), exact)


def test_one_device_has_no_links():
  assert list(device_speed._make_programs(_SIZES, True, 1)) == [
    "matmul",
    "memory",
  ]
