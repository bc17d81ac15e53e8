"""Speech recognizer: an encoder of audio and CTC.

Letters: B batch, S samples, T frames, L labels, V vocabulary with the blank.
"""

from collections.abc import Mapping

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paxon.layers import precision
from paxon.layers.losses import auxiliary_loss
from paxon.layers.models import language_model
from paxon.layers.speech import ctc, error_rate
from paxon.sharding import checks

_KEYS = ("audio", "audio_lengths")
_LABELS = ("labels", "label_lengths", "example_weights")


class Recognizer(nn.Module):
  """Maps audio to labels by connectionist temporal classification.

  Attributes:
    encoder: Called with audio [B,S], its mask and `deterministic`; returns
      frames [B,T,D] and their mask, such as `audio_encoder.AudioEncoder`.
    head: Maps [B,T,D] to logits [B,T,V], such as `linear.Linear`.
    dropout: Applied to the input of the head; `None` disables it.
    blank_id: Id of the blank.
    space_id: Id of the space between words; `None` has no word error rate.
    auxiliary_loss_weight: As in `DecoderLm`.
  """

  encoder: nn.Module
  head: nn.Module
  dropout: nn.Module | None = None
  blank_id: int = 0
  space_id: int | None = None
  auxiliary_loss_weight: float = 1.0

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_non_negative(
      self, "blank_id", "space_id", "auxiliary_loss_weight"
    )
    if self.space_id == self.blank_id:
      raise ValueError(
        f"Recognizer.space_id and blank_id must differ, got {self.space_id}."
      )

  def __call__(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> tuple[Float[Array, "batch frames vocab"], Bool[Array, "batch frames"]]:
    """Returns logits in at least float32, and the mask of real frames.

    Args:
      batch: `audio` float [B,S] and `audio_lengths` int32 [B].
      deterministic: False (training) enables augmentation and dropout.

    Raises:
      ValueError: A key is missing in the batch.
    """
    language_model.check_keys(self, batch, _KEYS)
    audio = batch["audio"]
    at = jnp.arange(audio.shape[1], dtype=jnp.int32)[None]
    mask = at < batch["audio_lengths"][:, None]
    x, is_real = self.encoder(audio, mask, deterministic=deterministic)
    if self.dropout is not None:
      x = self.dropout(x, deterministic=deterministic)
    return precision.widen(self.head(x)), is_real

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: Batch of `__call__`, with `labels` int32 [B,L], `label_lengths`
        int32 [B] and `example_weights` float32 [B], zero for padding.
      deterministic: False in training, which computes no error rates.

    Returns:
      `(sum, weight)` of the CTC loss of each clip, in nats, divided by its
      labels: torch's `CTCLoss(reduction="mean", zero_infinity=True)`. Metrics,
      as such pairs: `ctc_loss`, the same; `too_long_texts`, the share of clips
      with fewer frames than their labels need, whose loss counts as zero; in
      evaluation `word_error_rate` (errors, words) and `character_error_rate`
      (errors, labels) of greedy decoding. Outputs: `row_nll`, the loss of the
      whole text, and `row_weight` [B]; `log_probs` [B,T,V] and `frame_mask`
      [B,T].

    Raises:
      ValueError: A key is missing in the batch.
    """
    language_model.check_keys(self, batch, _LABELS)
    logits, is_real = self(batch, deterministic=deterministic)
    labels, lengths = batch["labels"], batch["label_lengths"]
    at = jnp.arange(labels.shape[1], dtype=jnp.int32)[None]
    nll = ctc.loss(
      logits, is_real, labels, at < lengths[:, None], blank_id=self.blank_id
    )
    is_possible = jnp.isfinite(nll)
    nll = jnp.where(is_possible, nll, 0)
    weights = batch["example_weights"].astype(nll.dtype)
    total = jnp.sum(weights)

    def pair(values: jax.Array) -> language_model.Weighted:
      return jnp.sum(values.astype(weights.dtype) * weights), total

    mean = pair(nll / jnp.maximum(lengths, 1).astype(nll.dtype))
    metrics = {"ctc_loss": mean, "too_long_texts": pair(~is_possible)}
    if deterministic:
      metrics |= self._error_rates(logits, is_real, batch)
    added, more = auxiliary_loss.collect(
      self, factor=self.auxiliary_loss_weight, weight=total
    )
    outputs = {
      "row_nll": jax.lax.stop_gradient(nll),
      "row_weight": weights,
      "log_probs": jax.lax.stop_gradient(jax.nn.log_softmax(logits)),
      "frame_mask": is_real,
    }
    return (mean[0] + added, total), metrics | more, outputs

  def predict(self, batch: language_model.Batch) -> dict[str, jax.Array]:
    """Returns the texts of greedy decoding.

    They are `labels` int32 [B,T], zero after the end, and `label_lengths` [B].
    """
    logits, is_real = self(batch)
    ids, lengths = ctc.greedy(logits, is_real, blank_id=self.blank_id)
    return {"labels": ids, "label_lengths": lengths}

  @nn.nowrap
  def _error_rates(
    self, logits: jax.Array, is_real: jax.Array, batch: language_model.Batch
  ) -> dict[str, language_model.Weighted]:
    ids, lengths = ctc.greedy(logits, is_real, blank_id=self.blank_id)
    texts = batch["labels"], batch["label_lengths"], ids, lengths
    weights = batch["example_weights"].astype(logits.dtype)

    def pair(errors: jax.Array, count: jax.Array) -> language_model.Weighted:
      return (
        jnp.sum(errors.astype(weights.dtype) * weights),
        jnp.sum(count.astype(weights.dtype) * weights),
      )

    errors = error_rate.edit_distance(*texts)
    rates = {"character_error_rate": pair(errors, batch["label_lengths"])}
    if self.space_id is not None:
      found = error_rate.word_edit_distance(*texts, space_id=self.space_id)
      rates["word_error_rate"] = pair(*found)
    return rates


def write_log_probs(
  batch: language_model.Batch, outputs: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
  """Returns the loss and what a search for texts needs, a `Task.predictions`.

  They are `row_nll` [B] in nats; the `labels` of the batch, zero after the end,
  int32 [B,L]; `num_frames` int32 [B]; and `log_probs` int32 [B,T,V] in
  thousandths of a nat, at least -30,000, of which the real frames come first.
  """
  labels, mask = batch["labels"], outputs["frame_mask"]
  at = jnp.arange(labels.shape[1], dtype=jnp.int32)[None]
  order = jnp.argsort(~mask, axis=1, stable=True)
  log_probs = jnp.take_along_axis(
    outputs["log_probs"], order[..., None], axis=1
  )
  return {
    "row_nll": outputs["row_nll"],
    "labels": jnp.where(at < batch["label_lengths"][:, None], labels, 0),
    "num_frames": jnp.sum(mask, axis=1, dtype=jnp.int32),
    "log_probs": jnp.round(1000 * jnp.maximum(log_probs, -30)).astype(
      jnp.int32
    ),
  }
