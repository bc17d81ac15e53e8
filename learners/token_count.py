"""A count of all tokens that a run was trained on, exact to 2**60.

Neither float32 (exact to 2**24) nor int32 is enough, and wider types are off.
So a count is two int32 numbers [high, low] in base 2**30.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BITS: Final = 30


def zero() -> Int[Array, "2"]:
  """Returns the count before the first step."""
  return jnp.zeros((2,), jnp.int32)


def added(count: Int[Array, "2"], tokens: Float[Array, ""]) -> Int[Array, "2"]:
  """Returns the count after a step.

  Args:
    count: Before the step.
    tokens: Those of the step, the weight of its loss; less than 2**30. It is
      rounded to a whole number.
  """
  low = count[1] + jnp.round(tokens).astype(jnp.int32)
  carry = low >> _BITS
  return jnp.stack([count[0] + carry, low - (carry << _BITS)])


def as_float(count: Int[Array, "2"]) -> Float[Array, ""]:
  """Returns the count as float32, to 7 digits."""
  high, low = count[0].astype(jnp.float32), count[1].astype(jnp.float32)
  return high * jnp.float32(2**_BITS) + low


def as_int(count: jax.Array) -> int:
  """Returns the exact count, on the host."""
  return (int(count[0]) << _BITS) + int(count[1])
