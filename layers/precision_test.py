"""Tests for the dtype of sensitive computations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import precision


@pytest.mark.parametrize(
  ("dtype", "expected"),
  [
    (jnp.bfloat16, "float32"),
    (jnp.float16, "float32"),
    (jnp.float32, "float32"),
    (jnp.float64, "float64"),
  ],
)
def test_narrow_dtypes_are_widened_and_wide_ones_kept(dtype, expected):
  assert precision.at_least_float32(dtype) == jnp.dtype(expected)


def test_widening_keeps_values():
  x = jax.device_put(np.asarray([1.5, -2.0], jnp.bfloat16))
  assert precision.widened(x).dtype == jnp.float32
  assert precision.widened(x).tolist() == [1.5, -2.0]
  with jax.enable_x64(True):
    assert precision.widened(jnp.ones(2, jnp.float64)).dtype == jnp.float64
