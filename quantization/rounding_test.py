"""Tests of rounding to a number format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import number_formats, recipe, rounding

STOCHASTIC = recipe.Rounding.STOCHASTIC
FORMATS = [
  pytest.param(f, id=name) for name, f in number_formats.FORMATS.items()
]
_DRAWS = 20_000

_to_format = jax.jit(
  rounding.to_format, static_argnums=1, static_argnames="rounding"
)


@pytest.mark.parametrize("number_format", FORMATS)
def test_the_mean_of_stochastic_rounding_is_the_value(number_format):
  """Also of subnormal values, negative ones and those on the grid."""
  values = np.array(
    [0.0, 1.0, 1.03, -2.3, 3.999, 5.5, 2.0**-7 * 1.01, -(2.0**-18), 1e-5],
    np.float32,
  )
  x = jax.device_put(np.broadcast_to(values, (_DRAWS, values.size)))
  drawn = _to_format(
    x, number_format, rounding=STOCHASTIC, key=jax.random.key(0)
  )
  drawn = np.asarray(drawn).astype(np.float64)
  # At most two values, and these are neighbours.
  grid = _grid(number_format)
  low = grid[np.searchsorted(grid, values, side="right") - 1]
  high = grid[np.searchsorted(grid, values, side="left")]
  assert ((drawn == low) | (drawn == high)).all()
  # Five standard deviations of a mean of so many draws.
  bound = 5 * (high - low) / 2 / np.sqrt(_DRAWS)
  assert (np.abs(drawn.mean(0) - values) <= bound).all()


def test_nearest_rounding_is_biased_where_stochastic_is_not():
  x = jax.device_put(np.full(_DRAWS, 0.3, np.float32))
  nearest = _to_format(x, number_formats.INT8)
  drawn = _to_format(
    x, number_formats.INT8, rounding=STOCHASTIC, key=jax.random.key(1)
  )
  assert np.mean(np.asarray(nearest), dtype=np.float64) == 0.0
  assert abs(np.mean(np.asarray(drawn), dtype=np.float64) - 0.3) < 0.02


@pytest.mark.parametrize("number_format", FORMATS)
def test_stochastic_rounding_saturates_and_shows_what_is_not_finite(
  number_format,
):
  x = jax.device_put(np.float32([1e9, -1e9, jnp.inf, jnp.nan]))
  drawn = _to_format(
    x, number_format, rounding=STOCHASTIC, key=jax.random.key(0)
  )
  drawn = np.asarray(drawn).astype(np.float32)
  largest = number_format.largest
  bad = [largest, 0] if number_format.is_integer else [np.nan, np.nan]
  np.testing.assert_array_equal(drawn, [largest, -largest, *bad])


def test_stochastic_rounding_needs_a_key():
  with pytest.raises(ValueError, match=r"STOCHASTIC needs a random key, got"):
    rounding.to_format(jnp.ones(2), number_formats.INT8, rounding=STOCHASTIC)


def _grid(number_format: number_formats.NumberFormat) -> np.ndarray:
  """All finite values of a format, ascending."""
  if number_format.is_integer:
    return np.arange(-number_format.largest, number_format.largest + 1)
  values = np.arange(256, dtype=np.uint8).view(number_format.dtype)
  values = values.astype(np.float64)
  return np.unique(values[np.isfinite(values)])
