"""Softmax and sigmoid cross entropy, one value per token or class.

Softmax, with `m = max(logits)` and `s = sum(exp(logits - m))`:

  nll            = log(s) - (logits[target] - m)
  uniform_nll    = log(s) - mean(logits - m)
  log_normalizer = log(s) + m

`nll` is the negative log likelihood of the target. `uniform_nll` is the cross
entropy with a uniform distribution over the vocabulary, which label smoothing
mixes in. `log_normalizer` is log Z, which the z-loss keeps near zero.

Sigmoid, a binary question for each class, with target probabilities `p`:

  -p * log(sigmoid(x)) - (1 - p) * log(1 - sigmoid(x))

`softmax_loss` aggregates these over a batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import precision
from paxon.sharding import target


class SoftmaxTerms(NamedTuple):
  """Terms of a softmax loss per token, in at least float32 and nats.

  Attributes:
    nll: Negative log likelihood of the target.
    uniform_nll: Mean negative log likelihood of all ids.
    log_normalizer: Logarithm of the sum of the exponentials of the logits.
    hits: Whether the target is the argmax (the first of equal logits).
  """

  nll: Float[Array, "batch length"]
  uniform_nll: Float[Array, "batch length"]
  log_normalizer: Float[Array, "batch length"]
  hits: Bool[Array, "batch length"]


def softmax_terms(
  logits: Float[Array, "batch length vocab"],
  targets: Int[Array, "batch length"],
) -> SoftmaxTerms:
  """Returns the terms of each token; unused ones are dropped by XLA.

  Args:
    logits: Unnormalized log probabilities, of any float dtype.
    targets: Ids in `[0, vocab)`. Any other id gives NaN: there is no "ignore"
      id, padding has weight zero.
  """
  logits = precision.widen(logits)
  vocab_size = logits.shape[-1]
  # First of all: later differences of large numbers would cancel.
  logits, largest, log_sum = _shift(logits)
  ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
  chosen = _at_targets(logits, targets)
  # Not an argmax, which over a sharded vocabulary would gather all logits. The
  # target is left out: its logit may be computed twice, with other rounding, so
  # it is not compared with itself, nor with the maximum.
  at, least = targets[:, :, None], chosen[:, :, None]
  rivals = jnp.where(ids < at, logits >= least, logits > least)
  beaten = jnp.any(rivals & (ids != at), axis=-1)
  valid = (targets >= 0) & (targets < vocab_size)
  return SoftmaxTerms(
    nll=jnp.where(valid, log_sum - chosen, jnp.nan),
    uniform_nll=log_sum - jnp.mean(logits, axis=-1),
    log_normalizer=log_sum + largest,
    hits=~beaten & ~jnp.isnan(chosen) & valid,
  )


def _shift(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns `x = logits - m`, their maximum m, and `log(sum(exp(x)))`."""
  if target.is_gpu():
    largest, log_sum = _max_and_log_sum(logits)
    return logits - largest[:, :, None], largest, log_sum
  largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
  logits -= largest[:, :, None]
  return logits, largest, jnp.log(jnp.sum(jnp.exp(logits), axis=-1))


