"""Tests of zero points, against float64 from the definition of HQQ."""

import jax
import numpy as np
import pytest

from paxon.quantization import (
  number_formats,
  quantized_array,
  recipe,
  zero_points,
)

GROUP, C, N = 8, 24, 5
_RECIPE = recipe.TensorRecipe(
  number_formats.INT4,
  granularity=recipe.Granularity.BLOCK,
  block=(GROUP, 1),
  zero_point=True,
)
_quantize = jax.jit(
  zero_points.quantize,
  static_argnames=("tensor_recipe", "contracted", "half_quadratic"),
)


def _weights(shift=0.0):
  draw = np.random.default_rng(0)
  return np.float32(draw.standard_t(3, (C, N)) * [1, 10, 0.1, 3, 1] + shift)


def _run(x, *, half_quadratic, tensor_recipe=_RECIPE):
  return _quantize(
    jax.device_put(x),
    tensor_recipe=tensor_recipe,
    contracted=(0,),
    half_quadratic=half_quadratic,
  )


def _hqq(group):
  """HQQ of one group in float64; returns its scale and its error."""
  scale = (group.max() - group.min()) / 15
  zero = np.round(-8 - group.min() / scale)
  beta, found = 10.0, []
  for _ in range(21):
    values = np.clip(np.round(group / scale + zero), -8, 7)
    off = group - (values - zero) * scale
    found.append((np.abs(off) ** 0.7).sum())
    with np.errstate(divide="ignore"):
      size = np.maximum(np.abs(off) - np.abs(off) ** -0.3 / beta, 0)
    zero = (values - (group - np.sign(off) * size) / scale).mean()
    beta *= 1.01
  return scale, min(found)


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_groups_are_those_of_the_definition(shift):
  x = _weights(shift)
  made = _run(x, half_quadratic=True)
  assert made.values.dtype == np.int8
  restored, moved = made.dequantize(), 0
  for i in range(C // GROUP):
    for j in range(N):
      rows = slice(i * GROUP, (i + 1) * GROUP), j
      group = np.asarray(x[rows], np.float64)
      scale, loss = _hqq(group)
      np.testing.assert_allclose(made.scale[i, j], scale, rtol=1e-5)
      off = np.abs(np.asarray(restored[rows], np.float64) - group)
      # The zero may be that of another step with as small an error.
      assert (off**0.7).sum() == pytest.approx(loss, rel=1e-3)
      moved += (
        abs(float(made.zero[i, j]) - round(float(made.zero[i, j]))) > 0.01
      )
  assert moved > 3
  np.testing.assert_allclose(made.pack(0).dequantize(), restored, rtol=1e-6)


def test_the_range_of_a_group_is_its_smallest_and_largest():
  x = _weights(3.0)
  made = _run(x, half_quadratic=False)
  groups = np.asarray(x, np.float64).reshape(-1, GROUP, N)
  scale = (groups.max(axis=1) - groups.min(axis=1)) / 15
  zero = np.round(-8 - groups.min(axis=1) / scale)
  np.testing.assert_allclose(made.scale, scale, rtol=1e-5)
  np.testing.assert_array_equal(made.zero, zero)
  wide = groups / scale[:, None] + zero[:, None]
  values = np.clip(np.round(wide), -8, 7).reshape(C, N)
  # float32 may round a middle to the other side.
  clear = np.abs(wide.reshape(C, N) % 1 - 0.5) > 1e-4
  np.testing.assert_array_equal(np.asarray(made.values)[clear], values[clear])
  off = np.abs(made.dequantize() - x)
  assert np.all(off <= np.repeat(scale, GROUP, 0) * 1.001)


def test_zero_points_lose_less_where_weights_are_not_centered():
  x = _weights(4.0)

  def error(made):
    return np.sum(np.abs(np.asarray(made.dequantize() - x)) ** 0.7)

  plain = recipe.TensorRecipe(
    number_formats.INT4, granularity=recipe.Granularity.BLOCK, block=(GROUP, 1)
  )
  symmetric = quantized_array.quantize(
    jax.device_put(x), plain, contracted=(0,)
  )
  by_range = error(_run(x, half_quadratic=False))
  assert error(_run(x, half_quadratic=True)) < by_range < error(symmetric)


def test_equal_weights_are_exact_and_others_visible():
  x = np.float32([[3.5, 0, -2, np.nan]] * GROUP)
  for half_quadratic in (False, True):
    made = np.asarray(_run(x, half_quadratic=half_quadratic).dequantize())
    np.testing.assert_array_equal(made, x)


def test_channels_have_zero_points_too():
  channel = recipe.TensorRecipe(
    number_formats.INT8,
    granularity=recipe.Granularity.CHANNEL,
    zero_point=True,
  )
  x = _weights(2.0)
  made = _run(x, half_quadratic=False, tensor_recipe=channel)
  assert made.zero.shape == made.scale.shape == (1, N)
  off = np.abs(np.asarray(made.dequantize()) - x)
  assert np.all(off <= (x.max(axis=0) - x.min(axis=0)) / 255 * 1.001)


def test_training_has_no_zero_points():
  with pytest.raises(ValueError, match=r"zero_point must be False: only store"):
    quantized_array.quantize(jax.device_put(_weights()), _RECIPE)
