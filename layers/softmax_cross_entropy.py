"""Cross entropy of target ids under softmax logits, one value per token.

With `m = max(logits)` and `s = sum(exp(logits - m))`:

  nll            = log(s) - (logits[target] - m)
  uniform_nll    = log(s) - mean(logits - m)
  log_normalizer = log(s) + m

`nll` is the negative log likelihood of the target. `uniform_nll` is the cross
entropy with a uniform distribution over the vocabulary, which label smoothing
mixes in. `log_normalizer` is log Z, which the z-loss keeps near zero.

Weights, sums and means belong to whoever aggregates (`softmax_loss`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import precision


class SoftmaxTerms(NamedTuple):
  """What losses are made of, per token, in at least float32 and nats.

  Attributes:
    nll: Negative log likelihood of the target.
    uniform_nll: Mean negative log likelihood of all ids.
    log_normalizer: Logarithm of the sum of the exponentials of the logits.
    hits: Whether the target has the largest logit, the first of equal ones.
  """

  nll: Float[Array, "batch length"]
  uniform_nll: Float[Array, "batch length"]
  log_normalizer: Float[Array, "batch length"]
  hits: Bool[Array, "batch length"]


def softmax_terms(
  logits: Float[Array, "batch length vocab"],
  targets: Int[Array, "batch length"],
) -> SoftmaxTerms:
  """Returns the terms of each token; those that are not used cost nothing.

  Args:
    logits: Unnormalized log probabilities, of any float dtype.
    targets: Ids in `[0, vocab)`. Any other id gives NaN: there is no "ignore"
      id, padding is what has weight zero.
  """
  logits = precision.widened(logits)
  vocab_size = logits.shape[-1]
  # Before anything else, because the difference of two large numbers that are
  # rounded already would have an error of their size, not of its own.
  largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
  logits -= largest[:, :, None]
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  chosen = _at_targets(logits, targets)
  # A question instead of an argmax, which over a split vocabulary would collect
  # the whole logits. In booleans, a quarter of the bytes where they are stored.
  beaten = jnp.any((logits == 0) & (ids < targets[:, :, None]), axis=-1)
  log_sum = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
  valid = (targets >= 0) & (targets < vocab_size)
  return SoftmaxTerms(
    nll=jnp.where(valid, log_sum - chosen, jnp.nan),
    uniform_nll=log_sum - jnp.mean(logits, axis=-1),
    log_normalizer=log_sum + largest,
    hits=(chosen == 0) & ~beaten & valid,
  )


@jax.custom_jvp
def _at_targets(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns the logit of each target, [B,T]."""
  kinds = jax.sharding.get_abstract_mesh().axis_types
  if jax.sharding.AxisType.Manual in kinds:
    # Inside of a `shard_map` over some mesh axes XLA's partitioner fails (a
    # check in its program) on a gather by rows that one of the others splits
    # from a vocabulary that another one splits.
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    picked = jnp.where(ids == targets[:, :, None], logits, 0)
    return jnp.sum(picked, axis=-1)
  return jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]


@_at_targets.defjvp
def _at_targets_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
  logits, targets = primals
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  # A mask instead of a scatter, because it becomes part of the loop that
  # computes the gradient of the logits.
  chosen = jnp.where(ids == targets[:, :, None], tangents[0], 0)
  return _at_targets(logits, targets), jnp.sum(chosen, axis=-1)


def softmax_cross_entropy(
  logits: Float[Array, "batch length vocab"],
  targets: Int[Array, "batch length"],
) -> Float[Array, "batch length"]:
  """Returns the negative log likelihood of each target, in nats.

  Args:
    logits: As those of `softmax_terms`.
    targets: As those of `softmax_terms`.

  Returns:
    Values in at least float32.
  """
  return softmax_terms(logits, targets).nll


def of_probabilities(
  logits: Float[Array, "batch length vocab"],
  probabilities: Float[Array, "batch length vocab"],
) -> Float[Array, "batch length"]:
  """Returns the cross entropy with target distributions, in nats.

  Args:
    logits: As those of `softmax_terms`.
    probabilities: Of each id, adding up to one; of a teacher, or several
      labels. No gradient passes through them.

  Returns:
    `-sum(probabilities * log_probabilities(logits))`, in at least float32.
  """
  log_p = log_probabilities(logits)
  wanted = jax.lax.stop_gradient(probabilities).astype(log_p.dtype)
  # Zero times minus infinity is zero here: what nobody wants costs nothing.
  return -jnp.sum(jnp.where(wanted > 0, wanted * log_p, 0), axis=-1)


def log_probabilities(
  logits: Float[Array, "*batch vocab"],
) -> Float[Array, "*batch vocab"]:
  """Returns the logarithms of the softmax, in at least float32.

  Args:
    logits: Of a model, which has capped them where it does.
  """
  return jax.nn.log_softmax(precision.widened(logits), axis=-1)
