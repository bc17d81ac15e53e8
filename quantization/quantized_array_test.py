"""Tests of quantized arrays."""

import functools

import hypothesis
from hypothesis import strategies
from hypothesis.extra import numpy as hypothesis_numpy
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxon.quantization import (
  number_formats,
  quantized_array,
  recipe,
  recipes,
  testing,
)

FORMATS = [
  pytest.param(f, id=name) for name, f in number_formats.FORMATS.items()
]
GRANULARITIES = {
  "tensor": {},
  "channel": {"granularity": recipe.Granularity.CHANNEL},
  "rows": {"granularity": recipe.Granularity.BLOCK, "block": (4, 1)},
  "squares": {"granularity": recipe.Granularity.BLOCK, "block": (4, 2)},
}
SHAPE, CONTRACTED = (2, 6, 8), (0, 2)

_quantize = jax.jit(
  quantized_array.quantize, static_argnames=("tensor_recipe", "contracted")
)
_dequantize = jax.jit(lambda quantized: quantized.dequantize())


def _values(seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(SHAPE) * np.exp2(rng.integers(-8, 8, SHAPE))
  return x.astype(np.float32)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("number_format", FORMATS)
def test_values_match_numpy(number_format, granularity):
  tensor = recipe.TensorRecipe(number_format, **GRANULARITIES[granularity])
  x = _values()
  x[0, 0] = 0.0
  got = _quantize(
    jax.device_put(x), tensor_recipe=tensor, contracted=CONTRACTED
  )
  assert got.shape == x.shape
  assert got.values.dtype == number_format.dtype
  np.testing.assert_array_equal(
    _dequantize(got),
    testing.quantize(x, tensor, CONTRACTED).astype(np.float32),
  )


@pytest.mark.parametrize(
  ("granularity", "shape"),
  [
    ("tensor", ()),
    ("channel", (1, 6, 1)),
    ("rows", (2, 6, 2)),
    ("squares", (2, 3, 2)),
  ],
)
def test_there_is_a_scale_for_each_group(granularity, shape):
  tensor = recipe.TensorRecipe(
    number_formats.INT8, **GRANULARITIES[granularity]
  )
  got = _quantize(
    jax.device_put(_values()), tensor_recipe=tensor, contracted=CONTRACTED
  )
  assert got.scale.shape == shape
  assert got.nbytes == 96 + 4 * int(np.prod(shape))


@pytest.mark.parametrize("granularity", ["tensor", "channel", "squares"])
@pytest.mark.parametrize("number_format", FORMATS)
@hypothesis.given(
  x=hypothesis_numpy.arrays(
    np.float32,
    (4, 8),
    elements=strategies.floats(-(2.0**100), 2.0**100, width=32).filter(
      # Subnormal float32 numbers are zeros to most hardware.
      lambda value: value == 0 or abs(value) > 2.0**-100
    ),
  )
)
@hypothesis.settings(max_examples=25)
def test_rounding_error_is_within_the_format(number_format, granularity, x):
  """By half a step of integers; of fp8 by half a unit in the last place."""
  tensor = recipe.TensorRecipe(number_format, **GRANULARITIES[granularity])
  got = _quantize(jax.device_put(x), tensor_recipe=tensor, contracted=(1,))
  off = np.abs(np.asarray(_dequantize(got), np.float64) - x)
  scale = np.zeros(x.shape)
  flat = iter(np.asarray(got.scale).ravel())
  for tile in testing.tiles(x, tensor, (1,)):
    scale[tile] = next(flat)
  # A sixteenth of a millionth for the multiplication before an integer cast.
  slack = 1 + 2.0**-22
  if number_format.is_integer:
    bound = scale * (0.5 + 2.0**-15)
  else:
    relative = 2.0 ** -(number_format.mantissa_bits + 1)
    smallest = 2.0**number_format.smallest_exponent
    bound = np.maximum(np.abs(x), scale * smallest) * relative * slack
  assert (off <= bound).all()


def test_a_history_gives_the_scale_of_the_steps_before():
  tensor = recipe.TensorRecipe(
    number_formats.FP8_E4M3, scaling=recipe.Delayed(history_length=3)
  )
  x = np.array([0.3, -1.0, 20.0], np.float32)
  got = _quantize(
    jax.device_put(x),
    tensor_recipe=tensor,
    history=jax.device_put(np.float32([1.0, 7.0, 0.0])),
  )
  # 7 / 448 is a power of two; 20 is beyond, and saturates.
  assert float(got.scale) == 7 / 448
  np.testing.assert_array_equal(
    _dequantize(got), testing.quantize(x, tensor, scale=np.float32(7 / 448))
  )
  assert float(np.asarray(_dequantize(got))[2]) == 7.0


@pytest.mark.parametrize(
  "history", [None, jax.device_put(np.float32([2.0, 1.0]))]
)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("number_format", FORMATS)
def test_non_finite_values_stay_visible(number_format, bad, history):
  scaling = recipe.Delayed(history_length=2) if history is not None else None
  tensor = recipe.TensorRecipe(
    number_format, scaling=scaling or recipe.Current()
  )
  got = _dequantize(
    _quantize(
      jax.device_put(np.float32([0.5, bad, 1.0])),
      tensor_recipe=tensor,
      history=history,
    )
  )
  assert not np.isfinite(np.asarray(got)[1])


def test_tiles_must_divide_what_they_do_not_cover():
  tensor = recipe.TensorRecipe(
    number_formats.INT8, recipe.Granularity.BLOCK, block=(6, 1)
  )
  # Shapes alone: nothing is computed.
  quantize = functools.partial(
    jax.eval_shape,
    functools.partial(
      quantized_array.quantize, tensor_recipe=tensor, contracted=(1,)
    ),
  )
  assert quantize(jnp.ones((2, 4))).scale.shape == (2, 1)
  with pytest.raises(
    ValueError, match=r"dimension 1 of \(2, 8\) has tiles of 6"
  ):
    quantize(jnp.ones((2, 8)))


def test_four_bits_are_stored_in_half_a_byte():
  tensor = recipe.TensorRecipe(
    number_formats.INT4, granularity=recipe.Granularity.CHANNEL
  )
  whole = _quantize(
    jax.device_put(_values()), tensor_recipe=tensor, contracted=(2,)
  )
  packed = whole.pack(1)
  assert packed.shape == whole.shape
  assert packed.packed_axis == -2
  assert packed.nbytes == 96 // 2 + 4 * 12
  np.testing.assert_array_equal(_dequantize(packed), _dequantize(whole))
  np.testing.assert_array_equal(packed.unpack().values, whole.values)
  with pytest.raises(ValueError, match=r"not packed yet, got int4 with .*=-2"):
    packed.pack()


def test_eight_bits_are_not_packed():
  whole = quantized_array.quantize(
    jnp.ones(2), recipe.TensorRecipe(number_formats.INT8)
  )
  with pytest.raises(ValueError, match=r"values of four bits .* got int8"):
    whole.pack()


def test_it_is_a_pytree_of_arrays_and_of_shapes():
  array = quantized_array.quantize(
    jnp.ones((4, 2)), recipe.TensorRecipe(number_formats.INT8)
  )
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), array)
  assert shapes.shape == (4, 2)
  assert shapes.nbytes == array.nbytes == 12


