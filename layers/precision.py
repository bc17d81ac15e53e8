"""The dtype of computations that bfloat16 would spoil.

Softmax, norm statistics, rotary angles and losses sum many small terms, or
subtract large ones; they run in float32 whatever the dtype around them.
float64 stays float64, so that tests can use finite differences.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
  """Returns float32, or `dtype` itself where that is wider."""
  narrow = jnp.finfo(dtype).bits < 32
  return jnp.dtype(jnp.float32 if narrow else dtype)


def widened(x: jax.Array) -> jax.Array:
  """Returns `x` in at least float32."""
  return x.astype(at_least_float32(x.dtype))
