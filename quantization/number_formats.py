"""Number formats for quantization: fp8, fp4, NF4 and small integers.

Plain casts to fp8 do not saturate (500 becomes NaN in e4m3, 1e6 becomes
infinite in e5m2); `saturating_cast` does. It keeps non-finite values
non-finite in fp8, so that an overflow of the model stays visible.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class NumberFormat:
  """A number format of at most 8 bits.

  Attributes:
    name: Name in messages and tables.
    bits: Width of a packed value.
    dtype: Dtype of arrays. int4 values are stored and multiplied as int8,
      because XLA has no int4 matmul on CPU and GPU, fp4 values as e4m3, which
      has all of them, and NF4 values as float32.
    largest: Largest finite value; the smallest is its negative.
    mantissa_bits: Stored bits of the significand; 0 for integers.
    smallest_exponent: Binary exponent of the smallest normal value.
    table: All values, increasing, of a format that is neither integers nor a
      floating-point format.
  """

  name: str
  bits: int
  dtype: jnp.dtype
  largest: float
  mantissa_bits: int = 0
  smallest_exponent: int = 0
  table: tuple[float, ...] = ()

  @property
  def is_integer(self) -> bool:
    """Whether the values are integers."""
    return jnp.issubdtype(self.dtype, jnp.integer)


INT4 = NumberFormat("int4", 4, jnp.dtype(jnp.int8), 7.0)
INT8 = NumberFormat("int8", 8, jnp.dtype(jnp.int8), 127.0)
FP8_E4M3 = NumberFormat(
  "fp8_e4m3", 8, jnp.dtype(jnp.float8_e4m3fn), 448.0, 3, -6
)
FP8_E5M2 = NumberFormat(
  "fp8_e5m2", 8, jnp.dtype(jnp.float8_e5m2), 57344.0, 2, -14
)

# Its values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
FP4_E2M1 = NumberFormat("fp4_e2m1", 4, jnp.dtype(jnp.float8_e4m3fn), 6.0, 1, 0)
# 4-bit NormalFloat (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314,
# appendix E): quantiles of a normal distribution, for blocks of largest 1.
NF4 = NumberFormat(
  "nf4",
  4,
  jnp.dtype(jnp.float32),
  1.0,
  table=(
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
  ),
)
# Weights that are pruned, not quantized.
FLOAT32 = NumberFormat(
  "float32", 32, jnp.dtype(jnp.float32), 3.4028234663852886e38, 23, -126
)

FORMATS = {f.name: f for f in (INT4, INT8, FP8_E4M3, FP8_E5M2, FP4_E2M1)}

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def saturating_cast(x: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Returns the nearest values of a format, in its dtype.

  Ties are rounded to even, and to the smaller value of a table.

  Finite values saturate at the largest value. NaN and infinity become NaN in
  fp8 and fp4. In integer formats, NaN becomes 0 and infinity the largest value,
  and the scale must be NaN (see `scaling.make_scale`).

  Args:
    x: float32 values, scaled to the range of the format.
    number_format: The format.
  """
  largest = number_format.largest
  is_rounded = not (number_format.is_integer or number_format.table)
  rounded = _round(x, number_format) if is_rounded else x
  clipped = jnp.clip(rounded, -largest, largest)
  if number_format.is_integer:
    whole = jnp.where(jnp.isnan(x), 0, jnp.round(clipped))
    return whole.astype(number_format.dtype)
  if number_format.table:
    nearest = decode(encode(clipped, number_format), number_format)
    return jnp.where(jnp.isfinite(x), nearest, jnp.nan)
  return clipped.astype(number_format.dtype)