@jax.custom_jvp
def _max_and_log_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the maximum m and `log(sum(exp(logits - m)))`, both [B,T].

  The sum is rescaled whenever the maximum grows (Milakov & Gimelshein 2018,
  https://arxiv.org/abs/1805.02867), so logits are read once. XLA:GPU fuses this
  reduction of two arrays; XLA:CPU does not vectorize it.
  """

  def join(
    x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    (m, s), (n, t) = x, y
    # One exponential; two infinities have no difference.
    scale = jnp.where(m == n, 1, jnp.exp(-jnp.abs(m - n)))
    total = jnp.where(m > n, s + t * scale, s * scale + t)
    return jnp.maximum(m, n), total

  dtype = logits.dtype
  initial = jnp.asarray(-jnp.inf, dtype), jnp.zeros((), dtype)
  largest, total = jax.lax.reduce(
    (logits, jnp.ones_like(logits)), initial, join, (logits.ndim - 1,)
  )
  return largest, jnp.log(total)


@_max_and_log_sum.defjvp
def _max_and_log_sum_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  (logits,), (tangent,) = primals, tangents
  largest, log_sum = _max_and_log_sum(logits)
  shifted = logits - largest[:, :, None]
  probabilities = jnp.exp(shifted - log_sum[:, :, None])
  moved = jnp.sum(probabilities * tangent, axis=-1)
  # As if the maximum were constant; it cancels.
  return (largest, log_sum), (jnp.zeros_like(largest), moved)


@jax.custom_jvp
def _at_targets(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns the logit of each target, [B,T]."""
  kinds = jax.sharding.get_abstract_mesh().axis_types
  if jax.sharding.AxisType.Manual in kinds:
    # Inside a `shard_map` over some mesh axes XLA's partitioner crashes on a
    # gather whose batch and vocabulary are sharded over other axes.
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
  # A mask instead of a scatter, because it fuses with the gradient of the
  # logits.
  chosen = jnp.where(ids == targets[:, :, None], tangents[0], 0)
  return _at_targets(logits, targets), jnp.sum(chosen, axis=-1)


def softmax_cross_entropy(
  logits: Float[Array, "batch length vocab"],
  targets: Int[Array, "batch length"],
) -> Float[Array, "batch length"]:
  """Returns the negative log likelihood of each target, in nats.

  The arguments are those of `softmax_terms`; the result is at least float32.
  """
  return softmax_terms(logits, targets).nll


def soft_target_cross_entropy(
  logits: Float[Array, "batch length vocab"],
  probabilities: Float[Array, "batch length vocab"],
) -> Float[Array, "batch length"]:
  """Returns the cross entropy with target distributions, in nats.

  This is `-sum(probabilities * log_probabilities(logits))`, in at least
  float32. No gradient flows through the probabilities, such as a teacher's.
  """
  log_p = log_probabilities(logits)
  wanted = jax.lax.stop_gradient(probabilities).astype(log_p.dtype)
  # An impossible id (logit -inf) with target probability zero costs nothing.
  return -jnp.sum(jnp.where(wanted > 0, wanted * log_p, 0), axis=-1)


def log_probabilities(
  logits: Float[Array, "*batch vocab"],
) -> Float[Array, "*batch vocab"]:
  """Returns the logarithms of the softmax, in at least float32."""
  return jax.nn.log_softmax(precision.widen(logits), axis=-1)


def sigmoid_cross_entropy(
  logits: Float[Array, "*batch classes"],
  targets: Float[Array, "*batch classes"],
) -> Float[Array, "*batch classes"]:
  """Returns the binary cross entropy of each class, in nats, at least float32.

  Logits are log odds, targets probabilities from 0 to 1; several classes, or
  none, may be true.
  """
  logits = precision.widen(logits)
  targets = targets.astype(logits.dtype)
  # max(x, 0) - p x + log(1 + exp(-|x|)) does not overflow. The derivatives of
  # `abs` and `relu` at zero would not add up to that of the loss; those of
  # `where` do, as both take the same side.
  is_positive = logits >= 0
  size = jnp.where(is_positive, logits, -logits)
  largest = jnp.where(is_positive, logits, 0)
  return largest - targets * logits + jnp.log1p(jnp.exp(-size))


def weighted_sigmoid_loss(
  logits: Float[Array, "*batch classes"],
  targets: Float[Array, "*batch classes"],
  weights: Float[Array, "*batch weighted"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Returns the weighted sum over classes and examples, and the total weight.

  Args:
    logits: Log odds.
    targets: Probabilities from 0 to 1.
    weights: One for each class of each example, or one for each example, which
      counts once in the total weight, not once for each class.

  Raises:
    ValueError: The last axis of the weights is neither one nor all classes.
  """
  if weights.shape[-1] not in (1, logits.shape[-1]):
    raise ValueError(
      "weights must have one entry for each of the "
      f"{logits.shape[-1]} classes, or one for all, got the shape "
      f"{weights.shape}."
    )
  losses = sigmoid_cross_entropy(logits, targets)
  weights = weights.astype(losses.dtype)
  return jnp.sum(losses * weights), jnp.sum(weights)
