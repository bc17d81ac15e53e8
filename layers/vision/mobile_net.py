"""MobileNetV2: a network of inverted residuals for small devices.

Sandler et al. 2018, https://arxiv.org/abs/1801.04381. A block expands the
channels by a 1 x 1 convolution, convolves each channel alone, and projects to
few channels without an activation; blocks that keep the shape add their input:

  y = x + project(depthwise(expand(x)))
"""

from collections.abc import Callable, Sequence
from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import initializers
from paxon.layers.norms import batch_norm
from paxon.layers.vision import convolutions, pooling
from paxon.sharding import axes, checks, logical

_ACTIVATION_AXES = (axes.BATCH, None, None, axes.ACTIVATION_EMBED)
# Expansion, channels, number of blocks, and stride of the first one.
_GROUPS: Final = (
  (1, 16, 1, 1),
  (6, 24, 2, 2),
  (6, 32, 3, 2),
  (6, 64, 4, 2),
  (6, 96, 3, 1),
  (6, 160, 3, 2),
  (6, 320, 1, 1),
)
_default_init = initializers.FanScaled(2**0.5, initializers.Fan.OUT)


class InvertedResidual(nn.Module):
  """A block of MobileNetV2.

  Attributes:
    output_dim: Channels of the output.
    expansion: Factor on the input's channels; 1 leaves out the first
      convolution.
    kernel_size: Size of the depthwise kernel.
    stride: Its stride.
    norm: Template of the norms; `None` is batch norm with `decay=0.9`.
    activation: Applied after the first two convolutions.
    padding: The zeros around the inputs of convolutions.
    kernel_init: Initializer of all kernels.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
  """

  output_dim: int
  expansion: int = 6
  kernel_size: int = 3
  stride: int = 1
  norm: nn.Module | None = None
  activation: Callable[[jax.Array], jax.Array] = nn.relu6
  padding: convolutions.Padding = convolutions.Padding.CENTERED
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "output_dim", "expansion", "kernel_size", "stride")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch height width channels"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch out_height out_width output"]:
    """Returns the transformed image."""
    y = x
    if self.expansion != 1:
      width = self.expansion * x.shape[-1]
      expand = _pointwise(self, "expand", width, self.activation)
      y = expand(y, deterministic=deterministic)
    depthwise = convolutions.DepthwiseConv(
      (self.kernel_size, self.kernel_size),
      strides=self.stride,
      padding=self.padding,
      use_bias=False,
      kernel_init=self.kernel_init,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      parent=None,
    )
    y = convolutions.ConvNormAct(
      depthwise, _make_norm(self), self.activation, name="depthwise"
    )(y, deterministic=deterministic)
    project = _pointwise(self, "project", self.output_dim, None)
    y = project(y, deterministic=deterministic)
    if y.shape == x.shape:
      y += x
    return logical.constrain(y, _ACTIVATION_AXES)


class MobileNetV2(nn.Module):
  """MobileNetV2; the defaults are the published network.

  Attributes:
    groups: Expansion, channels, number of blocks and stride of the first block,
      of each group.
    multiplier: Factor on all channels; those of the last layer only grow.
    divisor: Numbers of channels are rounded to multiples of it.
    entry_dim: Channels of the first convolution, before `multiplier`.
    entry_stride: Its stride.
    output_dim: Channels of the last convolution, before `multiplier`.
    pooled: Whether the mean over the image is returned.

  The other attributes are those of `InvertedResidual`.
  """

  groups: Sequence[Sequence[int]] = _GROUPS
  multiplier: float = 1.0
  divisor: int = 8
  entry_dim: int = 32
  entry_stride: int = 2
  output_dim: int = 1280
  pooled: bool = True
  norm: nn.Module | None = None
  activation: Callable[[jax.Array], jax.Array] = nn.relu6
  padding: convolutions.Padding = convolutions.Padding.CENTERED
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    self.groups = tuple(map(tuple, self.groups))
    super().__post_init__()
    sizes = ("divisor", "entry_dim", "entry_stride", "output_dim")
    checks.check_size(self, *sizes)
    checks.check_positive(self, "multiplier")
    for group in self.groups:
      if len(group) != 4 or min(group) <= 0:
        raise ValueError(
          "MobileNetV2.groups must be positive (expansion, channels, blocks,"
          f" stride), got {group}."
        )

  @nn.compact
  def __call__(
    self,
    images: Float[Array, "batch height width channels"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *out"]:
    """Returns the features, [B,D] if `pooled`."""
    entry_dim = self._scale(self.entry_dim)
    entry = _pointwise(
      self, "entry", entry_dim, self.activation, 3, self.entry_stride
    )
    x = entry(images, deterministic=deterministic)
    number = 0
    for expansion, channels, blocks, stride in self.groups:
      for i in range(blocks):
        block = InvertedResidual(
          self._scale(channels),
          expansion=expansion,
          stride=stride if i == 0 else 1,
          norm=_copy(self.norm),
          activation=self.activation,
          padding=self.padding,
          kernel_init=self.kernel_init,
          dtype=self.dtype,
          param_dtype=self.param_dtype,
          name=f"block_{number}",
        )
        x = block(x, deterministic=deterministic)
        number += 1
    output_dim = self.output_dim
    if self.multiplier > 1:
      output_dim = self._scale(output_dim)
    last = _pointwise(self, "last", output_dim, self.activation)
    x = last(x, deterministic=deterministic)
    return pooling.pool_all(x, axes=(1, 2)) if self.pooled else x

  def _scale(self, channels: int) -> int:
    return round_channels(channels * self.multiplier, self.divisor)


def round_channels(channels: float, divisor: int) -> int:
  """Returns the multiple of `divisor` nearest to a number of channels.

  It is at least `divisor`, and at least 90 % of the number.
  """
  rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
  return rounded + (divisor if rounded < 0.9 * channels else 0)


def _pointwise(
  owner: InvertedResidual | MobileNetV2,
  name: str,
  output_dim: int,
  activation: Callable[[jax.Array], jax.Array] | None,
  kernel_size: int = 1,
  stride: int = 1,
) -> convolutions.ConvNormAct:
  """Returns a convolution over all channels, as a submodule of `owner`."""
  # The channels of images are too few to be split.
  kernel_axes = (None if name == "entry" else axes.EMBED, axes.MLP)
  return convolutions.ConvNormAct(
    convolutions.Conv(
      output_dim,
      (kernel_size, kernel_size),
      stride,
      padding=owner.padding,
      use_bias=False,
      kernel_axes=kernel_axes,
      kernel_init=owner.kernel_init,
      dtype=owner.dtype,
      param_dtype=owner.param_dtype,
      parent=None,
    ),
    _make_norm(owner),
    activation,
    name=name,
  )


def _make_norm(owner: InvertedResidual | MobileNetV2) -> nn.Module:
  if owner.norm is None:
    return batch_norm.BatchNorm(decay=0.9, dtype=owner.dtype, parent=None)
  return owner.norm.clone(parent=None, name=None)


def _copy(template: nn.Module | None) -> nn.Module | None:
  return None if template is None else template.clone(parent=None, name=None)
