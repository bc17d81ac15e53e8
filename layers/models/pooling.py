"""One vector of each row, from the states of its tokens.

Functions `(x [B,T,D], segment_ids [B,T]) -> [B,D]`, parts of a classifier. A
row holds one text; segment 0 is padding, at its end. A row of padding alone
gives zeros by `mean`, and a state of padding by the others.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision

Pooling = Callable[[jax.Array, jax.Array], jax.Array]


def first_token(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch embed"]:
  """Returns the state of the first token, as BERT does."""
  del segment_ids
  return x[:, 0]


def last_token(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch embed"]:
  """Returns the state of the last token, which has seen a text in order."""
  last = jnp.sum((segment_ids != 0).astype(jnp.int32), axis=1) - 1
  at = jnp.maximum(last, 0)[:, None, None]
  return jnp.take_along_axis(x, at, axis=1)[:, 0]


def mean(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch embed"]:
  """Returns the mean of the states of all tokens."""
  inside = (segment_ids != 0)[:, :, None]
  # float32 because the sum over a long text loses digits in bfloat16.
  total = jnp.sum(jnp.where(inside, precision.widened(x), 0), axis=1)
  count = jnp.sum(inside.astype(total.dtype), axis=1)
  return (total / jnp.maximum(count, 1)).astype(x.dtype)
