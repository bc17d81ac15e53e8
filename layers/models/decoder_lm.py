"""Decoder-only language model: embedding, stack, norm, head.

Learners call `loss`; decoding calls `prefill` and `decode_step`. All run the
same layers and head, so they give the same numbers.

Letters: B batch, T length, V vocab.
"""

from collections.abc import Sequence
import functools
from typing import Any, ClassVar

from flax import linen as nn
import jax
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import token_context
from paxon.layers.attention import kv_cache
from paxon.layers.losses import softmax_loss
from paxon.layers.models import (
  document_scores,
  language_model,
)


class DecoderLm(nn.Module):
  """Predicts the next token of each position.

  Attributes:
    embedding: Maps ids [B,T] to [B,T,D], and back by `attend`.
    stack: Called with tokens and their `TokenContext`.
    final_norm: Maps [B,T,D] to [B,T,D]; `None` if the last block ends with a
      norm.
    head: Maps [B,T,D] to logits, each position separately; `None` uses
      `embedding.attend` (tied).
    logit_cap: Soft cap of the logits; `None` disables it.
    token_loss: Loss of the head.
    position_embedding: Maps positions [B,T] and the width of a token to
      [B,T,D], added to embedded tokens. `None` leaves positions to attention.
    embedding_norm: Normalizes the sum of embeddings; `None` disables it.
    ngrammer: A `quantizers.ngrammer.Ngrammer`, called with ids and embedded
      ids, before positions are added; `None` disables it.
    embedding_dropout: Dropout of the input of the stack; `None` disables it.
    record: Additional outputs of `loss`: `activations` [B,T,D], the input of
      the head, and `logits` [B,T,V].
    auxiliary_loss_weight: Factor of `losses.auxiliary_loss`; 0 disables them.
    multi_token: A `models.multi_token.MultiTokenPrediction`, which predicts
      tokens after the next one in training; `None` disables it.
  """

  embedding: nn.Module
  stack: nn.Module
  final_norm: nn.Module | None
  head: nn.Module | None = None
  logit_cap: float | None = None
  token_loss: softmax_loss.SoftmaxLoss = softmax_loss.SoftmaxLoss()
  position_embedding: nn.Module | None = None
  embedding_norm: nn.Module | None = None
  ngrammer: nn.Module | None = None
  embedding_dropout: nn.Module | None = None
  record: Sequence[str] = ()
  auxiliary_loss_weight: float = 1.0
  multi_token: nn.Module | None = None
  # The weight of the loss is that of the batch's tokens.
  counts_each_target: ClassVar[bool] = True

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.record = tuple(self.record)
    super().__post_init__()
    language_model.check(self)

  def __call__(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    prefix: Bool[Array, "batch length"] | None = None,
    *,
    cache_length: int | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "batch length vocab"]:
    """Returns logits in at least float32.

    The arguments are those of `TokenContext`; by default, `inputs` are one
    document without padding.
    """
    context = token_context.TokenContext(
      positions,
      segment_ids,
      prefix,
      cache_length=cache_length,
      deterministic=deterministic,
    )
    x = self.hidden(inputs, context)
    return language_model.LanguageHead(self).logits(x)

  def hidden(
    self,
    inputs: Int[Array, "batch length"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the input of the head."""
    context = context.fill(self, inputs, rank=2)
    x = self._embed(inputs, context, ngrammer=self.ngrammer)
    x = self.stack(x, context)
    x = language_model.apply_norm(x, self.final_norm)
    if self.multi_token is not None and self.is_initializing():
      # Creates its variables, which only the loss of training reads.
      self.multi_token(x, inputs, context, embed=self._embed)
    return x

  def loss(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> language_model.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: `inputs`, `targets`, `positions`, `segment_ids` int32 [B,T] and
        `weights` float32 [B,T]. Optionally `prefix` bool [B,T] and
        `example_weights` float32 [B], a factor of the weights of each example.
      deterministic: Disables dropout.

    Returns:
      `(sum, weight)` of `token_loss`, in nats, and of auxiliary losses.
      Metrics, as such pairs: `log_pplx`, the negative log likelihood alone;
      `accuracy`; `z_loss` if it is part of the loss; `auxiliary_loss/...`; and,
      in training, those of `multi_token`, whose loss is added.
      Outputs, not differentiable: unweighted `token_nll` and `token_hits`
      [B,T]; `token_weights` [B,T]; weighted sums over each sequence `row_nll`,
      `row_hits` and `row_weight` [B]; values of `record`.
    """
    x = self._hidden_from_batch(batch, deterministic=deterministic)
    head = language_model.LanguageHead(self)
    module: Any = self.multi_token
    if module is None or deterministic:
      return head.loss(x, batch, deterministic=deterministic)
    further, more = module.loss(
      x,
      batch,
      embed=self._embed,
      token_loss=functools.partial(head.token_loss, deterministic=False),
    )
    # After those of `multi_token`, whose layers may have auxiliary losses.
    (total, weight), metrics, outputs = head.loss(
      x, batch, deterministic=deterministic
    )
    return (total + further, weight), metrics | more, outputs

  def token_nll(
    self, batch: language_model.Batch, *, deterministic: bool = True
  ) -> Float[Array, "batch length"]:
    """Returns the negative log likelihood of each target, differentiable."""
    x = self._hidden_from_batch(batch, deterministic=deterministic)
    return language_model.LanguageHead(self).token_nll(x, batch["targets"])

  def score(
    self, batch: language_model.Batch
  ) -> document_scores.DocumentScores:
    """Returns log likelihood and length of each document of a batch."""
    return language_model.LanguageHead(self).score(
      self._hidden_from_batch(batch, deterministic=True), batch
    )

  def prefill(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int,
    at: Int[Array, " batch"] | None = None,
  ) -> Float[Array, "batch tokens vocab"]:
    """Reads prompts into a new cache; apply with `mutable=["cache"]`.

    Prompts of several lengths are padded on the right with segment 0.

    Args:
      inputs: Token ids.
      positions: Positions, from 0 in each sequence.
      segment_ids: 1, and 0 for padding.
      cache_length: Number of slots of the cache.
      at: Index of the token of each sequence whose logits are returned,
        [B,1,V], such as the last of the prompt; `None` returns all logits.

    Raises:
      ValueError: The cache is not mutable.
    """
    context = token_context.TokenContext(
      positions, segment_ids, cache_length=cache_length
    )
    return self._prefill(inputs, context, at)

  def decode_step(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
  ) -> Float[Array, "batch length vocab"]:
    """Appends tokens to the cache; apply with `mutable=["cache"]`.

    Raises:
      ValueError: There is no cache, or it is not mutable.
    """
    check_decode_step(self)
    return self(inputs, positions, segment_ids)

  def _prefill(
    self,
    inputs: jax.Array,
    context: token_context.TokenContext,
    at: jax.Array | None,
  ) -> jax.Array:
    check_prefill(self)
    x = self.hidden(inputs, context)
    return language_model.LanguageHead(self).logits(x, at)

  def _embed(
    self,
    inputs: jax.Array,
    context: token_context.TokenContext,
    *,
    ngrammer: nn.Module | None = None,
  ) -> jax.Array:
    """Returns embedded tokens [B,T,D]."""
    return language_model.embed_tokens(
      inputs,
      context,
      embedding=self.embedding,
      position_embedding=self.position_embedding,
      norm=self.embedding_norm,
      dropout=self.embedding_dropout,
      ngrammer=ngrammer,
    )

  def _hidden_from_batch(
    self, batch: language_model.Batch, *, deterministic: bool
  ) -> jax.Array:
    context = token_context.TokenContext.from_batch(
      batch, deterministic=deterministic
    )
    return self.hidden(batch["inputs"], context)


def check_prefill(model: nn.Module) -> None:
  """Raises ValueError if a model cannot create a cache."""
  if not model.is_mutable_collection(kv_cache.COLLECTION):
    raise ValueError(
      f"{type(model).__name__}.prefill creates a cache; apply it with "
      'mutable=["cache"].'
    )


def check_decode_step(model: nn.Module) -> None:
  """Raises ValueError if a model has no mutable cache."""
  has_cache = kv_cache.COLLECTION in model.variables
  if not has_cache or not model.is_mutable_collection(kv_cache.COLLECTION):
    raise ValueError(
      f"{type(model).__name__}.decode_step needs the cache of prefill; pass "
      'the collection "cache" and mutable=["cache"].'
    )
