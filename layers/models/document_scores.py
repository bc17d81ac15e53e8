"""Scores of documents from the per-token outputs of a model's `loss`.

A packed sequence has several documents with segment ids 1, 2, ... Arrays here
have one entry per document: entry `s - 1` of a sequence is segment `s`; entries
without a document have length 0.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Arrays = Mapping[str, jax.Array]
Weighted = tuple[jax.Array, jax.Array]


class DocumentScores(NamedTuple):
  """Scores of each document.

  Attributes:
    log_likelihood: Weighted sum of the log probabilities of the targets, in
      nats; 0 where there is no document.
    length: Sum of the weights.
    is_greedy: Whether each target of nonzero weight is the most likely id. True
      without such a target.
  """

  log_likelihood: Float[Array, "batch length"]
  length: Float[Array, "batch length"]
  is_greedy: Bool[Array, "batch length"]


def score_outputs(outputs: Arrays, segment_ids: jax.Array) -> DocumentScores:
  """Returns the scores of the documents of a batch.

  `outputs` are those of `loss`: `token_nll`, `token_hits`, `token_weights`
  [B,T].
  """
  weights = outputs["token_weights"]
  # Targets of weight zero may be NaN.
  nll = jnp.where(weights != 0, outputs["token_nll"] * weights, 0)
  missed = (weights != 0) & (outputs["token_hits"] == 0)
  return DocumentScores(
    log_likelihood=-sum_by_document(nll, segment_ids),
    length=sum_by_document(weights, segment_ids),
    is_greedy=sum_by_document(missed.astype(weights.dtype), segment_ids) == 0,
  )


def strict_accuracy(batch: Arrays, outputs: Arrays) -> dict[str, Weighted]:
  """Returns the fraction of documents and sequences without an error.

  A metric function (`Task.metrics`). Returns `strict_accuracy` of documents and
  `strict_row_accuracy` of sequences, among those with a target of nonzero
  weight.
  """
  scores = score_outputs(outputs, batch["segment_ids"])
  rows = DocumentScores(
    log_likelihood=jnp.sum(scores.log_likelihood, axis=1),
    length=jnp.sum(scores.length, axis=1),
    is_greedy=jnp.all(scores.is_greedy, axis=1),
  )

  def share(scores: DocumentScores) -> Weighted:
    counts = scores.length > 0
    right = counts & scores.is_greedy
    return (
      jnp.sum(right.astype(jnp.float32)),
      jnp.sum(counts.astype(jnp.float32)),
    )

  return {"strict_accuracy": share(scores), "strict_row_accuracy": share(rows)}


def predictions_per_row(batch: Arrays, outputs: Arrays) -> dict[str, Weighted]:
  """Returns the mean weight of the targets of a sequence, a metric function."""
  del batch
  weights = outputs["row_weight"].astype(jnp.float32)
  return {
    "predictions_per_row": (jnp.sum(weights), jnp.float32(weights.shape[0]))
  }


def sum_by_document(
  values: Float[Array, "batch length"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch length"]:
  """Returns the sum of the values of the tokens of each document.

  Segment ids must be from 1 to T; 0 is padding, whose values are ignored.
  """
  # There are no more documents than tokens.
  count = values.shape[1] + 1
  sums = jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, num_segments=count))(
    values, segment_ids
  )
  return sums[:, 1:]
