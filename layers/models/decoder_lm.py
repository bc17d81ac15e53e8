"""Decoder-only language model: embedding, stack, norm, head.

`loss` is what a learner calls; `prefill` and `decode_step` are what decoding
calls. All run the same `__call__`, so they give the same numbers.

Letters: B batch, T length, V vocab.
"""

from collections.abc import Mapping

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision, softmax_cross_entropy
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
    head: Maps [B,T,D] to logits; `None` uses `embedding.attend` (tied).
  """

  embedding: nn.Module
  stack: nn.Module
  final_norm: nn.Module
  head: nn.Module | None = None

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
    x = self.embedding(inputs)
    x = self.stack(
      x,
      positions,
      segment_ids,
      cache_length=cache_length,
      deterministic=deterministic,
    )
    x = self.final_norm(x)
    head = self.embedding.attend if self.head is None else self.head
    return precision.widened(head(x))

  def loss(
    self, batch: Batch, *, deterministic: bool = True
  ) -> tuple[Weighted, dict[str, Weighted], dict[str, jax.Array]]:
    """Returns the loss, metrics and per-token outputs of a batch.

    Args:
      batch: `inputs`, `targets`, `positions`, `segment_ids` int32 [B,T] and
        `weights` float32 [B,T].
      deterministic: Whether dropout is off.

    Returns:
      `(sum, weight)` of the negative log likelihood in nats; the metrics
      `log_pplx` and `accuracy` as such pairs; and `token_nll` [B,T].
    """
    logits = self(
      batch["inputs"],
      batch["positions"],
      batch["segment_ids"],
      deterministic=deterministic,
    )
    targets, weights = batch["targets"], batch["weights"]
    nll = softmax_cross_entropy.softmax_cross_entropy(logits, targets)
    weights = weights.astype(nll.dtype)
    total = jnp.sum(weights)
    loss = jnp.sum(nll * weights), total
    best = jnp.argmax(logits, axis=-1).astype(targets.dtype)
    hits = (best == targets).astype(nll.dtype)
    metrics = {"log_pplx": loss, "accuracy": (jnp.sum(hits * weights), total)}
    return loss, metrics, {"token_nll": nll}

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
