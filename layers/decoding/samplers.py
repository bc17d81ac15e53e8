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
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None

  def __post_init__(self) -> None:
    if not 0 < self.temperature < math.inf:
      raise ValueError(
        f"Temperature.temperature must be positive, got {self.temperature}; "
        "use Greedy for the limit 0."
      )
    checks.check_positive(self, "top_k")
    checks.check_interval(self, "(0, 1]", "top_p")

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
    return _truncate(logits / self.temperature, self.top_k, self.top_p)


def _truncate(
  logits: jax.Array, top_k: int | None, top_p: float | None
) -> jax.Array:
  """Returns logits that are -inf for truncated ids."""
  vocab = logits.shape[-1]
  top_k = vocab if top_k is None else min(top_k, vocab)
  top_p = 1.0 if top_p is None else top_p
  if top_k == vocab and top_p == 1:
    return logits
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  keep = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, 1) < top_k
  # Rounded sums can reach 1 before the last id, so 1 must not be compared.
  if top_p < 1:
    weights = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    keep &= before < top_p
  rank = jnp.argsort(order, axis=-1)
  keep = jnp.take_along_axis(keep, rank, axis=-1)
  return jnp.where(keep, logits, -jnp.inf)
