"""Sinusoidal positions of a grid of patches, with room for class tokens.

A patch in row `h` and column `w` of a grid [H, W] has the waves of `h - H / 2`
and then those of `w - W / 2`, half of the features each. The waves of a
position are its sines at the frequencies `max_timescale ** (-i / n)`,
`i = 0 ... n - 1`, and then its cosines. As in ViT (Dosovitskiy et al. 2021,
https://arxiv.org/abs/2010.11929, section D.4), for grids of any shape.

Slots before and after the patches, which class tokens take, have zeros.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.sharding import checks


class GridPositions(nn.Module):
  """Vectors of the patches of images of one size, row by row.

  Attributes:
    height: Number of rows of patches.
    width: Number of columns.
    slots_before: Number of tokens before the patches.
    slots_after: Number of tokens after them.
    max_timescale: Of the slowest waves, about.
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
    for field in ("slots_before", "slots_after"):
      if getattr(self, field) < 0:
        raise ValueError(
          f"GridPositions.{field} must not be negative, got "
          f"{getattr(self, field)}."
        )
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

    Args:
      positions: Numbers of tokens in the sequence of slots and patches, as
        other position embeddings are given them. Others than those give NaN.
      embed_dim: Width of a token, a multiple of four.

    Raises:
      ValueError: `embed_dim` is no multiple of four.
    """
    if embed_dim % 4:
      raise ValueError(
        f"GridPositions needs an embed_dim that 4 divides, got {embed_dim}."
      )
    rows = self._waves(self.height, embed_dim // 2)
    columns = self._waves(self.width, embed_dim // 2)
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
    known = jnp.where(positions < 0, self.length, positions)
    x = jnp.take(table, known, axis=0, mode="fill")
    return x.astype(self.dtype or jnp.float32)

  def _waves(self, size: int, features: int) -> jax.Array:
    """Returns [size, features]."""
    half = features // 2
    wide = precision.at_least_float32(self.dtype or jnp.float32)
    exponent = jnp.arange(half, dtype=wide) / half
    frequency = jnp.asarray(self.max_timescale, wide) ** -exponent
    place = jnp.arange(size, dtype=wide) - size / 2
    angle = place[:, None] * frequency[None, :]
    return jax.lax.concatenate((jnp.sin(angle), jnp.cos(angle)), 1)
