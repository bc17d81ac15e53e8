"""Position embeddings that are added to the embedded tokens.

`LearnedPositions` has one vector per position; `SinusoidalPositions` computes
them (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5), and
`GridPositions` those of image patches. All are called with the positions of the
tokens, which restart in each packed document and continue while decoding.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import embedding, precision
from paxon.sharding import axes, checks, logical

# Standard deviation embed_dim ** -0.5: vectors of length one, like `Embedding`.
_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "normal", out_axis=0
)


class LearnedPositions(nn.Module):
  """A table of one learned vector per position.

  Attributes:
    max_length: Number of positions. A position beyond the last gives NaN, so
      that decoding too far does not go unnoticed.
    embedding_init: Initializer of the table; by default normal with standard
      deviation `embed_dim ** -0.5`.
    dtype: Dtype of the result. `None` takes that of the table.
    param_dtype: Dtype in which the table is stored.
    lookup: `embedding.gather` or `embedding.one_hot`.
    offset: Rows of the table before that of the first position, as in OPT.
  """

  max_length: int
  embedding_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  lookup: embedding.Lookup = embedding.gather
  offset: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "max_length")

  @nn.compact
  def __call__(
    self, positions: Int[Array, "batch length"], embed_dim: int
  ) -> Float[Array, "batch length embed"]:
    """Returns the vector of each position.

    Raises:
      ValueError: Sequences are longer than `max_length`.
    """
    length = positions.shape[1]
    if length > self.max_length:
      raise ValueError(
        f"LearnedPositions.max_length ({self.max_length}) must be at least "
        f"the sequence length ({length})."
      )
    table = self.param(
      "table",
      # Not sharded over positions: every sequence needs all of them.
      logical.partitioned(
        self.embedding_init, (None, axes.EMBED), read_dtype=self.dtype
      ),
      (self.max_length + self.offset, embed_dim),
      self.param_dtype,
    )
    (table,) = dtypes.promote_dtype(table, dtype=self.dtype)
    # Gathered before its use, like the table of `Embedding`.
    table = logical.constrain(table, (None, axes.ACTIVATION_EMBED))
    if self.offset:
      positions = positions + self.offset
    return self.lookup(table, positions)


class SinusoidalPositions(nn.Module):
  """Sines of the position, then its cosines, at decreasing frequencies.

  With `n = embed_dim // 2`, feature `i` of each half has the timescale

    min_timescale * (max_timescale / min_timescale) ** (i / (n - 1))

  and is the sine (cosine) of `position / timescale`. An odd `embed_dim` ends
  with a zero. It has no parameters.

  Attributes:
    min_timescale: Timescale of the fastest features, in positions.
    max_timescale: Timescale of the slowest features.
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


class GridPositions(nn.Module):
  """Sinusoidal positions of the patches of images of one size.

  A patch at `(h, w)` of a grid [H, W] has the sines and cosines of `h - H / 2`
  and then those of `w - W / 2`, half of the features each, at the frequencies
  `max_timescale ** (-i / n)`, `i = 0 ... n - 1`. As in ViT (Dosovitskiy et al.
  2021, https://arxiv.org/abs/2010.11929, section D.4), for grids of any shape.
  Slots before and after the patches, such as class tokens, have zeros.

  Attributes:
    height: Number of patches vertically.
    width: Number of patches horizontally.
    slots_before: Number of tokens before the patches.
    slots_after: Number of tokens after them.
    max_timescale: Timescale of the slowest features, about.
    dtype: Dtype of the result. `None` is float32.
  """

  height: int
  width: int
  slots_before: int = 0
  slots_after: int = 0
  max_timescale: float = 10_000.0
  dtype: DTypeLike | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "height", "width")
    checks.check_non_negative(self, "slots_before", "slots_after")
    if not self.max_timescale > 1:
      raise ValueError(
        f"GridPositions.max_timescale must exceed 1, got {self.max_timescale}."
      )

  @property
  def length(self) -> int:
    """Number of tokens, slots included."""
    return self.slots_before + self.height * self.width + self.slots_after

  @nn.compact
  def __call__(
    self, positions: Int[Array, "batch length"], embed_dim: int
  ) -> Float[Array, "batch length embed"]:
    """Returns the vector of each token.

    Positions are indices into slots and patches, row by row; others give NaN.

    Raises:
      ValueError: `embed_dim` is not a multiple of four.
    """
    if embed_dim % 4:
      raise ValueError(
        f"GridPositions needs an embed_dim that is a multiple of 4, got"
        f" {embed_dim}."
      )
    rows = self._features(self.height, embed_dim // 2)
    columns = self._features(self.width, embed_dim // 2)
    shape = self.height, self.width, embed_dim // 2
    grid = jax.lax.concatenate(
      (
        jnp.broadcast_to(rows[:, None, :], shape),
        jnp.broadcast_to(columns[None, :, :], shape),
      ),
      2,
    ).reshape(self.height * self.width, embed_dim)
    slots = (self.slots_before, self.slots_after)
    table = jnp.pad(grid, (slots, (0, 0)))
    # Negative positions would count from the end.
    positions = jnp.where(positions < 0, self.length, positions)
    x = jnp.take(table, positions, axis=0, mode="fill")
    return x.astype(self.dtype or jnp.float32)

  def _features(self, size: int, features: int) -> jax.Array:
    """Returns sines and cosines of each coordinate, [size, features]."""
    half = features // 2
    wide = precision.at_least_float32(self.dtype or jnp.float32)
    exponent = jnp.arange(half, dtype=wide) / half
    frequency = jnp.asarray(self.max_timescale, wide) ** -exponent
    coordinate = jnp.arange(size, dtype=wide) - size / 2
    angle = coordinate[:, None] * frequency[None, :]
    return jax.lax.concatenate((jnp.sin(angle), jnp.cos(angle)), 1)
