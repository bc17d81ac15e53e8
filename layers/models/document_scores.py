"""Scores of documents, from what a model's `loss` says of each token.

A packed row is several documents, told apart by segment ids 1, 2, ...; the
arrays here have one entry for each: entry `s - 1` of a row is segment `s`, and
entries without a document have length 0.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Arrays = Mapping[str, jax.Array]
Weighted = tuple[jax.Array, jax.Array]


class DocumentScores(NamedTuple):
  """What a model thinks of each document.

  Attributes:
    log_likelihood: Weighted sum of the log probabilities of the targets, in
      nats; 0 where there is no document.
    length: Sum of the weights: how many targets count.
    is_greedy: Whether each target that counts is the most likely id. True where
      no target counts.
  """

  log_likelihood: Float[Array, "batch length"]
  length: Float[Array, "batch length"]
  is_greedy: Bool[Array, "batch length"]


def of_outputs(outputs: Arrays, segment_ids: jax.Array) -> DocumentScores:
  """Returns the scores of the documents of a batch.

  Args:
    outputs: Those of a model's `loss`: `token_nll`, `token_hits` and
      `token_weights` [B,T].
    segment_ids: Of the batch, int [B,T].
  """
  weights = outputs["token_weights"]
  # Not weights times values: a target that does not count may have none.
  nll = jnp.where(weights != 0, outputs["token_nll"] * weights, 0)
  missed = (weights != 0) & (outputs["token_hits"] == 0)
  return DocumentScores(
    log_likelihood=-by_document(nll, segment_ids),
    length=by_document(weights, segment_ids),
    is_greedy=by_document(missed.astype(weights.dtype), segment_ids) == 0,
  )


def strict_accuracy(batch: Arrays, outputs: Arrays) -> dict[str, Weighted]:
  """Returns which share of documents, and of rows, has all targets right.

  A metric function of a task (`Task.metrics`).

  Args:
    batch: With `segment_ids` int [B,T].
    outputs: As those of `of_outputs`.

  Returns:
    `strict_accuracy` of documents and `strict_row_accuracy` of rows, among
    those with a target that counts.
  """
  scores = of_outputs(outputs, batch["segment_ids"])
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
  """Returns how many targets count, as a mean over the rows of the batch.

  A metric function of a task.

  Args:
    batch: Not used.
    outputs: With `row_weight` float [B].

  Returns:
    `predictions_per_row`; times the rows of a batch it is the number of a step.
  """
  del batch
  weights = outputs["row_weight"].astype(jnp.float32)
  return {
    "predictions_per_row": (jnp.sum(weights), jnp.float32(weights.shape[0]))
  }


def by_document(
  values: Float[Array, "batch length"],
  segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch length"]:
  """Returns the sum of the values of each document of each row.

  Args:
    values: One for each token; those of padding do not count.
    segment_ids: From 1 to T in each row; 0 is padding.
  """
  # A row has no more documents than tokens.
  count = values.shape[1] + 1
  sums = jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, num_segments=count))(
    values, segment_ids
  )
  return sums[:, 1:]
