"""Positions as vectors that are added to the embedded tokens.

`LearnedPositions` has one vector per position; `SinusoidalPositions` computes
them (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5). Both
are called with the positions of the tokens, which restart in each packed
document and go on while decoding, so neither counts rows by itself.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import lookup as lookup_lib
from paxon.layers import precision
from paxon.sharding import axes, checks, logical

# Standard deviation embed_dim ** -0.5: rows of length one, as those of tokens.
_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "normal", out_axis=0
)


class LearnedPositions(nn.Module):
  """A table of one learned vector per position.

  Attributes:
    max_length: Number of positions. A position beyond the last gives NaN, so
      that decoding too far cannot pass unseen.
    embedding_init: Initializer of the table; by default normal with standard
      deviation `embed_dim ** -0.5`.
    dtype: Dtype of the result. `None` takes that of the table.
    param_dtype: Dtype in which the table is stored.
    lookup: How rows are looked up (`layers.lookup`).
  """

  max_length: int
  embedding_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  lookup: lookup_lib.Lookup = lookup_lib.gather

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "max_length")

  @nn.compact
  def __call__(
    self, positions: Int[Array, "batch length"], embed_dim: int
  ) -> Float[Array, "batch length embed"]:
    """Returns the vector of each position.

    Raises:
      ValueError: A row has more tokens than there are positions, so the last
        of a document that fills it has none.
    """
    length = positions.shape[1]
    if length > self.max_length:
      raise ValueError(
        f"LearnedPositions.max_length ({self.max_length}) must be at least "
        f"the length of a row, got {length} tokens."
      )
    table = self.param(
      "table",
      # Positions are not split: a row needs any of them.
      logical.partitioned(self.embedding_init, (None, axes.EMBED)),
      (self.max_length, embed_dim),
      self.param_dtype,
    )
    (table,) = dtypes.promote_dtype(table, dtype=self.dtype)
    # Gathered whole before its use, as the table of tokens is.
    table = logical.constrain(table, (None, axes.ACTIVATION_EMBED))
    return self.lookup(table, positions)


class SinusoidalPositions(nn.Module):
  """Sines of the position, then its cosines, at slower and slower rates.

  With `n = embed_dim // 2`, feature `i` of each half has the timescale

    min_timescale * (max_timescale / min_timescale) ** (i / (n - 1))

  and is the sine (cosine) of `position / timescale`. An odd `embed_dim` ends
  with a zero. There is nothing to learn.

  Attributes:
    min_timescale: Of the fastest pair of features, in positions.
    max_timescale: Of the slowest pair.
    dtype: Dtype of the result. `None` is float32.
  """

  min_timescale: float = 1.0
  max_timescale: float = 10_000.0
  dtype: DTypeLike | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 < self.min_timescale < self.max_timescale:
      raise ValueError(
        "SinusoidalPositions.max_timescale must exceed min_timescale, which "
        f"must be positive; got {self.max_timescale} and {self.min_timescale}."
      )

  @nn.compact
  def __call__(
    self, positions: Int[Array, "batch length"], embed_dim: int
  ) -> Float[Array, "batch length embed"]:
    """Returns the vector of each position."""
    half = embed_dim // 2
    # float32 because bfloat16 cannot hold positions beyond 256 exactly.
    wide = precision.at_least_float32(self.dtype or jnp.float32)
    exponent = jnp.arange(half, dtype=wide) / max(half - 1, 1)
    ratio = self.min_timescale / self.max_timescale
    frequency = jnp.asarray(ratio, wide) ** exponent / self.min_timescale
    angle = positions.astype(wide)[:, :, None] * frequency[None, None, :]
    x = jax.lax.concatenate((jnp.sin(angle), jnp.cos(angle)), 2)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, embed_dim % 2)))
    return x.astype(self.dtype or jnp.float32)
