"""Classifier of texts or features: encoder, pooling and head.

Letters: B batch, T length, D embed, C classes.
"""

from collections.abc import Callable, Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.layers.losses import auxiliary_loss, bi_tempered_loss, cross_entropy
from paxon.layers.models import language_model
from paxon.sharding import checks

# `(x [B,T,D], segment_ids [B,T]) -> [B,D]`; segment 0 is padding, at the end.
Pooling = Callable[[jax.Array, jax.Array], jax.Array]

_TOP = 5


def pool_first(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch embed"]:
  """Returns the state of the first token, as BERT does."""
  del segment_ids
  return x[:, 0]


def pool_last(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch embed"]:
  """Returns the state of the last token, for causal models."""
  last = jnp.sum((segment_ids != 0).astype(jnp.int32), axis=1) - 1
  at = jnp.maximum(last, 0)[:, None, None]
  return jnp.take_along_axis(x, at, axis=1)[:, 0]


def pool_mean(
  x: Float[Array, "batch length embed"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch embed"]:
  """Returns the mean state of all tokens; zeros if there are none."""
  inside = (segment_ids != 0)[:, :, None]
  # float32 because the sum over a long text loses digits in bfloat16.
  total = jnp.sum(jnp.where(inside, precision.widen(x), 0), axis=1)
  count = jnp.sum(inside.astype(total.dtype), axis=1)
  return (total / jnp.maximum(count, 1)).astype(x.dtype)


class Classifier(nn.Module):
  """Encoder, pooling and head.

  Attributes:
    encoder: Called with the batch's `input_keys` and `deterministic`; returns
      [B,T,D], as `masked_lm.TextEncoder` does, or [B,D].
    head: Maps [B,D] to logits [B,C], such as `linear.Linear`.
    pooling: Maps [B,T,D] and the batch's `segment_ids` to [B,D], such as
      `pool_mean`; `None` for an encoder that returns [B,D].
    pooler: Maps [B,D] to [B,D] before the head; `None` is the identity. BERT's
      is `linear.Linear(embed_dim, activation=jnp.tanh)` with `pool_first`.
    dropout: Applied to the input of the head; `None` disables it.
    input_keys: Batch keys of the encoder's arguments, in order.
    label_smoothing: Weight of the uniform distribution in the targets, in
      `[0, 1)`.
    tempered: Loss in the place of the cross entropy, such as
      `BiTemperedLoss(first=0.8, second=1.2)` or, with temperatures that begin
      at 1, `RampedBiTemperedLoss`; `None` is the cross entropy.
    auxiliary_loss_weight: As in `DecoderLm`.
  """

  encoder: nn.Module
  head: nn.Module
  pooling: Pooling | None = None
  pooler: nn.Module | None = None
  dropout: nn.Module | None = None
  input_keys: Sequence[str] = ("inputs", "positions", "segment_ids")
  label_smoothing: float = 0.0
  tempered: (
    bi_tempered_loss.BiTemperedLoss
    | bi_tempered_loss.RampedBiTemperedLoss
    | None
  ) = None
  auxiliary_loss_weight: float = 1.0

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.input_keys = tuple(self.input_keys)
    super().__post_init__()
    checks.check_interval(self, "[0, 1)", "label_smoothing")
    checks.check_non_negative(self, "auxiliary_loss_weight")

  def __call__(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> Float[Array, "batch classes"]:
    """Returns logits in at least float32.

    Args:
      batch: Arrays by `input_keys`, and `segment_ids` if `pooling` is set.
      deterministic: Disables dropout.

    Raises:
      ValueError: A key is missing in the batch, or the rank of the encoder's
        output does not match `pooling`.
    """
    needed = [*self.input_keys, *(["segment_ids"] if self.pooling else [])]
    language_model.check_keys(self, batch, needed)
    x = self.encoder(
      *(batch[key] for key in self.input_keys), deterministic=deterministic
    )
    rank = 2 if self.pooling is None else 3
    if x.ndim != rank:
      raise ValueError(
        f"Classifier.encoder returned shape {x.shape}; with pooling "
        f"{'None' if self.pooling is None else 'set'} it must have {rank} "
        "dimensions."
      )
    if self.pooling is not None:
      x = self.pooling(x, batch["segment_ids"])
    if self.pooler is not None:
      x = self.pooler(x)
    if self.dropout is not None:
      x = self.dropout(x, deterministic=deterministic)
    return precision.widen(self.head(x))

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: Batch of `__call__`, with `labels` int32 [B] and `example_weights`
        float32 [B], zero for padding examples.
      deterministic: Disables dropout.

    Returns:
      `(sum, weight)` of the loss, in nats. Metrics, as such pairs:
      `cross_entropy` without smoothing; `accuracy` and `error`; and, for at
      least 5 classes, top-5 `acc5` and `error5`. Outputs: `label_probs` and
      `label_log_probs` [B,C]; `row_nll`, `row_hits` (both unweighted) and
      `row_weight` [B].

    Raises:
      ValueError: A key is missing in the batch.
    """
    language_model.check_keys(self, batch, ["labels", "example_weights"])
    logits = self(batch, deterministic=deterministic)
    labels = batch["labels"]
    terms = cross_entropy.softmax_terms(logits[:, None, :], labels[:, None])
    nll, uniform, hits = (
      x[:, 0] for x in (terms.nll, terms.uniform_nll, terms.hits)
    )
    weights = batch["example_weights"].astype(logits.dtype)
    share, total = self.label_smoothing, jnp.sum(weights)

    def pair(values: jax.Array) -> language_model.Weighted:
      return jnp.sum(values.astype(weights.dtype) * weights), total

    metrics = {
      "cross_entropy": pair(nll),
      "accuracy": pair(hits),
      "error": pair(~hits),
    }
    if logits.shape[-1] >= _TOP:
      among = _rank(logits, labels) < _TOP
      metrics |= {"acc5": pair(among), "error5": pair(~among)}
    added, more = auxiliary_loss.collect(
      self, factor=self.auxiliary_loss_weight, weight=total
    )
    terms = (1 - share) * nll + share * uniform
    if self.tempered is not None:
      classes = logits.shape[-1]
      sure = jax.nn.one_hot(labels, classes, dtype=logits.dtype)
      smooth = (1 - share) * sure + share / classes
      terms = self.tempered(logits, smooth, deterministic=deterministic)
    loss = pair(terms)[0] + added
    fixed = jax.lax.stop_gradient(logits)
    outputs = {
      "label_probs": jax.nn.softmax(fixed, axis=-1),
      "label_log_probs": jax.nn.log_softmax(fixed, axis=-1),
      "row_nll": jax.lax.stop_gradient(nll),
      "row_hits": hits.astype(weights.dtype),
      "row_weight": weights,
    }
    return (loss, total), metrics | more, outputs

  def predict(self, batch: language_model.Batch) -> dict[str, jax.Array]:
    """Returns the most likely `labels` int32 [B], and `label_probs` [B,C]."""
    logits = self(batch)
    return {
      "labels": jnp.argmax(logits, axis=-1).astype(jnp.int32),
      "label_probs": jax.nn.softmax(logits, axis=-1),
    }


def _rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the rank of each label; of equal logits the smaller id is first."""
  own = jnp.take_along_axis(logits, labels[:, None], axis=1)
  ids = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1)
  before = (logits > own) | ((logits == own) & (ids < labels[:, None]))
  return jnp.sum(before.astype(jnp.int32), axis=1)
