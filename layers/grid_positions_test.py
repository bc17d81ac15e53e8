"""Tests for positions of a grid."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import grid_positions, testing

EMBED = 8


def _layer(**kwargs):
  return grid_positions.GridPositions(
    **{"height": 3, "width": 2, "slots_before": 1, "slots_after": 2, **kwargs}
  )


def _waves(place, features, longest):
  half = features // 2
  rates = [longest ** (-i / half) for i in range(half)]
  return [f(place * r) for f in (math.sin, math.cos) for r in rates]


@pytest.mark.parametrize("longest", [10_000.0, 20.0])
def test_matches_the_definition(longest):
  expected = [[0.0] * EMBED]
  for h in range(3):
    for w in range(2):
      row = _waves(h - 1.5, EMBED // 2, longest)
      expected.append(row + _waves(w - 1.0, EMBED // 2, longest))
  expected += [[0.0] * EMBED] * 2
  layer = _layer(max_timescale=longest)
  positions = testing.counted(2, layer.length)
  x = testing.apply(layer, {}, positions, embed_dim=EMBED)
  assert layer.length == 9
  for row in x:
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)
  with jax.enable_x64(True):
    wide = _layer(max_timescale=longest, dtype=jnp.float64)
    x = wide.apply({}, positions, EMBED)
  np.testing.assert_allclose(x[0], expected, rtol=1e-12, atol=1e-15)


def test_tokens_may_come_in_any_order():
  order = testing.array([[4, 1, 7, 0]], jnp.int32)
  layer = _layer()
  whole = testing.apply(layer, {}, testing.counted(1, 9), embed_dim=EMBED)
  some = testing.apply(layer, {}, order, embed_dim=EMBED)
  np.testing.assert_array_equal(some[0], np.asarray(whole)[0][order[0]])


def test_positions_outside_of_the_grid_give_nan():
  places = testing.array([[8, 9, -1]], jnp.int32)
  x = testing.apply(_layer(), {}, places, embed_dim=EMBED)
  bad = np.isnan(np.asarray(x[0])).all(axis=-1)
  assert bad.tolist() == [False, True, True]


def test_dtype():
  layer = _layer(dtype=jnp.bfloat16)
  assert layer.apply({}, testing.counted(1, 2), EMBED).dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"height": 0}, r"GridPositions.height must be positive, got 0"),
    ({"slots_after": -1}, r"slots_after must not be negative, got -1"),
    ({"max_timescale": 1.0}, r"max_timescale must exceed 1, got 1.0"),
  ],
)
def test_rejects_bad_fields(fields, message):
  with pytest.raises(ValueError, match=message):
    _layer(**fields)


def test_rejects_widths_without_quarters():
  with pytest.raises(ValueError, match=r"embed_dim that 4 divides, got 6"):
    _layer().apply({}, testing.counted(1, 2), 6)
