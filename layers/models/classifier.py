"""Classifier: says to which class each example belongs.

Letters: B batch, T length, D embed, C classes.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers import auxiliary_loss, cross_entropy, precision
from paxon.layers.models import language_head
from paxon.layers.models import pooling as pooling_lib
from paxon.sharding import checks

_TOP = 5


class Classifier(nn.Module):
  """An encoder, what makes one vector of each example, and a head.

  Attributes:
    encoder: Called with the batch's `input_keys` and `deterministic`; gives
      [B,T,D], as `text_encoder.TextEncoder` does, or [B,D].
    head: Maps [B,D] to logits [B,C], such as `linear.Linear`.
    pooling: Maps [B,T,D] and the batch's `segment_ids` to [B,D] (`pooling`);
      `None` for an encoder that gives [B,D].
    pooler: Maps [B,D] to [B,D] before the head; `None` leaves it.
    dropout: Called with what the head is given and `deterministic`; `None` is
      no dropout.
    input_keys: Names of what the encoder is called with, in its order.
    label_smoothing: Share of the uniform distribution in the target
      distribution, in `[0, 1)`.
    auxiliary_loss_weight: As in `DecoderLm`.
  """

  encoder: nn.Module
  head: nn.Module
  pooling: pooling_lib.Pooling | None = None
  pooler: nn.Module | None = None
  dropout: nn.Module | None = None
  input_keys: Sequence[str] = ("inputs", "positions", "segment_ids")
  label_smoothing: float = 0.0
  auxiliary_loss_weight: float = 1.0

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.input_keys = tuple(self.input_keys)
    super().__post_init__()
    checks.check_interval(self, "[0, 1)", "label_smoothing")
    checks.check_non_negative(self, "auxiliary_loss_weight")

  def __call__(
    self, batch: language_head.Batch, *, deterministic: bool = True
  ) -> Float[Array, "batch classes"]:
    """Returns logits in at least float32.

    Args:
      batch: Arrays by `input_keys`, and `segment_ids` where there is `pooling`.
      deterministic: Whether dropout is off.

    Raises:
      ValueError: The batch lacks an input, or the encoder's output needs
        `pooling`, or does not.
    """
    needed = [*self.input_keys, *(["segment_ids"] if self.pooling else [])]
    _check_keys(batch, needed)
    x = self.encoder(
      *(batch[key] for key in self.input_keys), deterministic=deterministic
    )
    rank = 2 if self.pooling is None else 3
    if x.ndim != rank:
      raise ValueError(
        f"Classifier.encoder gave the shape {x.shape}; with pooling "
        f"{'None' if self.pooling is None else 'set'} it must have {rank} "
        "dimensions."
      )
    if self.pooling is not None:
      x = self.pooling(x, batch["segment_ids"])
    if self.pooler is not None:
      x = self.pooler(x)
    if self.dropout is not None:
      x = self.dropout(x, deterministic=deterministic)
    return precision.widened(self.head(x))

  def loss(
    self, batch: language_head.Batch, *, deterministic: bool = True
  ) -> language_head.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: As the classifier is called with, with `labels` int32 [B] and
        `example_weights` float32 [B], zero for rows that only fill the batch.
      deterministic: Whether dropout is off.

    Returns:
      `(sum, weight)` of the cross entropy, in nats. Metrics, as such pairs:
      `cross_entropy`, without smoothing; `accuracy` and `error`; and, of at
      least 5 classes, `acc5` and `error5`: whether the label is among the five
      most likely ones. Outputs: `label_probs` [B,C] and, without weights,
      `row_nll` and `row_hits` [B]; `row_weight` [B].

    Raises:
      ValueError: The batch lacks something.
    """
    _check_keys(batch, ["labels", "example_weights"])
    logits = self(batch, deterministic=deterministic)
    labels = batch["labels"]
    terms = cross_entropy.softmax_terms(logits[:, None, :], labels[:, None])
    nll, uniform, hits = (
      x[:, 0] for x in (terms.nll, terms.uniform_nll, terms.hits)
    )
    weights = batch["example_weights"].astype(logits.dtype)
    share, total = self.label_smoothing, jnp.sum(weights)

    def pair(values: jax.Array) -> language_head.Weighted:
      return jnp.sum(values.astype(weights.dtype) * weights), total

    metrics = {
      "cross_entropy": pair(nll),
      "accuracy": pair(hits),
      "error": pair(~hits),
    }
    if logits.shape[-1] >= _TOP:
      among = _rank(logits, labels) < _TOP
      metrics |= {"acc5": pair(among), "error5": pair(~among)}
    added, more = auxiliary_loss.weighted(
      self, factor=self.auxiliary_loss_weight, weight=total
    )
    loss = pair((1 - share) * nll + share * uniform)[0] + added
    outputs = {
      "label_probs": jax.lax.stop_gradient(jax.nn.softmax(logits, axis=-1)),
      "row_nll": jax.lax.stop_gradient(nll),
      "row_hits": hits.astype(weights.dtype),
      "row_weight": weights,
    }
    return (loss, total), metrics | more, outputs

  def predict(self, batch: language_head.Batch) -> dict[str, jax.Array]:
    """Returns `labels` int32 [B], the most likely ones, and `label_probs`.

    Args:
      batch: As the classifier is called with.
    """
    logits = self(batch)
    return {
      "labels": jnp.argmax(logits, axis=-1).astype(jnp.int32),
      "label_probs": jax.nn.softmax(logits, axis=-1),
    }


def _rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns how many classes are before the label of each row.

  Of equal logits the smaller class is first, as everywhere.
  """
  own = jnp.take_along_axis(logits, labels[:, None], axis=1)
  ids = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1)
  before = (logits > own) | ((logits == own) & (ids < labels[:, None]))
  return jnp.sum(before.astype(jnp.int32), axis=1)


def _check_keys(batch: language_head.Batch, keys: Sequence[str]) -> None:
  for key in keys:
    if key not in batch:
      raise ValueError(
        f"Classifier needs batch[{key!r}]; the batch has {sorted(batch)}."
      )
