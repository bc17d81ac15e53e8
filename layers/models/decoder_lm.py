"""Decoder-only language model: embedding, stack, norm, head.

`loss` is what a learner calls; `prefill` and `decode_step` are what decoding
calls. All run the same layers and head, so they give the same numbers.

Letters: B batch, T length, V vocab.
"""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import jax
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import softmax_loss
from paxon.layers.attention import kv_cache
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import (
  document_scores,
  embedded_tokens,
  language_head,
)


class DecoderLm(nn.Module):
  """Predicts the next token of each position.

  Attributes:
    embedding: Maps ids [B,T] to [B,T,D], and back by `attend`.
    stack: Called with tokens, positions, segment ids, the prefix where there is
      one, and the keywords `cache_length` and `deterministic`.
    final_norm: Maps [B,T,D] to [B,T,D]; `None` where the last block ends with a
      norm.
    head: Maps [B,T,D] to logits, each position by itself; `None` uses
      `embedding.attend` (tied).
    logit_cap: Bends logits into `(-logit_cap, logit_cap)`; `None` does not.
    token_loss: What `loss` computes from the head, and in which chunks.
    position_embedding: Called with positions [B,T] and the width of a token;
      what it returns, [B,T,D], is added to the embedded tokens. `None` leaves
      positions to the attention.
    embedding_norm: Maps that sum to what the stack is given; `None` leaves it.
    embedding_dropout: Called with it and `deterministic`; `None` is no dropout.
    record: What `loss` adds to its outputs: `activations` [B,T,D], which the
      head is applied to, and `logits` [B,T,V].
    auxiliary_loss_weight: Factor of the losses that layers add themselves
      (`layers.auxiliary_loss`); 0 leaves them out.
  """

  embedding: nn.Module
  stack: nn.Module
  final_norm: nn.Module | None
  head: nn.Module | None = None
  logit_cap: float | None = None
  token_loss: softmax_loss.SoftmaxLoss = softmax_loss.SoftmaxLoss()
  position_embedding: nn.Module | None = None
  embedding_norm: nn.Module | None = None
  embedding_dropout: nn.Module | None = None
  record: Sequence[str] = ()
  auxiliary_loss_weight: float = 1.0

  def __post_init__(self) -> None:
    # A tuple keeps the module hashable where a list was given.
    self.record = tuple(self.record)
    super().__post_init__()
    language_head.check(self)

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

    Args:
      inputs: Token ids.
      positions: Positions, from 0 in each segment; None counts from 0 in each
        sequence.
      segment_ids: Segments (documents); 0 is padding. None is one document
        without padding.
      prefix: Tokens of a document that see each other in both directions; for
        blocks that take it.
      cache_length: Makes a cache with this number of slots (prefill).
      deterministic: Whether dropout is off.
    """
    x = self.hidden(
      inputs,
      positions,
      segment_ids,
      prefix,
      cache_length=cache_length,
      deterministic=deterministic,
    )
    return language_head.LanguageHead(self).logits(x)

  def hidden(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    prefix: Bool[Array, "batch length"] | None = None,
    *,
    cache_length: int | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "batch length embed"]:
    """Returns what the head is applied to; called as the model is."""
    positions, segment_ids = attention_mask.fill_tokens(
      self, inputs, positions, segment_ids, prefix, rank=2
    )
    x = embedded_tokens.embedded(
      inputs,
      positions,
      embedding=self.embedding,
      position_embedding=self.position_embedding,
      norm=self.embedding_norm,
      dropout=self.embedding_dropout,
      deterministic=deterministic,
    )
    # Only where it is given, so that a block need not know of it.
    more: tuple[Any, ...] = () if prefix is None else (prefix,)
    x = self.stack(
      x,
      positions,
      segment_ids,
      *more,
      cache_length=cache_length,
      deterministic=deterministic,
    )
    return embedded_tokens.normed(x, self.final_norm)

  def loss(
    self, batch: language_head.Batch, *, deterministic: bool = True
  ) -> language_head.Result:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: `inputs`, `targets`, `positions`, `segment_ids` int32 [B,T] and
        `weights` float32 [B,T]. Where they are there, `prefix` bool [B,T], as
        the model is called with, and `example_weights` float32 [B], a factor of
        the weights of each row.
      deterministic: Whether dropout is off.

    Returns:
      `(sum, weight)` of what `token_loss` computes, in nats, and of what layers
      add. Metrics, as such pairs: `log_pplx`, the negative log likelihood
      alone; `accuracy`; `z_loss` where it is part of the loss; and
      `auxiliary_loss/...`. Outputs, none of them differentiable: `token_nll`
      [B,T] and `token_hits` [B,T], without weights; `token_weights` [B,T];
      their weighted sums by row, `row_nll`, `row_hits` and `row_weight` [B];
      and what is recorded. A packed row is several documents, told apart by
      `segment_ids`.
    """
    return language_head.LanguageHead(self).loss(
      self._states(batch, deterministic=deterministic),
      batch,
      deterministic=deterministic,
    )

  def score(self, batch: language_head.Batch) -> document_scores.DocumentScores:
    """Returns the log likelihood of each document, and its length.

    Args:
      batch: As that of `loss`.
    """
    return language_head.LanguageHead(self).score(
      self._states(batch, deterministic=True), batch
    )

  def prefill(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int,
    at: Int[Array, " batch"] | None = None,
  ) -> Float[Array, "batch places vocab"]:
    """Reads prompts into a new cache; apply with `mutable=["cache"]`.

    Prompts of several lengths are padded on the right with segment 0.

    Args:
      inputs: Token ids.
      positions: Positions, from 0 in each row.
      segment_ids: 1, and 0 for padding.
      cache_length: Number of slots of the cache.
      at: The place in each row whose logits are returned, [B,1,V], such as the
        last of the prompt; `None` returns those of all.

    Raises:
      ValueError: The cache is not mutable.
    """
    return self._prefilled(
      inputs, positions, segment_ids, None, cache_length=cache_length, at=at
    )

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

  def _prefilled(
    self,
    inputs: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    prefix: jax.Array | None,
    *,
    cache_length: int,
    at: jax.Array | None,
  ) -> jax.Array:
    check_prefill(self)
    x = self.hidden(
      inputs, positions, segment_ids, prefix, cache_length=cache_length
    )
    return language_head.LanguageHead(self).logits(x, at)

  def _states(
    self, batch: language_head.Batch, *, deterministic: bool
  ) -> jax.Array:
    return self.hidden(
      batch["inputs"],
      batch["positions"],
      batch["segment_ids"],
      batch.get("prefix"),
      deterministic=deterministic,
    )


def check_prefill(model: nn.Module) -> None:
  """Raises ValueError where a model cannot make a cache."""
  if not model.is_mutable_collection(kv_cache.COLLECTION):
    raise ValueError(
      f"{type(model).__name__}.prefill makes a cache; apply it with "
      'mutable=["cache"].'
    )


def check_decode_step(model: nn.Module) -> None:
  """Raises ValueError where a model has no cache to append to."""
  has_cache = kv_cache.COLLECTION in model.variables
  if not has_cache or not model.is_mutable_collection(kv_cache.COLLECTION):
    raise ValueError(
      f"{type(model).__name__}.decode_step needs the cache that prefill made; "
      "apply it with that collection among the variables and "
      'mutable=["cache"].'
    )
