"""Number formats for quantization: fp8 and small integers.

Plain casts to fp8 do not saturate (500 becomes NaN in e4m3, 1e6 becomes
infinite in e5m2); `saturating_cast` does. It keeps non-finite values
non-finite in fp8, so that an overflow of the model stays visible.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class NumberFormat:
  """A number format of at most 8 bits.

  Attributes:
    name: Name in messages and tables.
    bits: Width of a packed value.
    dtype: Dtype of arrays. int4 values are stored and multiplied as int8,
      because XLA has no int4 matmul on CPU and GPU.
    largest: Largest finite value; the smallest is its negative.
    mantissa_bits: Stored bits of the significand; 0 for integers.
    smallest_exponent: Binary exponent of the smallest normal value.
  """

  name: str
  bits: int
  dtype: jnp.dtype
  largest: float
  mantissa_bits: int = 0
  smallest_exponent: int = 0

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

# Weights that are pruned, not quantized.
FLOAT32 = NumberFormat(
  "float32", 32, jnp.dtype(jnp.float32), 3.4028234663852886e38, 23, -126
)

FORMATS = {f.name: f for f in (INT4, INT8, FP8_E4M3, FP8_E5M2)}


def saturating_cast(x: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Returns the nearest values of a format, in its dtype; ties to even.

  Finite values saturate at the largest value. NaN and infinity become NaN in
  fp8. In integer formats, NaN becomes 0 and infinity the largest value, and the
  scale must be NaN (see `scaling.scale_of`).

  Args:
    x: float32 values, scaled to the range of the format.
    number_format: The format.
  """
  largest = number_format.largest
  clipped = jnp.clip(x, -largest, largest)
  if number_format.is_integer:
    whole = jnp.where(jnp.isnan(x), 0, jnp.round(clipped))
    return whole.astype(number_format.dtype)
  visible = jnp.where(jnp.isinf(x), jnp.nan, clipped)
  return visible.astype(number_format.dtype)


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