def _round(x: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Rounds to the nearest values of a floating-point format, in float32.

  A cast to the format does the same, but a compiler may undo it: for GPUs, XLA
  drops a cast to a narrower dtype that is cast back
  (`xla_allow_excess_precision`), and with it the rounding of values that are
  multiplied in bfloat16.

  Values beyond the largest of the format are rounded as if there were more
  exponents; infinity becomes NaN.

  Args:
    x: float32 values.
    number_format: The format; neither of integers nor with a table.
  """
  bits = _power_bits(x, number_format)
  power = jax.lax.bitcast_convert_type(bits, jnp.float32)
  # 2 / power, and 0 for infinity, because infinity times 0 is NaN.
  inverse = jax.lax.bitcast_convert_type((255 << 23) - bits, jnp.float32)
  mantissa_bits = number_format.mantissa_bits
  # Counted in steps. Products with powers of two are exact.
  steps = jnp.round(x * inverse * 2.0 ** (mantissa_bits - 1))
  return steps * 2.0**-mantissa_bits * power


def find_step(x: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Returns the distance between neighbors of the format around `x`.

  Raises:
    ValueError: The format has a table: its steps are not powers of two.
  """
  if number_format.table:
    raise ValueError(
      f"Values cannot be rounded at random to {number_format.name}, whose steps"
      " are not powers of two; use Rounding.NEAREST."
    )
  if number_format.is_integer:
    return jnp.ones((), x.dtype)
  power = jax.lax.bitcast_convert_type(
    _power_bits(x, number_format), jnp.float32
  )
  return power * 2.0**-number_format.mantissa_bits


def _power_bits(x: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Returns the bits of the largest powers of two up to |x|.

  They are those of the smallest normal value at least, and of infinity for
  infinity and NaN.
  """
  # Of the exponent alone.
  bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
  return jnp.maximum(bits, (number_format.smallest_exponent + 127) << 23)


def encode(values: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Returns values of four bits as int8 from -8 to 7, to be packed.

  Integers are unchanged; fp4 values become their bits: sign, exponent,
  mantissa; those of a table the index of the nearest entry, less 8.
  """
  if number_format.is_integer:
    return values
  wide = values.astype(jnp.float32)
  if number_format.table:
    table = np.asarray(number_format.table, np.float32)
    middles = jnp.asarray((table[1:] + table[:-1]) / 2)
    return (jnp.searchsorted(middles, wide) - 8).astype(jnp.int8)
  # Bits without a sign count the smaller magnitudes.
  code = sum((jnp.abs(wide) >= x).astype(jnp.int8) for x in _MAGNITUDES[1:])
  return jnp.where(jnp.signbit(wide), code - jnp.int8(8), code)


def decode(codes: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Inverts `encode`."""
  if number_format.is_integer:
    return codes
  if number_format.table:
    table = jnp.asarray(number_format.table, number_format.dtype)
    return table.at[codes + jnp.int8(8)].get(mode="promise_in_bounds")
  exponent, mantissa = (codes >> 1) & 3, codes & 1
  # Twice the value is an integer.
  doubled = jnp.where(
    exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0)
  )
  size = doubled.astype(jnp.float32) / 2
  return jnp.where(codes < 0, -size, size).astype(number_format.dtype)


def pack(values: jax.Array, *, axis: int = -1) -> jax.Array:
  """Packs two 4-bit values per byte.

  Args:
    values: int8, each from -8 to 7.
    axis: Axis along which neighbours share a byte.

  Returns:
    int8, half as long along `axis`.

  Raises:
    ValueError: The values are not int8, or their number along `axis` is odd.
  """
  if values.dtype != jnp.int8:
    raise ValueError(
      f"Values of four bits are packed from int8, got {values.dtype}."
    )
  if values.shape[axis] % 2:
    raise ValueError(
      "Two values share a byte, so their number must be even; dimension "
      f"{axis} of {values.shape} is odd."
    )
  low, high = (
    jax.lax.slice_in_dim(values, start, None, 2, axis) for start in (0, 1)
  )
  return (high << 4) | (low & 0xF)


def unpack(packed: jax.Array, *, axis: int = -1) -> jax.Array:
  """Inverts `pack`."""
  axis %= packed.ndim
  # Shifts of signed integers keep the sign.
  pairs = jnp.stack([(packed << 4) >> 4, packed >> 4], axis + 1)
  shape = list(packed.shape)
  shape[axis] *= 2
  return pairs.reshape(shape)
