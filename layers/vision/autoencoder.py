"""Encoder and decoder of images and videos, around a quantizer.

The networks of MAGVIT-v2 (Yu et al. 2023, https://arxiv.org/abs/2310.05737), as
in Praxis. Videos [B,T,H,W,C] are convolved causally in time: frame 0 depends on
itself only, so an image is a video of one frame, and a video of `1 + k * s`
frames has `1 + k` latents for a stride of time s. Images [B,H,W,C] have none.

Convolutions repeat the border instead of adding zeros. The decoder moves
channels to positions (`depth_to_space`) and gets the latents again at each
level (`ConditionalNorm`).
"""

from collections.abc import Callable, Sequence
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import linear
from paxon.layers.norms import group_norm
from paxon.layers.vision import convolutions
from paxon.sharding import axes, checks

# Rank of a video, with batch and channels.
_VIDEO = 5


class EdgeConv(nn.Module):
  """A convolution of images or videos whose border is repeated.

  Attributes:
    output_dim: Channels of the output.
    kernel_size: Size of the kernel along each axis.
    strides: Stride of each axis, or of all.
    use_bias: Whether there is a bias.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
  """

  output_dim: int
  kernel_size: int = 3
  strides: int | Sequence[int] = 1
  use_bias: bool = True
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    if not isinstance(self.strides, int):
      self.strides = tuple(self.strides)
    super().__post_init__()
    checks.check_size(self, "output_dim", "kernel_size")

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch *space channels"]
  ) -> Float[Array, "batch *out output"]:
    """Returns the convolution, which reads no later frames of a video."""
    rank, size = x.ndim - 2, self.kernel_size
    around = [((size - 1) // 2, size // 2)] * rank
    if x.ndim == _VIDEO:
      around[0] = (size - 1, 0)
    x = jnp.pad(x, [(0, 0), *around, (0, 0)], mode="edge")
    return convolutions.Conv(
      self.output_dim,
      (size,) * rank,
      self.strides,
      padding=convolutions.Padding.VALID,
      use_bias=self.use_bias,
      # The channels of images and latents are too few to be split.
      kernel_axes=(None, axes.MLP),
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      name="conv",
    )(x)


class FrameGroupNorm(nn.Module):
  """Group norm of each frame alone, so that no frame depends on later ones.

  The attributes are those of `GroupNorm`, without scale and bias where
  `use_scale` is False.
  """

  num_groups: int = 32
  epsilon: float = 1e-6
  use_scale: bool = True
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch *space channels"]
  ) -> Float[Array, "batch *space channels"]:
    """Returns the normalized `x`."""
    frames = x.reshape(-1, *x.shape[-3:]) if x.ndim == _VIDEO else x
    norm = group_norm.GroupNorm(
      num_groups=self.num_groups,
      epsilon=self.epsilon,
      use_scale=self.use_scale,
      use_bias=self.use_scale,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      name="norm",
    )
    return norm(frames).reshape(x.shape)


class ConditionalNorm(nn.Module):
  """Group norm whose scale and bias are linear in another array.

  y = norm(x) * (1 + scale(condition)) + bias(condition)

  The attributes are those of `FrameGroupNorm`.
  """

  num_groups: int = 32
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch *space channels"],
    condition: Float[Array, "batch *space features"],
  ) -> Float[Array, "batch *space channels"]:
    """Returns the normalized `x`."""
    fields = {"dtype": self.dtype, "param_dtype": self.param_dtype}
    flat = condition.reshape(len(x), -1, condition.shape[-1])
    scale, bias = (
      linear.Linear(
        x.shape[-1], kernel_axes=(None, axes.EMBED), name=name, **fields
      )(flat).reshape(x.shape)
      for name in ("scale", "bias")
    )
    norm = FrameGroupNorm(self.num_groups, use_scale=False, **fields)
    return norm(x) * (1 + scale) + bias


class ResidualBlock(nn.Module):
  """Two convolutions, each after a norm and an activation, and a shortcut.

  Attributes:
    output_dim: Channels of the output; another number than those of the input
      makes the shortcut a 1 x 1 convolution.
    num_groups: Groups of channels of the norms.
    activation: Applied to the normalized input of each convolution.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
  """

  output_dim: int
  num_groups: int = 32
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch *space channels"]
  ) -> Float[Array, "batch *space output"]:
    """Returns the sum of shortcut and branch."""
    fields = {"dtype": self.dtype, "param_dtype": self.param_dtype}
    y = x
    for i in range(2):
      norm = FrameGroupNorm(self.num_groups, name=f"norm_{i}", **fields)
      y = self.activation(norm(y))
      conv = EdgeConv(
        self.output_dim, use_bias=False, name=f"conv_{i}", **fields
      )
      y = conv(y)
    if x.shape[-1] != self.output_dim:
      shortcut = EdgeConv(
        self.output_dim, 1, use_bias=False, name="shortcut", **fields
      )
      x = shortcut(x)
    return x + y


