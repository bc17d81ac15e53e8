"""Hides random tokens of a text, for masked language models.

Each token of a text is chosen with probability `rate`. Of the chosen ones most
become the mask's id, some a random id and the others stay (Devlin et al. 2018,
https://arxiv.org/abs/1810.04805, appendix A.1); all chosen ones are predicted.
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp

from paxon.sharding import checks

# The random stream that training gives to models.
STREAM = "masking"

# A large odd number; its powers modulo 2**32 tell apart rows that have the same
# ids in another order.
_FACTOR = 0x9E3779B1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomMasking:
  """How tokens are chosen, and what becomes of them.

  Attributes:
    mask_id: The id that hides a token.
    vocab_size: Random ids are drawn from `[0, vocab_size)`.
    rate: Probability that a token is chosen.
    mask_share: Share of the chosen tokens that become `mask_id`.
    random_share: Share of the chosen tokens that become a random id.
    special_ids: Ids that are never chosen, such as marks of beginning and end.
  """

  mask_id: int
  vocab_size: int
  rate: float = 0.15
  mask_share: float = 0.8
  random_share: float = 0.1
  special_ids: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    if not 0 <= self.mask_id < self.vocab_size:
      raise ValueError(
        f"RandomMasking.mask_id ({self.mask_id}) must be an id below "
        f"vocab_size ({self.vocab_size})."
      )
    checks.check_interval(self, "(0, 1)", "rate")
    shares = self.mask_share, self.random_share
    if not (min(shares) >= 0 and sum(shares) <= 1):
      raise ValueError(
        "RandomMasking.mask_share and random_share must not be negative and "
        f"at most 1 together, got {shares[0]} and {shares[1]}."
      )

  def __call__(
    self, batch: Mapping[str, jax.Array], *, key: jax.Array | None
  ) -> dict[str, jax.Array]:
    """Returns `inputs`, `targets` and `weights` of a masked batch.

    Args:
      batch: `inputs`, `segment_ids` int32 [B,T] and `weights` float [B,T].
        Padding (segment 0) and weights of zero exclude tokens.
      key: Random key. `None` draws from a key that follows from the ids of each
        row, so that evaluation hides the same tokens of a text every time.
    """
    ids, weights = batch["inputs"], batch["weights"]
    if key is None:
      keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.key(0), _hashes(ids)
      )
      draws = jax.vmap(lambda k: self._draw(k, ids.shape[1:]))(keys)
    else:
      draws = self._draw(key, ids.shape)
    chance, fate, other = draws
    allowed = (batch["segment_ids"] != 0) & (weights != 0)
    for special in self.special_ids:
      allowed &= ids != special
    chosen = allowed & (chance < self.rate)
    is_masked = fate < self.mask_share
    is_random = ~is_masked & (fate < self.mask_share + self.random_share)
    hidden = jnp.where(is_random, other.astype(ids.dtype), ids)
    hidden = jnp.where(is_masked, jnp.asarray(self.mask_id, ids.dtype), hidden)
    return {
      "inputs": jnp.where(chosen, hidden, ids),
      "targets": ids,
      "weights": jnp.where(chosen, weights, jnp.zeros_like(weights)),
    }

  def _draw(
    self, key: jax.Array, shape: tuple[int, ...]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what decides about each token: chance, fate and another id."""
    keys = jax.random.split(key, 3)
    return (
      jax.random.uniform(keys[0], shape),
      jax.random.uniform(keys[1], shape),
      jax.random.randint(keys[2], shape, 0, self.vocab_size),
    )


def _hashes(ids: jax.Array) -> jax.Array:
  """Returns a number of each row of ids, uint32 [B]."""
  factors = [pow(_FACTOR, i, 2**32) for i in range(1, ids.shape[1] + 1)]
  powers = jnp.asarray(factors, jnp.uint32)
  return jnp.sum(ids.astype(jnp.uint32) * powers[None], axis=1)
