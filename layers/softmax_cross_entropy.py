"""Negative log likelihood of target ids under softmax logits.

  nll = log(sum(exp(logits - m))) - (logits[target] - m),  m = max(logits)

One value per token: weights, sums and means belong to the loss aggregation.
Label smoothing and z-loss are not here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision


def softmax_cross_entropy(
  logits: Float[Array, "batch length vocab"],
  targets: Int[Array, "batch length"],
) -> Float[Array, "batch length"]:
  """Returns the negative log likelihood of each target, in nats.

  Args:
    logits: Unnormalized log probabilities, of any float dtype.
    targets: Ids in `[0, vocab)`. Any other id gives NaN: there is no "ignore"
      id, padding is what has weight zero.

  Returns:
    Values in at least float32.
  """
  logits = precision.widened(logits)
  # Before anything else, because the difference of two large numbers that are
  # rounded already would have an error of their size, not of its own.
  largest = jnp.max(logits, axis=-1, keepdims=True)
  logits -= jax.lax.stop_gradient(largest)
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  is_target = ids == targets[:, :, None]
  # A masked sum instead of a gather: over a split vocabulary it is a partial
  # sum per device, where a gather would collect the whole logits first.
  chosen = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
  nll = jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - chosen
  valid = (targets >= 0) & (targets < logits.shape[-1])
  return jnp.where(valid, nll, jnp.nan)
