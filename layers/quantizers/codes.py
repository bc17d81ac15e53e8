"""Quantizer outputs and codebook usage.

A quantizer maps each vector to ids and to the vector of its code. The gradient
passes straight through: that of the result is that of the input (Bengio et al.
2013, https://arxiv.org/abs/1308.3432).
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import precision

# Added to probabilities, before the logarithm.
_TINY = 1e-30


class Codes(NamedTuple):
  """Quantized vectors.

  Attributes:
    values: Vectors of the codes [B,T,D], zero where masked; the gradient is
      that of the input.
    ids: int32 [B,T,G], one for each group; zero where masked.
    loss: Mean over real positions of the quantizer's loss,
      float32; zero if there is nothing to train.
  """

  values: jax.Array
  ids: jax.Array
  loss: jax.Array


@runtime_checkable
class HasCodes(Protocol):
  """A quantizer whose ids, of each group, are below a number."""

  @property
  def num_codes(self) -> int:
    """Number of codes of a group."""
    ...


class Usage(NamedTuple):
  """Statistics of the ids of a batch, each averaged over groups, float32.

  Attributes:
    entropy: Entropy of the ids, in nats.
    perplexity: exp(entropy): as many codes used equally often have it.
    coverage: Share of the codes that occur.
  """

  entropy: jax.Array
  perplexity: jax.Array
  coverage: jax.Array


def usage(
  ids: Int[Array, "batch length groups"],
  mask: Bool[Array, "batch length"] | None = None,
  *,
  num_codes: int,
) -> Usage:
  """Returns how evenly `num_codes` codes are used at real positions."""
  weights = (
    jnp.ones(ids.shape[:2]) if mask is None else mask.astype(jnp.float32)
  )
  hits = jax.nn.one_hot(ids, num_codes, dtype=jnp.float32)
  counts = jnp.einsum("BT,BTGK->GK", weights, hits)
  shares = counts / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
  of_group = entropy(shares)
  return Usage(
    entropy=jnp.mean(of_group),
    perplexity=jnp.mean(jnp.exp(of_group)),
    coverage=jnp.mean((counts > 0).astype(jnp.float32)),
  )


def entropy(shares: Float[Array, "*batch codes"]) -> Float[Array, "*batch"]:
  """Returns the entropy of distributions over the last axis, in nats."""
  return -jnp.sum(shares * jnp.log(jnp.maximum(shares, _TINY)), axis=-1)


def straight_through(
  x: Float[Array, "*shape"], values: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Returns `values` with the gradient of `x`."""
  return x + jax.lax.stop_gradient(values - x)


def finish(
  x: Float[Array, "batch length embed"],
  values: Float[Array, "batch length embed"],
  ids: Int[Array, "batch length groups"],
  losses: Float[Array, "batch length"],
  mask: Bool[Array, "batch length"] | None,
) -> Codes:
  """Returns codes whose `losses` are averaged over real positions.

  `x` is finite, also where it is masked.
  """
  values = straight_through(x, values.astype(x.dtype))
  if mask is None:
    return Codes(values, ids, jnp.mean(losses))
  count = jnp.maximum(jnp.sum(mask, dtype=losses.dtype), 1)
  return Codes(
    jnp.where(mask[..., None], values, 0),
    jnp.where(mask[..., None], ids, 0),
    jnp.sum(jnp.where(mask, losses, 0)) / count,
  )


def clear(x: jax.Array, mask: jax.Array | None) -> jax.Array:
  """Returns `x` in at least float32, zero where it is masked."""
  x = precision.widen(x)
  return x if mask is None else jnp.where(mask[..., None], x, 0)
