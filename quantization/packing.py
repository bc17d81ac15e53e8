"""Two integers of four bits in a byte, for storage.

Neighbours share a byte: the even one is in the lower four bits. So a part of a
packed array, cut at whole bytes, is the same part of the values, and sharding
needs no rearrangement.
"""

import jax
import jax.numpy as jnp


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
