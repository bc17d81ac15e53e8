"""Tests for position vectors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.positions import position_embedding

EMBED = 6
# Two packed documents and padding; one document.
POSITIONS = testing.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], jnp.int32)


def _learned(max_length=8, **kwargs):
  return position_embedding.LearnedPositions(max_length, **kwargs)


def _waves(position, embed_dim, shortest=1.0, longest=10_000.0):
  """The definition of sinusoidal positions, one feature at a time."""
  half = embed_dim // 2
  out = np.zeros(embed_dim)
  for i in range(half):
    timescale = shortest * (longest / shortest) ** (i / max(half - 1, 1))
    out[i] = np.sin(position / timescale)
    out[half + i] = np.cos(position / timescale)
  return out


def test_learned_rows_follow_positions():
  values = testing.random_values(_learned(), POSITIONS, embed_dim=EMBED)
  x = _learned().apply(values, POSITIONS, embed_dim=EMBED)
  table = np.asarray(values["params"]["table"])
  for b, t in np.ndindex(POSITIONS.shape):
    np.testing.assert_array_equal(x[b, t], table[POSITIONS[b, t]])


def test_gradient_of_the_table_counts_positions():
  values = testing.random_values(_learned(), POSITIONS, embed_dim=EMBED)
  gradient = jax.jit(
    jax.grad(lambda v: jnp.sum(_learned().apply(v, POSITIONS, embed_dim=EMBED)))
  )(values)["params"]["table"]
  expected = np.bincount(np.ravel(POSITIONS), minlength=8)
  np.testing.assert_array_equal(gradient, np.tile(expected, (EMBED, 1)).T)


def test_learned_axes_dtypes_and_start():
  layer = _learned(max_length=512, dtype=jnp.bfloat16)
  assert testing.axes(layer, POSITIONS, embed_dim=64) == {
    "params/table": (None, "embed")
  }
  values = testing.initial_values(layer, POSITIONS, embed_dim=64)
  table = values["params"]["table"]
  assert table.dtype == jnp.float32
  np.testing.assert_allclose(np.std(table), 64**-0.5, rtol=0.02)
  assert layer.apply(values, POSITIONS, embed_dim=64).dtype == jnp.bfloat16


def test_sequences_longer_than_the_table_are_rejected():
  message = r"max_length \(5\) must be at least the sequence length \(6\)"
  with pytest.raises(ValueError, match=message):
    testing.specs(_learned(5), POSITIONS, embed_dim=EMBED)


def test_a_position_beyond_the_table_gives_nan():
  values = testing.random_values(_learned(), POSITIONS, embed_dim=EMBED)
  step = testing.apply(
    _learned(), values, testing.array([[7], [8]], np.int32), embed_dim=EMBED
  )
  assert np.isfinite(step[0]).all()
  assert np.isnan(step[1]).all()


@pytest.mark.parametrize("embed_dim", [2, 6, 7])
@pytest.mark.parametrize(
  "scales", [(1.0, 10_000.0), (2.0, 50.0)], ids=["default", "own"]
)
def test_sinusoidal_matches_the_definition(embed_dim, scales):
  layer = position_embedding.SinusoidalPositions(*scales)
  x = testing.apply(layer, {}, POSITIONS, embed_dim=embed_dim)
  expected = [
    [_waves(p, embed_dim, *scales) for p in r] for r in POSITIONS.tolist()
  ]
  np.testing.assert_allclose(x, np.stack(expected), rtol=1e-5, atol=1e-6)
  with jax.enable_x64(True):
    wide = position_embedding.SinusoidalPositions(*scales, dtype=jnp.float64)
    x = wide.apply({}, POSITIONS, embed_dim)
  np.testing.assert_allclose(x, np.stack(expected), rtol=1e-12, atol=1e-14)


def test_sinusoidal_keeps_long_positions_in_bfloat16():
  layer = position_embedding.SinusoidalPositions(dtype=jnp.bfloat16)
  place = testing.array([[4_001]], np.int32)
  x = testing.apply(layer, {}, place, embed_dim=8)
  assert x.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(x[0, 0], np.float32), _waves(4_001, 8), atol=1e-2
  )


def test_rejects_wrong_sizes():
  with pytest.raises(ValueError, match=r"max_length must be positive, got 0"):
    _learned(0)
  message = r"max_timescale must exceed min_timescale.* got 1\.0 and 2\.0"
  with pytest.raises(ValueError, match=message):
    position_embedding.SinusoidalPositions(2.0, 1.0)


GRID_EMBED = 8


def _grid(**kwargs):
  return position_embedding.GridPositions(
    **{"height": 3, "width": 2, "slots_before": 1, "slots_after": 2, **kwargs}
  )


def _grid_waves(place, features, longest):
  half = features // 2
  rates = [longest ** (-i / half) for i in range(half)]
  return [f(place * r) for f in (math.sin, math.cos) for r in rates]


@pytest.mark.parametrize("longest", [10_000.0, 20.0])
def test_grid_matches_the_definition(longest):
  expected = [[0.0] * GRID_EMBED]
  for h in range(3):
    for w in range(2):
      row = _grid_waves(h - 1.5, GRID_EMBED // 2, longest)
      expected.append(row + _grid_waves(w - 1.0, GRID_EMBED // 2, longest))
  expected += [[0.0] * GRID_EMBED] * 2
  layer = _grid(max_timescale=longest)
  positions = testing.make_positions(2, layer.length)
  x = testing.apply(layer, {}, positions, embed_dim=GRID_EMBED)
  assert layer.length == 9
  for row in x:
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)
  with jax.enable_x64(True):
    wide = _grid(max_timescale=longest, dtype=jnp.float64)
    x = wide.apply({}, positions, GRID_EMBED)
  np.testing.assert_allclose(x[0], expected, rtol=1e-12, atol=1e-15)


def test_grid_follows_positions():
  order = testing.array([[4, 1, 7, 0]], jnp.int32)
  layer = _grid()
  whole = testing.apply(
    layer, {}, testing.make_positions(1, 9), embed_dim=GRID_EMBED
  )
  some = testing.apply(layer, {}, order, embed_dim=GRID_EMBED)
  np.testing.assert_array_equal(some[0], np.asarray(whole)[0][order[0]])


def test_positions_outside_of_the_grid_give_nan():
  places = testing.array([[8, 9, -1]], jnp.int32)
  x = testing.apply(_grid(), {}, places, embed_dim=GRID_EMBED)
  bad = np.isnan(np.asarray(x[0])).all(axis=-1)
  assert bad.tolist() == [False, True, True]


def test_grid_dtype():
  layer = _grid(dtype=jnp.bfloat16)
  assert (
    layer.apply({}, testing.make_positions(1, 2), GRID_EMBED).dtype
    == jnp.bfloat16
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"height": 0}, r"GridPositions.height must be positive, got 0"),
    ({"slots_after": -1}, r"slots_after must not be negative, got -1"),
    ({"max_timescale": 1.0}, r"max_timescale must exceed 1, got 1.0"),
  ],
)
def test_grid_rejects_bad_fields(fields, message):
  with pytest.raises(ValueError, match=message):
    _grid(**fields)


def test_grid_rejects_widths_without_quarters():
  with pytest.raises(ValueError, match=r"a multiple of 4, got 6"):
    _grid().apply({}, testing.make_positions(1, 2), 6)
