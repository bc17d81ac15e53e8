"""Losses of pairs, such as images and their texts, among all of a batch.

Logits [B,B] compare each image (rows) with each text (columns); the pairs are
on the diagonal. Sums are over the whole batch, also where devices hold slices
of it.

  softmax:  -(log softmax_j(l_ij) + log softmax_i(l_ij)) / 2   at j = i
  sigmoid:  -sum_j log sigmoid(z_ij l_ij),   z_ij = 1 if j = i, else -1

Radford et al. 2021 (CLIP), https://arxiv.org/abs/2103.00020; Zhai et al. 2023
(SigLIP), https://arxiv.org/abs/2303.15343.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import precision

# `(logits [B,B], weights [B]) -> [B]`, the loss of each pair; pairs with weight
# zero (padding) do not count as negatives of others.
ContrastiveLoss = Callable[[jax.Array, jax.Array], jax.Array]


def softmax(
  logits: Float[Array, "batch batch"], weights: Float[Array, " batch"]
) -> Float[Array, " batch"]:
  """Returns the loss of CLIP (symmetric InfoNCE) of each pair."""
  logits = precision.widen(logits)
  is_pair = jnp.eye(len(logits), dtype=bool)
  # The pair of padding counts, so that its loss, of weight zero, is finite.
  real = weights > 0
  own = jnp.sum(jnp.where(is_pair, logits, 0), axis=1)
  rows = jnp.where(real[None, :] | is_pair, logits, -jnp.inf)
  columns = jnp.where(real[:, None] | is_pair, logits, -jnp.inf)
  normalizers = (
    jax.nn.logsumexp(rows, axis=1),
    jax.nn.logsumexp(columns, axis=0),
  )
  return (normalizers[0] + normalizers[1]) / 2 - own


def sigmoid(
  logits: Float[Array, "batch batch"], weights: Float[Array, " batch"]
) -> Float[Array, " batch"]:
  """Returns the loss of SigLIP of each image, the sum over texts."""
  logits = precision.widen(logits)
  is_pair = jnp.eye(len(logits), dtype=bool)
  counts = (weights > 0)[None, :] | is_pair
  nll = jax.nn.softplus(jnp.where(is_pair, -logits, logits))
  return jnp.sum(jnp.where(counts, nll, 0), axis=1)