class _Network(nn.Module):
  """Base of `Encoder` and `Decoder`, which have the same fields."""

  filters: int = 128
  multipliers: Sequence[int] = (1, 2, 2, 4)
  time_strides: Sequence[int] = (1, 2, 2)
  num_blocks: int = 4
  output_dim: int = 8
  num_groups: int = 32
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    self.multipliers = tuple(self.multipliers)
    self.time_strides = tuple(self.time_strides)
    super().__post_init__()
    name = type(self).__name__
    sizes = ("filters", "num_blocks", "output_dim", "num_groups")
    checks.check_size(self, *sizes)
    if not self.multipliers or min(self.multipliers) <= 0:
      raise ValueError(
        f"{name}.multipliers must be positive, got {self.multipliers}."
      )
    if len(self.time_strides) != len(self.multipliers) - 1 or any(
      stride not in (1, 2) for stride in self.time_strides
    ):
      raise ValueError(
        f"{name}.time_strides must be 1 or 2 for each of the"
        f" {len(self.multipliers) - 1} changes of size, got"
        f" {self.time_strides}."
      )

  def _strides(self, level: int, x: jax.Array) -> tuple[int, ...]:
    """Returns the strides between a level and the next."""
    return (*((self.time_strides[level],) if x.ndim == _VIDEO else ()), 2, 2)

  def _conv(
    self, name: str, output_dim: int, size: int = 3, strides: Sequence[int] = ()
  ) -> EdgeConv:
    return EdgeConv(
      output_dim,
      size,
      tuple(strides) or 1,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      name=name,
    )

  def _blocks(self, name: str, x: jax.Array, output_dim: int) -> jax.Array:
    for i in range(self.num_blocks):
      block = ResidualBlock(
        output_dim,
        self.num_groups,
        self.activation,
        self.dtype,
        self.param_dtype,
        name=f"{name}_block_{i}",
      )
      x = block(x)
    return x

  def _finish(self, x: jax.Array, size: int) -> jax.Array:
    norm = FrameGroupNorm(
      self.num_groups,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      name="norm",
    )
    return self._conv("last", self.output_dim, size)(self.activation(norm(x)))


class Encoder(_Network):
  """Maps images or videos to latents.

  Attributes:
    filters: Channels of the first level.
    multipliers: Channels of each level, as factors of `filters`; each level has
      half the height and width of the one before.
    time_strides: Whether time is halved, too (2) or not (1), between levels.
    num_blocks: Residual blocks of each level, and after the last.
    output_dim: Features of a latent.
    num_groups: Groups of channels of the norms.
    activation: Applied before convolutions.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
  """

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch *space channels"]
  ) -> Float[Array, "batch *latents features"]:
    """Returns the latents.

    Raises:
      ValueError: The size is not a multiple of the strides, or, for time, not
        one more than a multiple.
    """
    halvings = len(self.multipliers) - 1
    time = math.prod(self.time_strides)
    frames = x.shape[1] if x.ndim == _VIDEO else 1
    if (
      x.ndim not in (4, _VIDEO)
      or any(size % 2**halvings for size in x.shape[-3:-1])
      or (frames - 1) % time
    ):
      raise ValueError(
        f"Encoder needs images [B,H,W,C] or videos [B,T,H,W,C] with multiples"
        f" of {2**halvings} as height and width, and 1 + k * {time} frames; got"
        f" the shape {x.shape}."
      )
    x = self._conv("first", self.filters)(x)
    for i, multiplier in enumerate(self.multipliers):
      width = self.filters * multiplier
      x = self._blocks(f"level_{i}", x, width)
      if i < halvings:
        x = self._conv(f"down_{i}", width, 4, self._strides(i, x))(x)
    return self._finish(self._blocks("middle", x, x.shape[-1]), 1)


class Decoder(_Network):
  """Maps latents to images or videos; mirrors `Encoder`.

  Attributes:
    output_dim: Channels of the images.

  The other attributes are those of `Encoder`.
  """

  output_dim: int = 3

  @nn.compact
  def __call__(
    self, latents: Float[Array, "batch *latents features"]
  ) -> Float[Array, "batch *space channels"]:
    """Returns the images or videos."""
    x = self._conv("first", self.filters * self.multipliers[-1])(latents)
    x = self._blocks("middle", x, x.shape[-1])
    condition = latents
    for i in reversed(range(len(self.multipliers))):
      norm = ConditionalNorm(
        self.num_groups, self.dtype, self.param_dtype, name=f"level_{i}_norm"
      )
      width = self.filters * self.multipliers[i]
      x = self._blocks(f"level_{i}", norm(x, condition), width)
      if i > 0:
        strides = self._strides(i - 1, x)
        x = self._conv(f"up_{i}", width * math.prod(strides))(x)
        x = depth_to_space(x, strides)
        for axis, stride in enumerate(strides, 1):
          condition = jnp.repeat(condition, stride, axis=axis)
        if x.ndim == _VIDEO:
          # The first frame was not one of a pair.
          x, condition = (each[:, strides[0] - 1 :] for each in (x, condition))
    return self._finish(x, 3)


def depth_to_space(
  x: Float[Array, "batch *space channels"], strides: Sequence[int]
) -> Float[Array, "batch *out features"]:
  """Returns channels as further positions, `strides` along each axis.

  The channels of an input are the positions of a block, the last axis fastest,
  each with its features.
  """
  rank = len(strides)
  x = x.reshape(*x.shape[:-1], *strides, -1)
  order = [0]
  for axis in range(1, rank + 1):
    order += [axis, axis + rank]
  x = x.transpose(*order, 2 * rank + 1)
  sizes = [x.shape[2 * i + 1] * x.shape[2 * i + 2] for i in range(rank)]
  return x.reshape(x.shape[0], *sizes, x.shape[-1])
