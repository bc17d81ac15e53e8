"""Tests of number formats and saturating casts."""

import dataclasses

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxon.quantization import number_formats

FP8 = [
  pytest.param(number_formats.FP8_E4M3, ml_dtypes.float8_e4m3fn, id="e4m3"),
  pytest.param(number_formats.FP8_E5M2, ml_dtypes.float8_e5m2, id="e5m2"),
]
INTEGERS = [
  pytest.param(number_formats.INT8, id="int8"),
  pytest.param(number_formats.INT4, id="int4"),
]

_cast = jax.jit(number_formats.saturating_cast, static_argnums=1)
# One shape, so that the cast is compiled once for each format.
_COUNT = 64
FLOATS = strategies.lists(
  strategies.floats(width=32, allow_nan=False, allow_infinity=False),
  min_size=_COUNT,
  max_size=_COUNT,
)


FP4 = pytest.param(number_formats.FP4_E2M1, ml_dtypes.float4_e2m1fn, id="e2m1")


@pytest.mark.parametrize(("number_format", "dtype"), [*FP8, FP4])
def test_every_bfloat16_is_cast_as_ml_dtypes_does(number_format, dtype):
  x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  x = x.astype(np.float32)
  got = np.asarray(_cast(jax.device_put(x), number_format)).astype(np.float32)
  expected = x.copy()
  finite = np.isfinite(x)
  expected[~finite] = np.nan
  largest = float(ml_dtypes.finfo(dtype).max)
  clipped = np.clip(expected[finite], -largest, largest)
  expected[finite] = clipped.astype(dtype).astype(np.float32)
  np.testing.assert_array_equal(got, expected)


def _ties(dtype):
  """All values of a dtype, the middles between them, and their neighbors."""
  every = np.arange(256, dtype=np.uint8)
  if dtype is ml_dtypes.float4_e2m1fn:
    every = every[:16]
  values = np.unique(every.view(dtype).astype(np.float32))
  values = values[np.isfinite(values)]
  x = np.concatenate([values, (values[1:] + values[:-1]) / 2])
  below, above = (np.nextafter(x, np.float32(to)) for to in (-np.inf, np.inf))
  return np.concatenate([x, -x, below, above, 4 * values])


@pytest.mark.parametrize(("number_format", "dtype"), [*FP8, FP4])
def test_ties_are_cast_as_ml_dtypes_does(number_format, dtype):
  x = _ties(dtype)
  got = np.asarray(_cast(jax.device_put(x), number_format)).astype(np.float32)
  largest = number_format.largest
  expected = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
  np.testing.assert_array_equal(got, expected)
  np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize(("number_format", "dtype"), [*FP8, FP4])
def test_values_are_rounded_before_they_are_cast(number_format, dtype):
  # For GPUs, XLA drops a cast to fp8 that is cast back. So does this format.
  wide = dataclasses.replace(number_format, dtype=jnp.dtype(jnp.float32))
  rng = np.random.default_rng(0)
  some = rng.normal(size=4096) * 2.0 ** rng.integers(-20, 20, 4096)
  x = jax.device_put(
    np.float32([*_ties(dtype), *some, np.nan, np.inf, -np.inf])
  )
  got = np.asarray(_cast(x, wide))
  expected = np.asarray(_cast(x, number_format)).astype(np.float32)
  np.testing.assert_array_equal(got, expected)
  np.testing.assert_array_equal(np.isnan(got[-3:]), True)


@pytest.mark.parametrize(("number_format", "dtype"), FP8)
def test_formats_match_ml_dtypes(number_format, dtype):
  info = ml_dtypes.finfo(dtype)
  assert number_format.dtype == dtype
  assert number_format.largest == float(info.max)
  assert number_format.mantissa_bits == info.nmant
  assert number_format.smallest_exponent == info.minexp


def test_fp4_has_the_bits_of_ml_dtypes():
  codes = np.arange(16, dtype=np.uint8)
  values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
  e2m1 = number_formats.FP4_E2M1
  stored = _cast(jax.device_put(values), e2m1)
  assert stored.dtype == e2m1.dtype == jnp.float8_e4m3fn
  assert e2m1.largest == values.max()
  encode = jax.jit(number_formats.encode, static_argnums=1)
  decode = jax.jit(number_formats.decode, static_argnums=1)
  made = np.asarray(encode(stored, e2m1))
  assert made.dtype == np.int8
  np.testing.assert_array_equal(made & 0xF, codes)
  back = np.asarray(decode(made, e2m1)).astype(np.float32)
  np.testing.assert_array_equal(back, values)
  np.testing.assert_array_equal(np.signbit(back), np.signbit(values))


