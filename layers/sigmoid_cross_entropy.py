"""Sigmoid cross entropy: each class is a yes-or-no question of its own.

With targets `p`, the probability that the class holds,

  nll = -p * log(sigmoid(x)) - (1 - p) * log(1 - sigmoid(x))
      = max(x, 0) - p * x + log(1 + exp(-abs(x)))

Several classes, or none, may hold at once. The logits are those of any head or
`linear.Linear`, after its soft cap.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import precision


def sigmoid_cross_entropy(
  logits: Float[Array, "*batch classes"],
  targets: Float[Array, "*batch classes"],
) -> Float[Array, "*batch classes"]:
  """Returns the cross entropy of each class, in nats, at least float32.

  Args:
    logits: Logarithms of the odds, of any float dtype.
    targets: Probabilities, from 0 to 1; one-hot rows where classes are ids.
  """
  logits = precision.widened(logits)
  targets = targets.astype(logits.dtype)
  # The form that overflows for no logit. It has no corner at zero, as long as
  # both parts are of the same side there; `abs` and `relu` are not.
  is_positive = logits >= 0
  size = jnp.where(is_positive, logits, -logits)
  largest = jnp.where(is_positive, logits, 0)
  return largest - targets * logits + jnp.log1p(jnp.exp(-size))


def weighted_loss(
  logits: Float[Array, "*batch classes"],
  targets: Float[Array, "*batch classes"],
  weights: Float[Array, "*batch weighted"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns the weighted sum over classes and examples, and the sum of weights.

  Args:
    logits: As those of `sigmoid_cross_entropy`.
    targets: As those of `sigmoid_cross_entropy`.
    weights: Of each class of each example, or one for each example, which then
      counts once, not once for each class.

  Raises:
    ValueError: The last axis of the weights is neither one nor all classes.
  """
  if weights.shape[-1] not in (1, logits.shape[-1]):
    raise ValueError(
      "Weights must have one entry for each of the "
      f"{logits.shape[-1]} classes, or one for all, got the shape "
      f"{weights.shape}."
    )
  losses = sigmoid_cross_entropy(logits, targets)
  weights = weights.astype(losses.dtype)
  return jnp.sum(losses * weights), jnp.sum(weights)
