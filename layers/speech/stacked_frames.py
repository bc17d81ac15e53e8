"""Frames of a sequence stacked over time, and unstacked.

Output `t` has the frames `t * stride - left ... t * stride + right` side by
side, the oldest first. With `left=1, right=1, stride=3`

  [4] [1] [9] [3] [5] [2] [8]  ->  [0 4 1] [9 3 5] [2 8 0]

so speech at a hundred frames a second becomes a shorter sequence of wider ones.
There is nothing to learn.
"""

from collections.abc import Callable
import dataclasses
import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from paxon.sharding import checks


class Edge(enum.Enum):
  """The values of frames before the first and after the last."""

  ZEROS = "zeros"
  # The first or last frame again.
  REPEAT = "repeat"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedFrames:
  """Stacks frames, and unstacks them.

  Attributes:
    left: Number of frames before the one in the middle.
    right: Number of frames after it.
    stride: Distance of the frames in the middle.
    left_edge: Values before the first frame.
    right_edge: Values after the last frame of a sequence.
    reduce: Reduces the masks of stacked frames, `jnp.any` or `jnp.all`. Zeros
      beyond an edge are masked; a repeated frame has the mask of the edge.
  """

  left: int = 0
  right: int = 0
  stride: int = 1
  left_edge: Edge = Edge.ZEROS
  right_edge: Edge = Edge.ZEROS
  reduce: Callable[..., jax.Array] = jnp.any

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "left", "right")
    checks.check_positive(self, "stride")

  @property
  def window(self) -> int:
    """Number of stacked frames."""
    return self.left + 1 + self.right

  def __call__(
    self,
    x: Float[Array, "batch time features"],
    mask: Bool[Array, "batch time"],
  ) -> tuple[Float[Array, "batch out wide"], Bool[Array, "batch out"]]:
    """Returns ceil(time / stride) stacked frames, and their mask.

    The mask is true for real frames.
    """
    stacked = self._stack(x)
    kept = self._stack(mask[:, :, None])
    return stacked.reshape(*stacked.shape[:2], -1), self.reduce(
      kept[..., 0], axis=2
    )

  def unstack(
    self, stacked: Float[Array, "batch out wide"]
  ) -> Float[Array, "batch time features"]:
    """Returns the frames, each from the nearest window.

    There are `(out - 1) * stride + 1 + right` of them: as many as there were,
    or more, or up to `stride - 1 - right` less.

    Raises:
      ValueError: Windows leave out frames, or the width is not that of one.
    """
    batch, out, wide = stacked.shape
    if self.stride > self.window:
      raise ValueError(
        f"StackedFrames.stride ({self.stride}) must be at most its window "
        f"({self.window}), or frames between windows are lost."
      )
    if wide % self.window:
      raise ValueError(
        f"The width of stacked frames must be a multiple of {self.window}, got "
        f"{wide}."
      )
    time = np.arange((out - 1) * self.stride + 1 + self.right)
    after = time % self.stride
    # The last window has no successor.
    last = time >= (out - 1) * self.stride
    in_next = (after > self.right) & ~last
    window = np.where(last, out - 1, time // self.stride + in_next)
    frame = self.left + time - window * self.stride
    parts = stacked.reshape(batch, out, self.window, -1)
    return parts[:, window, frame]

  def _stack(self, x: jax.Array) -> jax.Array:
    """Returns [B, out, window, features]."""
    length = x.shape[1]
    x = _pad(x, (self.left, 0), self.left_edge)
    x = _pad(x, (0, self.right), self.right_edge)
    pieces = [x[:, i : i + length : self.stride] for i in range(self.window)]
    return jnp.stack(pieces, axis=2)


def _pad(x: jax.Array, widths: tuple[int, int], edge: Edge) -> jax.Array:
  mode = "edge" if edge is Edge.REPEAT else "constant"
  return jnp.pad(x, ((0, 0), widths, (0, 0)), mode=mode)
