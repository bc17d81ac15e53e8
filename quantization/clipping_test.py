"""Tests of clipping of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import clipping, number_formats, recipe, testing

INT4 = number_formats.INT4
GRANULARITIES = {
  "tensor": {},
  "channel": {"granularity": recipe.Granularity.CHANNEL},
  "rows": {"granularity": recipe.Granularity.BLOCK, "block": (16, 1)},
}
_best = jax.jit(
  clipping.best, static_argnames=("tensor_recipe", "contracted", "power")
)


@pytest.mark.parametrize("power", [2.0, 3.5])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_other_factor_is_better(granularity, power):
  tensor = recipe.TensorRecipe(INT4, **GRANULARITIES[granularity])
  x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
  got = _best(
    jax.device_put(x), tensor_recipe=tensor, contracted=(0,), power=power
  )
  off = np.abs(np.asarray(got.dequantize(), np.float64) - x) ** power
  clipped = False
  for tile in testing.tiles(x, tensor, (0,)):
    errors = []
    for factor in clipping.FACTORS:
      amax = np.float32(factor) * np.max(np.abs(x[tile]))
      scale = testing.scale_of(float(amax), tensor)
      values = testing.rounded(x[tile] * (1 / scale), tensor) * scale
      errors.append((np.abs(values - x[tile]) ** power).sum())
    assert off[tile].sum() == pytest.approx(min(errors), rel=1e-4)
    clipped |= min(errors) < errors[0] * 0.99
  assert clipped


def test_without_outliers_nothing_is_clipped():
  x = jnp.where(jnp.arange(64) % 2 == 0, 1.0, -1.0)
  got = _best(x, tensor_recipe=recipe.TensorRecipe(INT4))
  np.testing.assert_array_equal(got.dequantize(), x)


@pytest.mark.parametrize("factors", [(), (1.0, 0.0)])
def test_ranges_are_positive(factors):
  with pytest.raises(ValueError, match=r"positive factors, and at least one"):
    clipping.best(jnp.ones(2), recipe.TensorRecipe(INT4), factors=factors)


def test_weights_have_no_history():
  delayed = recipe.TensorRecipe(INT4, scaling=recipe.Delayed())
  with pytest.raises(ValueError, match=r"best needs TensorRecipe.scaling"):
    clipping.best(jnp.ones(2), delayed)
