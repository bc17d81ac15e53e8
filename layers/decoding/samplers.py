"""Samplers: how the next id is chosen from logits.

A sampler is a function `(logits [B,V] float32, key) -> ids [B] int32`. Where
two ids have the same logit, the smaller one counts as more likely, so that
every set below has exactly the size that was asked for.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from paxon.sharding import checks

Sampler = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Takes the most likely id."""

  def __call__(
    self, logits: Float[Array, "batch vocab"], key: Key[Array, ""]
  ) -> Int[Array, " batch"]:
    """Returns the first id of the largest logit; `key` is not used."""
    del key
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
  """Draws from `softmax(logits / temperature)`, optionally cut to its head.

  `top_k` cuts first, and `top_p` counts in what is left of it.

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
    _check_cuts(self)

  def __call__(
    self, logits: Float[Array, "batch vocab"], key: Key[Array, ""]
  ) -> Int[Array, " batch"]:
    """Returns one id per row."""
    ids = jax.random.categorical(key, self.log_weights(logits), axis=-1)
    return ids.astype(jnp.int32)

  def log_weights(
    self, logits: Float[Array, "batch vocab"]
  ) -> Float[Array, "batch vocab"]:
    """Returns the logits of the distribution drawn from; -inf is cut."""
    return _cut(logits / self.temperature, self.top_k, self.top_p)


# Arrays cannot be compared for equality, so it is equal to itself only.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowTemperatures:
  """`Temperature` with a temperature for each row; made inside of a step.

  Attributes:
    temperatures: Float [B]; 0 takes the most likely id of that row.
    top_k: As that of `Temperature`, for all rows.
    top_p: As that of `Temperature`, for all rows.
  """

  temperatures: jax.Array
  top_k: int | None = None
  top_p: float | None = None

  def __post_init__(self) -> None:
    _check_cuts(self)

  def __call__(
    self, logits: Float[Array, "batch vocab"], key: Key[Array, ""]
  ) -> Int[Array, " batch"]:
    """Returns one id per row.

    Raises:
      ValueError: The rows are not those of `temperatures`.
    """
    at = self.temperatures
    if at.shape != logits.shape[:1]:
      raise ValueError(
        f"RowTemperatures.temperatures of shape {at.shape} must have one entry "
        f"for each of the {logits.shape[0]} rows (all samples of all prompts)."
      )
    greedy = at <= 0
    divisor = jnp.where(greedy, 1.0, at).astype(logits.dtype)
    weights = _cut(logits / divisor[:, None], self.top_k, self.top_p)
    drawn = jax.random.categorical(key, weights, axis=-1)
    best = jnp.argmax(logits, axis=-1)
    return jnp.where(greedy, best, drawn).astype(jnp.int32)


def _check_cuts(sampler: Any) -> None:
  checks.check_positive(sampler, "top_k")
  checks.check_interval(sampler, "(0, 1]", "top_p")


def _cut(
  logits: jax.Array, top_k: int | None, top_p: float | None
) -> jax.Array:
  """Returns logits that are -inf outside of the head of each row."""
  vocab = logits.shape[-1]
  top_k = vocab if top_k is None else min(top_k, vocab)
  top_p = 1.0 if top_p is None else top_p
  if top_k == vocab and top_p == 1:
    return logits
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  keep = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, 1) < top_k
  # Rounded sums can reach 1 before the last id, so 1 is not a sum to compare.
  if top_p < 1:
    weights = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    keep &= before < top_p
  rank = jnp.argsort(order, axis=-1)
  keep = jnp.take_along_axis(keep, rank, axis=-1)
  return jnp.where(keep, logits, -jnp.inf)
