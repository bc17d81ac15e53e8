"""From the states of a stack to logits, and to the loss of a batch.

What all language models share: a head of their own or the embedding's table, a
cap after it, the loss that never holds all logits, and its sums by row.

Letters: B batch, T length, D embed, V vocab.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import activations, auxiliary_loss, precision, softmax_loss
from paxon.layers.models import document_scores
from paxon.sharding import checks

Weighted = tuple[jax.Array, jax.Array]
Batch = Mapping[str, jax.Array]
Result = tuple[Weighted, dict[str, Weighted], dict[str, jax.Array]]

# What `loss` may return of its inner values.
_RECORDED = ("activations", "logits")


@dataclasses.dataclass(frozen=True)
class LanguageHead:
  """How a model that is bound makes logits, and a loss, of its states.

  Attributes:
    model: A module with the fields `embedding`, `head`, `logit_cap`,
      `token_loss`, `record` and `auxiliary_loss_weight`, as `DecoderLm` has
      them.
  """

  model: Any

  def logits(self, x: jax.Array, at: jax.Array | None = None) -> jax.Array:
    """Returns the logits of states, in at least float32.

    Args:
      x: The states [B,T,D].
      at: Of which place in each row, int [B]; `None` is all.
    """
    if at is not None:
      x = jnp.take_along_axis(x, at[:, None, None], axis=1)
    part, method = self._part()
    return self._capped(getattr(part, method)(x))

  def loss(self, x: jax.Array, batch: Batch, *, deterministic: bool) -> Result:
    """Returns the loss, metrics and outputs of a batch; see `DecoderLm.loss`.

    Args:
      x: The states.
      batch: `targets` int32 [B,T], `weights` float [B,T], and `example_weights`
        float [B], a factor of each row, where it is there.
      deterministic: Whether this is evaluation.
    """
    return self._result(
      x,
      batch,
      deterministic=deterministic,
      auxiliary_weight=self.model.auxiliary_loss_weight,
      record=self.model.record,
    )

  def score(self, x: jax.Array, batch: Batch) -> document_scores.DocumentScores:
    """Returns the scores of each document of a batch; called as `loss`."""
    _, _, outputs = self._result(
      x, batch, deterministic=True, auxiliary_weight=0.0, record=()
    )
    return document_scores.of_outputs(outputs, batch["segment_ids"])

  def _result(
    self,
    x: jax.Array,
    batch: Batch,
    *,
    deterministic: bool,
    auxiliary_weight: float,
    record: Sequence[str],
  ) -> Result:
    token_loss: softmax_loss.SoftmaxLoss = self.model.token_loss
    if deterministic:
      token_loss = token_loss.evaluated()
    weights = token_weights(batch)
    logits_fn, variables = self._unbound(x)
    result = token_loss(
      logits_fn, variables, x, targets=batch["targets"], weights=weights
    )
    weights = weights.astype(result.token_nll.dtype)
    hits = result.token_hits.astype(weights.dtype)
    rows = {
      "row_nll": jnp.sum(result.token_nll * weights, axis=1),
      "row_hits": jnp.sum(hits * weights, axis=1),
      "row_weight": jnp.sum(weights, axis=1),
    }
    total = jnp.sum(weights)
    metrics = {
      "log_pplx": (jnp.sum(rows["row_nll"]), total),
      "accuracy": (jnp.sum(rows["row_hits"]), total),
    }
    if token_loss.z_loss_weight:
      metrics["z_loss"] = jnp.sum(result.token_z_loss * weights), total
    added, more = auxiliary_loss.weighted(
      self.model, factor=auxiliary_weight, weight=total
    )
    outputs = {
      "token_nll": result.token_nll,
      "token_hits": hits,
      "token_weights": weights,
      **rows,
    }
    if "activations" in record:
      outputs["activations"] = jax.lax.stop_gradient(x)
    if "logits" in record:
      outputs["logits"] = jax.lax.stop_gradient(self.logits(x))
    return (result.loss + added, total), metrics | more, outputs

  def _part(self) -> tuple[nn.Module, str]:
    """Returns the head and the name of the method to call."""
    if self.model.head is None:
      return self.model.embedding, "attend"
    return self.model.head, "__call__"

  def _capped(self, logits: jax.Array) -> jax.Array:
    logits, cap = precision.widened(logits), self.model.logit_cap
    return logits if cap is None else activations.soft_cap(logits, cap)

  def _unbound(
    self, x: jax.Array
  ) -> tuple[softmax_loss.LogitsFn, softmax_loss.Variables]:
    """Returns the head as a function of its variables, and these."""
    if self.model.is_initializing():
      # Makes the variables that are read below.
      self.logits(x)
    part, method = self._part()
    # The loss calls the head in a loop, where a bound module must not be used.
    head, variables = part.unbind()

    def logits_fn(variables: softmax_loss.Variables, x: jax.Array) -> jax.Array:
      logits = cast(jax.Array, head.apply(variables, x, method=method))
      return self._capped(logits)

    return logits_fn, variables


def token_weights(batch: Batch) -> jax.Array:
  """Returns the weight of each target, those of padded examples zeroed."""
  weights = batch["weights"]
  if "example_weights" not in batch:
    return weights
  return weights * batch["example_weights"][:, None].astype(weights.dtype)


def check(model: Any) -> None:
  """Raises ValueError for invalid fields of a language model."""
  checks.check_positive(model, "logit_cap")
  checks.check_non_negative(model, "auxiliary_loss_weight")
  if unknown := sorted(set(model.record) - set(_RECORDED)):
    raise ValueError(
      f"{type(model).__name__}.record must name values of {_RECORDED}, got"
      f" {unknown[0]!r}."
    )
