"""Tests for temporal shifting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.speech import temporal_shift


def _shift(x, shift):
  """Returns `x` moved by `shift`, one position at a time."""
  y = np.zeros_like(x)
  for t in range(len(x)):
    if 0 <= t + shift < len(x):
      y[t] = x[t + shift]
  return y


def test_each_example_has_its_shift():
  layer = temporal_shift.TemporalShift(3)
  x = testing.normal(64, 8, 2)
  mask = jnp.asarray(np.arange(8) < 6)[None].repeat(64, 0)
  x = x * mask[..., None].astype(x.dtype)
  rngs = {"dropout": jax.random.key(0)}
  y, real = testing.apply(layer, {}, x, mask, deterministic=False, rngs=rngs)
  found = []
  for before, kept, after, shown in zip(
    *map(np.asarray, (x, mask, y, real)), strict=True
  ):
    (shift,) = (
      s for s in range(-3, 4) if np.array_equal(_shift(before, s), after)
    )
    np.testing.assert_array_equal(_shift(kept, shift), shown)
    found.append(shift)
  assert set(found) == set(range(-3, 4))


def test_evaluation_and_zero_change_nothing():
  x = testing.normal(2, 5)
  for layer, is_test in (
    (temporal_shift.TemporalShift(2), True),
    (temporal_shift.TemporalShift(0), False),
  ):
    y, mask = testing.apply(layer, {}, x, deterministic=is_test)
    np.testing.assert_array_equal(y, x)
    assert np.all(mask)


def test_errors():
  layer = temporal_shift.TemporalShift(5)
  with pytest.raises(ValueError, match=r"max_shift \(5\) must be less than"):
    layer.apply({}, jnp.ones((1, 5)), deterministic=False)
  with pytest.raises(ValueError, match="max_shift"):
    temporal_shift.TemporalShift(-1)
