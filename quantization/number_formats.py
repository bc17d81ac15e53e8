"""Number formats that values are quantized to: fp8 and small integers.

Casts to fp8 do not saturate by themselves (500 becomes NaN in e4m3, 1e6
becomes infinite in e5m2), so everything here goes through `saturating_cast`.
What was not finite before the cast stays visible after it: an overflow of the
model must not turn into a large but ordinary number.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class NumberFormat:
  """A set of numbers that fit into a byte or less.

  Attributes:
    name: As in messages and tables.
    bits: Width of a value where it is stored packed.
    dtype: Of the arrays that hold the values. Integers of four bits are held,
      and multiplied, as int8: XLA has no product of int4 on CPU and GPU.
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

FORMATS = {f.name: f for f in (INT4, INT8, FP8_E4M3, FP8_E5M2)}


def saturating_cast(x: jax.Array, number_format: NumberFormat) -> jax.Array:
  """Returns the nearest values of a format; ties go to the even one.

  Finite values beyond the largest become the largest. NaN and infinite values
  become NaN in fp8. Integers cannot show them: there NaN becomes 0 and
  infinity the largest value, and it is the scale that has to be NaN (as
  `scaling.scale_of` makes it).

  Args:
    x: float32 values, scaled to the range of the format.
    number_format: The format.

  Returns:
    An array of the dtype of the format.
  """
  largest = number_format.largest
  clipped = jnp.clip(x, -largest, largest)
  if number_format.is_integer:
    whole = jnp.where(jnp.isnan(x), 0, jnp.round(clipped))
    return whole.astype(number_format.dtype)
  visible = jnp.where(jnp.isinf(x), jnp.nan, clipped)
  return visible.astype(number_format.dtype)


def pack(values: jax.Array, *, axis: int = -1) -> jax.Array:
  """Returns int8, half as long along an axis.

  Args:
    values: int8, each from -8 to 7.
    axis: Along which neighbours share a byte.

  Raises:
    ValueError: The values are not int8, or of an odd number along the axis.
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
  """Returns the int8 values that `pack` was given.

  Args:
    packed: As `pack` returned it.
    axis: Of `pack`.
  """
  axis %= packed.ndim
  # Shifts of signed integers keep the sign.
  pairs = jnp.stack([(packed << 4) >> 4, packed >> 4], axis + 1)
  shape = list(packed.shape)
  shape[axis] *= 2
  return pairs.reshape(shape)
