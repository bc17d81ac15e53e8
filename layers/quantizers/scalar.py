"""Quantization without codebooks: each feature is rounded by itself.

Finite scalar quantization (Mentzer et al. 2023,
https://arxiv.org/abs/2309.15505) rounds feature i to one of L[i] levels:

  h = (L - 1) * (1 - 0.001) / 2,  o = 1/2 for even L, else 0
  y = round(tanh(z + tan(o / h)) * h - o) / floor(L / 2)

Lookup-free quantization (Yu et al. 2023, https://arxiv.org/abs/2310.05737)
keeps the sign of each feature, +1 or -1, with two terms of the loss:

  beta * |z - sg(y)|**2 + weight * (mean of H(p(z)) - H(mean of p(z)))

where p(z) is the softmax of -|z - c|**2 / temperature over all codes c: each
vector should be sure of its code, and codes should be used equally often.

Letters: B batch, T length, D features, K codes.
"""

from collections.abc import Sequence
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from paxon.layers.quantizers import codes
from paxon.sharding import checks

_MARGIN = 1e-3
# The distribution over all codes is computed for each position.
_MAX_ENTROPY_BITS = 12


class FiniteScalarQuantizer(nn.Module):
  """Rounds each feature to its levels; there is nothing to train.

  Attributes:
    levels: Number of levels of each feature, at least 2.
  """

  levels: Sequence[int]

  def __post_init__(self) -> None:
    self.levels = tuple(self.levels)
    super().__post_init__()
    if not self.levels or min(self.levels) < 2:
      raise ValueError(
        "FiniteScalarQuantizer.levels must be numbers of at least 2, got"
        f" {self.levels}."
      )
    if self.num_codes > np.iinfo(np.int32).max:
      raise ValueError(
        f"FiniteScalarQuantizer.levels {self.levels} have more codes than"
        " int32 has numbers."
      )

  @property
  def num_codes(self) -> int:
    """Number of combinations of levels."""
    return math.prod(self.levels)

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> codes.Codes:
    """Returns the codes of the vectors, in [-1, 1].

    The id counts the levels of the first feature first. The gradient is that of
    the bounded vector, before rounding.

    Args:
      x: Vectors; may be NaN where they are masked.
      mask: True for real positions; `None` is all.
      deterministic: Ignored.

    Raises:
      ValueError: The number of features is not that of levels.
    """
    del deterministic
    _check_features(self, "levels", len(self.levels), x)
    z = codes.clear(x, mask)
    levels = np.asarray(self.levels)
    half = (levels - 1) * (1 - _MARGIN) / 2
    offset = np.where(levels % 2, 0.0, 0.5)
    shift = jnp.asarray(np.tan(offset / half), z.dtype)[None, None]
    scale = jnp.asarray(half, z.dtype)[None, None]
    bounded = jnp.tanh(z + shift) * scale
    bounded -= jnp.asarray(offset, z.dtype)[None, None]
    rounded = jnp.round(bounded)
    middle = levels // 2
    width = jnp.asarray(middle, z.dtype)[None, None]
    basis = np.cumprod([1, *self.levels[:-1]])
    digits = (
      rounded.astype(jnp.int32) + jnp.asarray(middle, jnp.int32)[None, None]
    )
    ids = jnp.sum(
      digits * jnp.asarray(basis, jnp.int32)[None, None], axis=-1, keepdims=True
    )
    return codes.finish(
      bounded / width,
      rounded / width,
      ids,
      jnp.zeros(z.shape[:2], z.dtype),
      mask,
    )


class LookupFreeQuantizer(nn.Module):
  """Keeps the signs of features.

  Attributes:
    num_bits: Number of features.
    beta: Weight of the commitment to the signs.
    entropy_weight: Weight of the entropies; 0 leaves them out.
    temperature: Temperature of the distribution over codes.
  """

  num_bits: int
  beta: float = 0.25
  entropy_weight: float = 0.1
  temperature: float = 1.0

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_bits")
    checks.check_non_negative(self, "beta", "entropy_weight")
    checks.check_positive(self, "temperature")
    most = _MAX_ENTROPY_BITS if self.entropy_weight else 31
    if self.num_bits > most:
      raise ValueError(
        f"LookupFreeQuantizer.num_bits must be at most {most}"
        f"{' with an entropy_weight' if self.entropy_weight else ''}, got"
        f" {self.num_bits}."
      )

  @property
  def num_codes(self) -> int:
    """Number of codes."""
    return 2**self.num_bits

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> codes.Codes:
    """Returns the codes of the vectors; bit i of the id is feature i.

    Args:
      x: Vectors; may be NaN where they are masked.
      mask: True for real positions; `None` is all.
      deterministic: Ignored; the losses are those of training.

    Raises:
      ValueError: The number of features is not `num_bits`.
    """
    del deterministic
    _check_features(self, "num_bits", self.num_bits, x)
    z = codes.clear(x, mask)
    is_set = z > 0
    values = jnp.where(is_set, 1.0, -1.0).astype(z.dtype)
    bits = 1 << np.arange(self.num_bits)
    ids = jnp.sum(
      is_set.astype(jnp.int32) * jnp.asarray(bits, jnp.int32)[None, None],
      axis=-1,
      keepdims=True,
    )
    losses = self.beta * jnp.sum(jnp.square(z - values), axis=-1)
    found = codes.finish(z, values, ids, losses, mask)
    if not self.entropy_weight:
      return found
    return found._replace(
      loss=found.loss + self.entropy_weight * self._entropies(z, mask)
    )

  @nn.nowrap
  def _entropies(self, z: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns the mean entropy less the entropy of the mean."""
    # Squared distances to +1 and -1 differ by 4z; features are independent.
    of_set = jax.nn.log_sigmoid(4 * z / self.temperature)
    of_unset = jax.nn.log_sigmoid(-4 * z / self.temperature)
    # Of the bits so far, the last one slowest.
    log_probs = jnp.zeros((*z.shape[:2], 1), z.dtype)
    for i in range(self.num_bits):
      log_probs = jnp.concatenate(
        [log_probs + of_unset[..., i, None], log_probs + of_set[..., i, None]],
        axis=-1,
      )
    probs = jnp.exp(log_probs)
    own = -jnp.sum(probs * log_probs, axis=-1)
    weights = jnp.ones(z.shape[:2], z.dtype)
    if mask is not None:
      weights = mask.astype(z.dtype)
    weights /= jnp.maximum(jnp.sum(weights), 1)
    mean = jnp.einsum("BT,BTK->K", weights, probs)
    return jnp.sum(weights * own) - codes.entropy(mean)


def _check_features(
  layer: nn.Module, name: str, count: int, x: jax.Array
) -> None:
  if x.shape[-1] != count:
    raise ValueError(
      f"{type(layer).__name__}.{name} is for {count} features, got"
      f" {x.shape[-1]}."
    )
