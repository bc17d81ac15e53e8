"""Initializers of attention as GShard has them: Gaussian, by the true fans.

Standard deviations are `(D H) ** -0.5` for queries, `D ** -0.5` for keys and
values, and `(N H) ** -0.5` for the output. Lepikhin et al. 2020,
https://arxiv.org/abs/2006.16668. What queries are short of is what other
layers scale logits by, which GShard does not:

  GroupedQueryAttention(
    ...,
    projections=SeparateProjections(query_init=gshard_init.query),
    projection_init=gshard_init.key_value,
    output_init=gshard_init.output,
    logit_scale=1.0,
  )

Letters: D embed, N heads, H head_dim.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def query(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Returns the kernel [D, N, H] of queries."""
  embed_dim, _, head_dim = shape
  return _normal(key, shape, dtype, embed_dim * head_dim)


def key_value(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Returns the kernel [D, K, H] of keys or of values."""
  embed_dim, _, _ = shape
  return _normal(key, shape, dtype, embed_dim)


def output(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Returns the kernel [N, H, D] of the output."""
  num_heads, head_dim, _ = shape
  return _normal(key, shape, dtype, num_heads * head_dim)


def _normal(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike, terms: int
) -> jax.Array:
  return jax.random.normal(key, tuple(shape), dtype) * terms**-0.5
