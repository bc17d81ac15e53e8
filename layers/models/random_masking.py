"""Random masking of tokens for masked language models.

Each token is selected with probability `rate` and predicted. Most selected
tokens become the mask id, some a random id and the others stay (Devlin et al.
2018, https://arxiv.org/abs/1810.04805, appendix A.1).
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp

from paxon.sharding import checks

# Random stream that training passes to models.
STREAM = "masking"

# A large odd number; its powers modulo 2**32 distinguish permuted sequences.
_FACTOR = 0x9E3779B1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomMasking:
  """Selects and masks tokens.

  Attributes:
    mask_id: Id of the mask token.
    vocab_size: Random ids are drawn from `[0, vocab_size)`.
    rate: Probability that a token is selected.
    mask_share: Fraction of the selected tokens that become `mask_id`.
    random_share: Fraction of the selected tokens that become a random id.
    special_ids: Ids that are never selected, such as begin and end tokens.
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
      key: Random key. `None` derives a key from the ids of each sequence, so
        that evaluation always masks the same tokens of a text.
    """
    ids, weights = batch["inputs"], batch["weights"]
    if key is None:
      keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.key(0), _hashes(ids)
      )
      draws = jax.vmap(lambda k: self._draw(k, ids.shape[1:]))(keys)
    else:
      draws = self._draw(key, ids.shape)
    selection, replacement, other = draws
    allowed = (batch["segment_ids"] != 0) & (weights != 0)
    for special in self.special_ids:
      allowed &= ids != special
    selected = allowed & (selection < self.rate)
    is_masked = replacement < self.mask_share
    is_random = ~is_masked & (replacement < self.mask_share + self.random_share)
    masked = jnp.where(is_random, other.astype(ids.dtype), ids)
    masked = jnp.where(is_masked, jnp.asarray(self.mask_id, ids.dtype), masked)
    return {
      "inputs": jnp.where(selected, masked, ids),
      "targets": ids,
      "weights": jnp.where(selected, weights, jnp.zeros_like(weights)),
    }

  def _draw(
    self, key: jax.Array, shape: tuple[int, ...]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns random numbers of each token: selection, replacement, id."""
    keys = jax.random.split(key, 3)
    return (
      jax.random.uniform(keys[0], shape),
      jax.random.uniform(keys[1], shape),
      jax.random.randint(keys[2], shape, 0, self.vocab_size),
    )


def _hashes(ids: jax.Array) -> jax.Array:
  """Returns a hash of each sequence, uint32 [B]."""
  factors = [pow(_FACTOR, i, 2**32) for i in range(1, ids.shape[1] + 1)]
  powers = jnp.asarray(factors, jnp.uint32)
  return jnp.sum(ids.astype(jnp.uint32) * powers[None], axis=1)
