"""Samplers of the next token: greedy, temperature, top-k and top-p.

A sampler is a function `(logits [B,V] float32, key) -> ids [B] int32`. Of equal
logits the smaller id counts as more likely, so `top_k=k` keeps exactly `k` ids.
"""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from paxon.sharding import checks

Sampler = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Selects the most likely id."""

  def __call__(
    self, logits: Float[Array, "batch vocab"], key: Key[Array, ""]
  ) -> Int[Array, " batch"]:
    """Returns the first id of the largest logit; `key` is not used."""
    del key
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
  """Samples from `softmax(logits / temperature)`, optionally truncated.

  `top_k` is applied first, then `top_p`.

  Attributes:
    temperature: Below 1 sharpens, above 1 flattens.
    top_k: Keep the `top_k` most likely ids; None, or the vocabulary or more,
      keeps all.
    top_p: Keep the fewest most likely ids that together have at least this
      probability (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751);
      None or 1 keeps all.
    global_normalize: Whether `top_p` counts probabilities of the whole
      vocabulary, not of the ids that `top_k` keeps.
    top_k_recall: Expected share of the `top_k` most likely ids that are found.
      Below 1 TPUs find them faster (`jax.lax.approx_max_k`; Chern et al. 2022,
      https://arxiv.org/abs/2206.14286).
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  global_normalize: bool = False
  top_k_recall: float = 1.0

  def __post_init__(self) -> None:
    if not 0 < self.temperature < math.inf:
      raise ValueError(
        f"Temperature.temperature must be positive, got {self.temperature}; "
        "use Greedy for the limit 0."
      )
    checks.check_positive(self, "top_k")
    checks.check_interval(self, "(0, 1]", "top_p", "top_k_recall")
    for name, given in (
      ("global_normalize", self.global_normalize),
      ("top_k_recall", self.top_k_recall < 1),
    ):
      if given and self.top_k is None:
        raise ValueError(f"Temperature.{name} requires top_k, which is None.")

  def __call__(
    self, logits: Float[Array, "batch vocab"], key: Key[Array, ""]
  ) -> Int[Array, " batch"]:
    """Returns one id per sequence."""
    ids = jax.random.categorical(key, self.log_weights(logits), axis=-1)
    return ids.astype(jnp.int32)

  def log_weights(
    self, logits: Float[Array, "batch vocab"]
  ) -> Float[Array, "batch vocab"]:
    """Returns the logits of the truncated distribution."""
    logits = logits / self.temperature
    vocab = logits.shape[-1]
    if self.top_k is not None and self.top_k < vocab and self.top_k_recall < 1:
      return self._truncate_approximately(logits)
    return self._truncate(logits)

  def _truncate_approximately(self, logits: jax.Array) -> jax.Array:
    """Returns logits that are -inf for ids that are not found or truncated."""
    assert self.top_k is not None
    best, ids = jax.lax.approx_max_k(
      logits, self.top_k, recall_target=self.top_k_recall
    )
    keep = self._covers(best, logits)
    at = jnp.arange(len(logits))[:, None]
    kept = jnp.where(keep, best, -jnp.inf)
    return jnp.full_like(logits, -jnp.inf).at[at, ids].set(kept)

  def _covers(self, ranked: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns which logits, in descending order, `top_p` keeps.

    `logits` are those of the vocabulary.
    """
    # Rounded sums can reach 1 before the last id, so 1 must not be compared.
    if self.top_p is None or self.top_p == 1:
      return jnp.ones_like(ranked, bool)
    counted = logits if self.global_normalize else ranked
    total = jax.nn.logsumexp(counted, axis=-1, keepdims=True)
    weights = jnp.exp(ranked - total)
    return jnp.cumsum(weights, axis=-1) - weights < self.top_p

  def _truncate(self, logits: jax.Array) -> jax.Array:
    """Returns logits that are -inf for truncated ids."""
    vocab = logits.shape[-1]
    top_k = vocab if self.top_k is None else min(self.top_k, vocab)
    if top_k == vocab and self.top_p in (None, 1):
      return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    keep = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, 1) < top_k
    keep &= self._covers(jnp.where(keep, ranked, -jnp.inf), logits)
    keep = jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(keep, logits, -jnp.inf)
