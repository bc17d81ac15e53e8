"""Decoder-only language model: embedding, stack, norm, head.

`loss` is what a learner calls; `prefill` and `decode_step` are what decoding
calls. All run the same layers and head, so they give the same numbers.

Letters: B batch, T length, V vocab.
"""

from collections.abc import Mapping
from typing import cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision, soft_cap, softmax_loss
from paxon.layers.attention import kv_cache

Weighted = tuple[jax.Array, jax.Array]
Batch = Mapping[str, jax.Array]


class DecoderLm(nn.Module):
  """Predicts the next token of each position.

  Attributes:
    embedding: Maps ids [B,T] to [B,T,D], and back by `attend`.
    stack: Called with tokens, positions, segment ids, and the keywords
      `cache_length` and `deterministic`.
    final_norm: Maps [B,T,D] to [B,T,D].
    head: Maps [B,T,D] to logits, each position by itself; `None` uses
      `embedding.attend` (tied).
    logit_cap: Bends logits into `(-logit_cap, logit_cap)`; `None` does not.
    token_loss: What `loss` computes from the head, and in which chunks.
    position_embedding: Called with positions [B,T] and the width of a token;
      what it returns, [B,T,D], is added to the embedded tokens. `None` leaves
      positions to the attention.
  """

  embedding: nn.Module
  stack: nn.Module
  final_norm: nn.Module
  head: nn.Module | None = None
  logit_cap: float | None = None
  token_loss: softmax_loss.SoftmaxLoss = softmax_loss.SoftmaxLoss()
  position_embedding: nn.Module | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.logit_cap is not None and not self.logit_cap > 0:
      raise ValueError(
        f"DecoderLm.logit_cap must be positive or None, got {self.logit_cap}."
      )

  def __call__(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "batch length vocab"]:
    """Returns logits in at least float32.

    Args:
      inputs: Token ids.
      positions: Positions, from 0 in each segment.
      segment_ids: Segments (documents); 0 is padding.
      cache_length: Makes a cache with this number of slots (prefill).
      deterministic: Whether dropout is off.
    """
    x = self._hidden(
      inputs,
      positions,
      segment_ids,
      cache_length=cache_length,
      deterministic=deterministic,
    )
    head = self.embedding.attend if self.head is None else self.head
    return self._capped(head(x))

  def loss(
    self, batch: Batch, *, deterministic: bool = True
  ) -> tuple[Weighted, dict[str, Weighted], dict[str, jax.Array]]:
    """Returns the loss, metrics and per-example outputs of a batch.

    Args:
      batch: `inputs`, `targets`, `positions`, `segment_ids` int32 [B,T] and
        `weights` float32 [B,T].
      deterministic: Whether dropout is off.

    Returns:
      `(sum, weight)` of what `token_loss` computes, in nats. Metrics, as such
      pairs: `log_pplx`, the negative log likelihood alone; `accuracy`; and
      `z_loss` where it is part of the loss. Outputs, none of them
      differentiable: `token_nll` [B,T] and `token_hits` [B,T], without weights,
      and their weighted sums by row, `row_nll`, `row_hits` and `row_weight`
      [B]. A packed row is several documents, told apart by `segment_ids`.
    """
    x = self._hidden(
      batch["inputs"],
      batch["positions"],
      batch["segment_ids"],
      cache_length=None,
      deterministic=deterministic,
    )
    logits_fn, variables = self._unbound_head(x)
    result = self.token_loss(
      logits_fn,
      variables,
      x,
      targets=batch["targets"],
      weights=batch["weights"],
    )
    weights = batch["weights"].astype(result.token_nll.dtype)
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
    if self.token_loss.z_loss_weight:
      metrics["z_loss"] = jnp.sum(result.token_z_loss * weights), total
    outputs = {"token_nll": result.token_nll, "token_hits": hits, **rows}
    return (result.loss, total), metrics, outputs

  def prefill(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int,
  ) -> Float[Array, "batch length vocab"]:
    """Reads prompts into a new cache; apply with `mutable=["cache"]`.

    Prompts of several lengths are padded on the right with segment 0.

    Raises:
      ValueError: The cache is not mutable.
    """
    if not self.is_mutable_collection(kv_cache.COLLECTION):
      raise ValueError(
        'DecoderLm.prefill makes a cache; apply it with mutable=["cache"].'
      )
    return self(inputs, positions, segment_ids, cache_length=cache_length)

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
    has_cache = kv_cache.COLLECTION in self.variables
    if not has_cache or not self.is_mutable_collection(kv_cache.COLLECTION):
      raise ValueError(
        "DecoderLm.decode_step needs the cache that prefill made; apply it "
        'with that collection among the variables and mutable=["cache"].'
      )
    return self(inputs, positions, segment_ids)

  def _hidden(
    self,
    inputs: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    cache_length: int | None,
    deterministic: bool,
  ) -> jax.Array:
    """Returns what the head is applied to, [B,T,D]."""
    x = self.embedding(inputs)
    if self.position_embedding is not None:
      x += self.position_embedding(positions, x.shape[-1]).astype(x.dtype)
    x = self.stack(
      x,
      positions,
      segment_ids,
      cache_length=cache_length,
      deterministic=deterministic,
    )
    return self.final_norm(x)

  def _capped(self, logits: jax.Array) -> jax.Array:
    logits = precision.widened(logits)
    if self.logit_cap is None:
      return logits
    return soft_cap.soft_cap(logits, self.logit_cap)

  def _unbound_head(
    self, x: jax.Array
  ) -> tuple[softmax_loss.LogitsFn, softmax_loss.Variables]:
    """Returns the head as a function of its variables, and these."""
    bound = self.embedding if self.head is None else self.head
    method = "attend" if self.head is None else "__call__"
    if self.is_initializing():
      # Makes the variables that are read below.
      getattr(bound, method)(x)
    # The loss calls the head in a loop, where a bound module must not be used.
    head, variables = bound.unbind()

    def logits_fn(variables: softmax_loss.Variables, x: jax.Array) -> jax.Array:
      logits = cast(jax.Array, head.apply(variables, x, method=method))
      return self._capped(logits)

    return logits_fn, variables
