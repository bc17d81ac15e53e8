"""Tests of two integers of four bits in a byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import packing


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_values_come_back(axis):
  values = jax.device_put(
    np.asarray(np.random.default_rng(0).integers(-8, 8, (16, 4, 6)), jnp.int8)
  )
  packed = jax.jit(lambda x: packing.pack(x, axis=axis))(values)
  assert packed.dtype == jnp.int8
  assert packed.size * 2 == values.size
  back = jax.jit(lambda x: packing.unpack(x, axis=axis))(packed)
  np.testing.assert_array_equal(back, values)


def test_the_even_neighbour_is_in_the_lower_bits():
  packed = packing.pack(jax.device_put(np.asarray([1, 2, -1, 7], jnp.int8)))
  np.testing.assert_array_equal(np.asarray(packed).view(np.uint8), [0x21, 0x7F])


def test_a_part_of_the_bytes_is_a_part_of_the_values():
  values = np.arange(-8, 8, dtype=np.int8)
  part = jax.jit(lambda x: packing.unpack(packing.pack(x)[2:6]))(values)
  np.testing.assert_array_equal(part, values[4:12])


def test_an_odd_number_is_refused():
  with pytest.raises(
    ValueError, match=r"must be even; dimension 1 of \(2, 3\)"
  ):
    packing.pack(jnp.zeros((2, 3), jnp.int8), axis=1)


def test_other_dtypes_are_refused():
  with pytest.raises(ValueError, match=r"packed from int8, got int32"):
    packing.pack(jnp.zeros(2, jnp.int32))