def _microscaled(x, name):
  """Values and scales [64, 3] by the definitions, in float64."""
  blocks = x.astype("f8").reshape(64 // (16 if name == "nvfp4" else 32), -1, 3)
  amax = np.abs(blocks).max(1, keepdims=True)
  if name == "nvfp4":
    whole = amax.max() / (448 * 6)
    scale = (amax / 6 / whole).astype(ml_dtypes.float8_e4m3fn).astype("f8")
    scale *= whole
  else:
    scale = 2.0 ** (np.floor(np.log2(amax)) - (8 if name == "mxfp8" else 2))
    as_byte = scale.astype(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(as_byte.astype("f8"), scale)
  form = (ml_dtypes.float8_e4m3fn, 448)
  form = form if name == "mxfp8" else (ml_dtypes.float4_e2m1fn, 6)
  scaled = np.clip(blocks / scale, -form[1], form[1]).astype("f4")
  return scaled.astype(form[0]).astype("f8").reshape(64, 3), scale[:, 0]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_microscaled_values_are_those_of_the_definitions(name):
  x = np.random.default_rng(3).standard_normal((64, 3)).astype("f4")
  x *= np.exp2(np.random.default_rng(4).integers(-9, 9, (64, 1)))
  got = _quantize(
    jax.device_put(x),
    tensor_recipe=recipes.find_recipe(name).rhs,
    contracted=(0,),
  )
  values, scale = _microscaled(x, name)
  np.testing.assert_allclose(got.scale, scale, rtol=1e-6)
  # In float32, a near tie has another neighbor.
  assert np.mean(np.asarray(got.values).astype("f8") != values) < 0.01
  saturated = np.abs(x).max() > np.abs(np.asarray(_dequantize(got))).max()
  assert saturated or name == "nvfp4"
  if got.format.bits == 4:
    packed = jax.jit(lambda a: a.pack(0))(got)
    np.testing.assert_array_equal(_dequantize(packed), _dequantize(got))
    assert packed.values.nbytes == x.size // 2
  blank = _quantize(
    jnp.zeros_like(x),
    tensor_recipe=recipes.find_recipe(name).rhs,
    contracted=(0,),
  )
  np.testing.assert_array_equal(_dequantize(blank), np.zeros_like(x))
  x[40, 1] = np.nan
  bad = _quantize(
    jax.device_put(x),
    tensor_recipe=recipes.find_recipe(name).rhs,
    contracted=(0,),
  )
  assert np.isnan(_dequantize(bad)[40, 1])


def test_scales_of_a_format_need_blocks_of_floats():
  e8m0 = recipe.ScaleFormat.E8M0
  with pytest.raises(ValueError, match=r"scale_format .*needs Granularity\.BL"):
    recipe.TensorRecipe(number_formats.FP8_E4M3, scale_format=e8m0)
  with pytest.raises(ValueError, match=r"a floating-point format, got .*int4"):
    recipe.TensorRecipe(
      number_formats.INT4,
      granularity=recipe.Granularity.BLOCK,
      block=(32, 1),
      scale_format=e8m0,
    )


STOCHASTIC = recipe.Rounding.STOCHASTIC
ROUNDED_FORMATS = [
  pytest.param(f, id=name) for name, f in number_formats.FORMATS.items()
]
_DRAWS = 20_000

_to_format = jax.jit(
  quantized_array.to_format, static_argnums=1, static_argnames="rounding"
)


@pytest.mark.parametrize("number_format", ROUNDED_FORMATS)
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


@pytest.mark.parametrize("number_format", ROUNDED_FORMATS)
def test_stochastic_rounding_saturates_and_keeps_non_finite_values(
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
    quantized_array.to_format(
      jnp.ones(2), number_formats.INT8, rounding=STOCHASTIC
    )


def _grid(number_format: number_formats.NumberFormat) -> np.ndarray:
  """All finite values of a format, ascending."""
  if number_format.is_integer:
    return np.arange(-number_format.largest, number_format.largest + 1)
  if number_format is number_formats.FP4_E2M1:
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return np.unique([-half, half])
  values = np.arange(256, dtype=np.uint8).view(number_format.dtype)
  values = values.astype(np.float64)
  return np.unique(values[np.isfinite(values)])
