"""Shared parts of language models: token embedding, head and loss.

The head is untied or tied to the embedding, with an optional soft cap; the loss
never holds all logits.

Letters: B batch, T length, D embed, V vocab.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp

from paxon.layers import activations, precision, token_context
from paxon.layers.losses import auxiliary_loss, cross_entropy, softmax_loss
from paxon.layers.models import document_scores
from paxon.sharding import checks

Weighted = tuple[jax.Array, jax.Array]
Batch = Mapping[str, jax.Array]
Result = tuple[Weighted, dict[str, Weighted], dict[str, jax.Array]]

# Values of `DecoderLm.record`.
_RECORDED = ("activations", "logits")


def embed_tokens(
  ids: jax.Array,
  context: token_context.TokenContext,
  *,
  embedding: nn.Module,
  position_embedding: nn.Module | None = None,
  norm: nn.Module | None = None,
  dropout: nn.Module | None = None,
  types: tuple[nn.Module, jax.Array] | None = None,
  ngrammer: nn.Module | None = None,
) -> jax.Array:
  """Returns the input of a stack, [B,T,D].

  Args:
    ids: Token ids, int [B,T].
    context: Their positions, if there is a `position_embedding`, and segments.
    embedding: Maps ids to [B,T,D].
    position_embedding: Maps positions and the width of a token to [B,T,D].
    norm: Normalizes the sum.
    dropout: Applied to the normalized sum.
    types: Embedding and type ids [B,T]; added.
    ngrammer: Called with ids, embedded ids and the context.
  """
  x = embedding(ids)
  if ngrammer is not None:
    x = ngrammer(ids, x, context)
  if types is not None:
    table, type_ids = types
    x += table(type_ids).astype(x.dtype)
  if position_embedding is not None:
    x += position_embedding(context.positions, x.shape[-1]).astype(x.dtype)
  x = apply_norm(x, norm)
  if dropout is None:
    return x
  return dropout(x, deterministic=context.deterministic)


def apply_norm(x: jax.Array, norm: nn.Module | None) -> jax.Array:
  """Returns `norm(x)`, or `x` if `norm` is None."""
  return x if norm is None else norm(x)


def check_keys(model: object, batch: Batch, keys: Iterable[str]) -> None:
  """Raises ValueError if a batch has no array of one of these names."""
  for key in keys:
    if key not in batch:
      raise ValueError(
        f"{type(model).__name__} needs batch[{key!r}]; the batch has"
        f" {sorted(batch)}."
      )


class OtherLoss(nn.Module):
  """Base of models that train another model, the field `trained`.

  The variables of that model have the names that they have without this one.
  """

  trained: ClassVar[str]

  @property
  def trained_model(self) -> Any:
    """The model that is trained."""
    return getattr(self, self.trained)

  def setup(self) -> None:
    """Shares the scope of the trained model."""
    nn.share_scope(self, self.trained_model)

  def score(self, batch: Batch) -> document_scores.DocumentScores:
    """Returns the trained model's scores of documents."""
    return self.trained_model.score(batch)

  def prefill(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Calls the trained model's."""
    return self.trained_model.prefill(*args, **kwargs)

  def decode_step(self, *args: Any, **kwargs: Any) -> jax.Array:
    """Calls the trained model's."""
    return self.trained_model.decode_step(*args, **kwargs)


@runtime_checkable
class HeadOwner(Protocol):
  """A language model whose head and loss `LanguageHead` computes.

  Attributes:
    embedding: The token embedding, the head if it is tied.
    head: The untied head, or None.
    logit_cap: Soft-caps the logits to `(-logit_cap, logit_cap)`, or None.
    token_loss: The loss of tokens.
    record: Names of further outputs: `activations`, `logits`.
    auxiliary_loss_weight: Factor of the auxiliary losses of layers.
  """

  embedding: nn.Module
  head: nn.Module | None
  logit_cap: float | None
  token_loss: softmax_loss.SoftmaxLoss
  record: Sequence[str]
  auxiliary_loss_weight: float

  def is_initializing(self) -> bool:
    """Whether variables are made, like `nn.Module.is_initializing`."""
    ...


@dataclasses.dataclass(frozen=True)
class LanguageHead:
  """Logits and loss of the hidden states of a bound model.

  Attributes:
    model: The bound model.
  """

  model: HeadOwner

  def logits(self, x: jax.Array, at: jax.Array | None = None) -> jax.Array:
    """Returns logits in at least float32.

    `at` is the index of the token of each sequence, int [B]; `None` is all
    tokens.
    """
    if at is not None:
      x = jnp.take_along_axis(x, at[:, None, None], axis=1)
    module, method = self._head()
    return self._cap(getattr(module, method)(x))

  def loss(self, x: jax.Array, batch: Batch, *, deterministic: bool) -> Result:
    """Returns the loss, metrics and outputs of a batch; see `DecoderLm.loss`.

    The hidden states `x` are [B,T,D].
    """
    return self._result(
      x,
      batch,
      deterministic=deterministic,
      auxiliary_weight=self.model.auxiliary_loss_weight,
      record=self.model.record,
    )

  def token_nll(self, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the negative log likelihood of each target, float32 [B,T].

    Differentiable, unlike the outputs of `loss`; the logits of a chunk of
    `token_loss.chunk_length` positions are computed again for its gradient.
    """
    logits_fn, variables = self._unbind_head(x)

    @jax.checkpoint
    def one_chunk(
      variables: softmax_loss.Variables, x: jax.Array, targets: jax.Array
    ) -> jax.Array:
      return cross_entropy.softmax_terms(logits_fn(variables, x), targets).nll

    length = x.shape[1]
    chunk = self.model.token_loss.chunk_length or length
    # Few chunks of equal shapes; slices need no padding.
    parts = [
      one_chunk(variables, x[:, i : i + chunk], targets[:, i : i + chunk])
      for i in range(0, length, chunk)
    ]
    return jnp.concatenate(parts, axis=1)

  def score(self, x: jax.Array, batch: Batch) -> document_scores.DocumentScores:
    """Returns the scores of each document; called like `loss`."""
    _, _, outputs = self._result(
      x, batch, deterministic=True, auxiliary_weight=0.0, record=()
    )
    return document_scores.score_outputs(outputs, batch["segment_ids"])

  def token_loss(
    self,
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    deterministic: bool,
  ) -> softmax_loss.SoftmaxLossOutput:
    """Returns the loss of the tokens that follow the states `x` [B,T,D]."""
    token_loss: softmax_loss.SoftmaxLoss = self.model.token_loss
    if deterministic:
      token_loss = token_loss.to_evaluation()
    logits_fn, variables = self._unbind_head(x)
    return token_loss(logits_fn, variables, x, targets=targets, weights=weights)

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
    weights = token_weights(batch)
    result = self.token_loss(
      x, batch["targets"], weights, deterministic=deterministic
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
    added, more = auxiliary_loss.collect(
      cast(nn.Module, self.model), factor=auxiliary_weight, weight=total
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

  def _head(self) -> tuple[nn.Module, str]:
    """Returns the head and the name of its method."""
    if self.model.head is None:
      return self.model.embedding, "attend"
    return self.model.head, "__call__"

  def _cap(self, logits: jax.Array) -> jax.Array:
    logits, cap = precision.widen(logits), self.model.logit_cap
    return logits if cap is None else activations.soft_cap(logits, cap)

  def _unbind_head(
    self, x: jax.Array
  ) -> tuple[softmax_loss.LogitsFn, softmax_loss.Variables]:
    """Returns the head as a function of its variables, and the variables."""
    if self.model.is_initializing():
      # Creates the variables that are read below.
      self.logits(x)
    module, method = self._head()
    # The loss calls the head in a scan, where bound modules must not be used.
    head, variables = module.unbind()

    def logits_fn(variables: softmax_loss.Variables, x: jax.Array) -> jax.Array:
      logits = cast(jax.Array, head.apply(variables, x, method=method))
      return self._cap(logits)

    return logits_fn, variables


def token_weights(batch: Batch) -> jax.Array:
  """Returns the weights of targets times those of examples."""
  weights = batch["weights"]
  if "example_weights" not in batch:
    return weights
  return weights * batch["example_weights"][:, None].astype(weights.dtype)


def check(model: HeadOwner) -> None:
  """Raises ValueError for invalid fields of a language model."""
  checks.check_positive(model, "logit_cap")
  checks.check_non_negative(model, "auxiliary_loss_weight")
  if unknown := sorted(set(model.record) - set(_RECORDED)):
    raise ValueError(
      f"{type(model).__name__}.record must name values of {_RECORDED}, got"
      f" {unknown[0]!r}."
    )