def test_nf4_is_the_nearest_entry_of_its_table():
  nf4 = number_formats.NF4
  table = np.asarray(nf4.table)
  assert len(table) == 16
  assert np.all(np.diff(table) > 0)
  x = np.float32([*np.linspace(-1.2, 1.2, 301), *table, np.nan, np.inf])
  got = np.asarray(_cast(jax.device_put(x), nf4))
  off = np.abs(np.clip(x[:-2, None].astype("f8"), -1, 1) - table)
  np.testing.assert_allclose(
    np.abs(got[:-2] - np.clip(x[:-2], -1, 1)), off.min(axis=1), atol=1e-7
  )
  assert np.isnan(got[-2:]).all()
  codes = number_formats.encode(jax.device_put(np.float32(table)), nf4)
  np.testing.assert_array_equal(codes, np.arange(-8, 8))
  np.testing.assert_array_equal(
    number_formats.decode(codes, nf4), np.float32(table)
  )
  with pytest.raises(ValueError, match=r"cannot be rounded at random to nf4"):
    number_formats.find_step(jnp.ones(2), nf4)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("number_format", "dtype"), [*FP8, FP4])
@hypothesis.given(values=FLOATS)
@hypothesis.settings(max_examples=50)
def test_fp8_error_is_at_most_half_an_ulp(number_format, dtype, values):
  x = np.array(values, np.float64)
  got = np.asarray(_cast(jax.device_put(np.float32(x)), number_format))
  inside = np.clip(x, -number_format.largest, number_format.largest)
  _, exponent = np.frexp(inside)
  # Below the smallest normal value the distance stays what it is there.
  exponent = np.maximum(exponent - 1, number_format.smallest_exponent)
  half = 2.0 ** (exponent - number_format.mantissa_bits - 1)
  assert (np.abs(got.astype(np.float64) - inside) <= half).all()


@pytest.mark.parametrize("number_format", INTEGERS)
@hypothesis.given(values=FLOATS)
@hypothesis.settings(max_examples=50)
def test_integer_error_is_at_most_half(number_format, values):
  x = np.array(values, np.float64)
  got = np.asarray(_cast(jax.device_put(np.float32(x)), number_format))
  inside = np.clip(x, -number_format.largest, number_format.largest)
  assert (np.abs(got - inside) <= 0.5).all()


@pytest.mark.parametrize("number_format", INTEGERS)
def test_integers_saturate_on_both_sides_alike(number_format):
  x = jax.device_put(
    np.float32([1e9, -1e9, jnp.inf, -jnp.inf, jnp.nan, 2.5, -2.5])
  )
  largest = int(number_format.largest)
  expected = [largest, -largest, largest, -largest, 0, 2, -2]
  np.testing.assert_array_equal(_cast(x, number_format), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unpack_inverts_pack(axis):
  values = jax.device_put(
    np.asarray(np.random.default_rng(0).integers(-8, 8, (16, 4, 6)), jnp.int8)
  )
  packed = jax.jit(lambda x: number_formats.pack(x, axis=axis))(values)
  assert packed.dtype == jnp.int8
  assert packed.size * 2 == values.size
  back = jax.jit(lambda x: number_formats.unpack(x, axis=axis))(packed)
  np.testing.assert_array_equal(back, values)


def test_the_even_neighbour_is_in_the_lower_bits():
  packed = number_formats.pack(
    jax.device_put(np.asarray([1, 2, -1, 7], jnp.int8))
  )
  np.testing.assert_array_equal(np.asarray(packed).view(np.uint8), [0x21, 0x7F])


def test_a_part_of_the_bytes_is_a_part_of_the_values():
  values = np.arange(-8, 8, dtype=np.int8)
  part = jax.jit(lambda x: number_formats.unpack(number_formats.pack(x)[2:6]))(
    values
  )
  np.testing.assert_array_equal(part, values[4:12])


def test_rejects_an_odd_number():
  with pytest.raises(
    ValueError, match=r"must be even; dimension 1 of \(2, 3\)"
  ):
    number_formats.pack(jnp.zeros((2, 3), jnp.int8), axis=1)


def test_rejects_other_dtypes():
  with pytest.raises(ValueError, match=r"packed from int8, got int32"):
    number_formats.pack(jnp.zeros(2, jnp.int32))
