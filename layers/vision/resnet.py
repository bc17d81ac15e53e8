"""Residual networks of images.

He et al. 2015, https://arxiv.org/abs/1512.03385, with the stride of a
bottleneck in its middle convolution, as in PyTorch and Praxis. A convolution is
followed by a norm, and the sum of each block by an activation:

  y = activation(shortcut(x) + branch(x))

with a 1 x 1 convolution as the shortcut where the shape changes. `SIZES` has
Praxis's depths: `ResNet(**SIZES[18])`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import initializers
from paxon.layers.norms import batch_norm
from paxon.layers.stacks import stochastic_residual
from paxon.layers.vision import convolutions, pooling
from paxon.sharding import axes, checks, logical

_ACTIVATION_AXES = (axes.BATCH, None, None, axes.ACTIVATION_EMBED)
_default_init = initializers.FanScaled(2**0.5, initializers.Fan.OUT)


def _make_default_norm(dtype: DTypeLike | None) -> nn.Module:
  # Weight decay pulls the scale to one. Without a parent, because an enclosing
  # module would adopt it.
  return batch_norm.BatchNorm(
    decay=0.9, scale_offset=1.0, dtype=dtype, parent=None
  )


class _Block(nn.Module):
  """Base of residual blocks, which define their convolutions.

  Attributes:
    output_dim: Channels of the output.
    kernel_size: Size of the kernels that are not 1 x 1.
    stride: Stride of the block.
    norm: Template of the norms; `None` is batch norm with `decay=0.9`.
    last_norm: Template of the norm at the end of the branch; `None` is `norm`.
      Blocks whose `last_norm` begins with a scale of zero begin as identities.
    activation: Applied in the branch and to the sum.
    drop_rate: Rate at which training drops the branch of an example.
    padding: The zeros around the inputs of convolutions.
    kernel_init: Initializer of all kernels.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
  """

  output_dim: int
  kernel_size: int = 3
  stride: int = 1
  norm: nn.Module | None = None
  last_norm: nn.Module | None = None
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  drop_rate: float = 0.0
  padding: convolutions.Padding = convolutions.Padding.CENTERED
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  # Width of the first block's input compared with its output.
  contraction: ClassVar[int] = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "output_dim", "kernel_size", "stride")
    checks.check_interval(self, "[0, 1)", "drop_rate")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch height width channels"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch out_height out_width output"]:
    """Returns the activated sum of shortcut and branch."""
    branch = x
    plan = self.convolutions()
    for i, (name, width, kernel, stride) in enumerate(plan):
      is_last = i == len(plan) - 1
      part = _convolution(self, name, width, kernel, stride, is_last=is_last)
      branch = part(branch, deterministic=deterministic)
    if x.shape != branch.shape:
      shortcut = _convolution(
        self, "shortcut", self.output_dim, 1, self.stride, activate=False
      )
      x = shortcut(x, deterministic=deterministic)
    add = stochastic_residual.StochasticResidual(self.drop_rate)
    x = self.activation(add(x, branch, deterministic=deterministic))
    return logical.constrain(x, _ACTIVATION_AXES)

  @nn.nowrap
  def convolutions(self) -> list[tuple[str, int, int, int]]:
    """Returns name, channels, kernel size and stride of each convolution."""
    raise NotImplementedError


class BasicBlock(_Block):
  """Two convolutions; see `_Block` for the attributes."""

  @nn.nowrap
  def convolutions(self) -> list[tuple[str, int, int, int]]:
    """Returns two convolutions, the first with the stride."""
    return [
      ("conv_in", self.output_dim, self.kernel_size, self.stride),
      ("conv_mid", self.output_dim, self.kernel_size, 1),
    ]


class BottleneckBlock(_Block):
  """Three convolutions, the middle one a quarter as wide as the output."""

  contraction: ClassVar[int] = 4

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.output_dim % self.contraction:
      raise ValueError(
        "BottleneckBlock.output_dim must be a multiple of 4, got"
        f" {self.output_dim}."
      )

  @nn.nowrap
  def convolutions(self) -> list[tuple[str, int, int, int]]:
    """Returns a reduction, the convolution proper and an expansion."""
    inner = self.output_dim // self.contraction
    return [
      ("conv_in", inner, 1, 1),
      ("conv_mid", inner, self.kernel_size, self.stride),
      ("conv_out", self.output_dim, 1, 1),
    ]


class ResNet(nn.Module):
  """A residual network; the defaults are ResNet-50.

  Attributes:
    channels: Channels of each stage's blocks.
    blocks: Number of blocks of each stage.
    strides: Stride of each stage's first block.
    kernels: Kernel size of each stage.
    block: Makes a block: `BottleneckBlock`, or `BasicBlock`.
    entry_kernel: Size of the first convolution's kernel.
    entry_stride: Its stride.
    entry_max_pool: Whether maximum pooling, 3 x 3 with stride 2, follows it.
    pooled: Whether the mean over the image is returned.

  The other attributes are those of the blocks.
  """

  channels: Sequence[int] = (256, 512, 1024, 2048)
  blocks: Sequence[int] = (3, 4, 6, 3)
  strides: Sequence[int] = (1, 2, 2, 2)
  kernels: Sequence[int] = (3, 3, 3, 3)
  block: Callable[..., _Block] = BottleneckBlock
  entry_kernel: int = 7
  entry_stride: int = 2
  entry_max_pool: bool = True
  pooled: bool = True
  norm: nn.Module | None = None
  last_norm: nn.Module | None = None
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  drop_rate: float = 0.0
  padding: convolutions.Padding = convolutions.Padding.CENTERED
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    names = ("channels", "blocks", "strides", "kernels")
    for name, value in checks.get_values(self, *names):
      setattr(self, name, tuple(value))
    super().__post_init__()
    checks.check_size(self, "entry_kernel", "entry_stride")
    for name, value in checks.get_values(self, *names):
      if len(value) != len(self.channels) or min(value, default=0) <= 0:
        raise ValueError(
          f"ResNet.{name} must have a positive number for each stage, like"
          f" channels ({self.channels}), got {value}."
        )

  def __call__(
    self,
    images: Float[Array, "batch height width channels"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *out"]:
    """Returns the features of the last stage, [B,D] if `pooled`."""
    x = self.features(images, deterministic=deterministic)[-1]
    return pooling.pool_all(x, axes=(1, 2)) if self.pooled else x

  @nn.compact
  def features(
    self,
    images: Float[Array, "batch height width channels"],
    *,
    deterministic: bool = True,
  ) -> list[jax.Array]:
    """Returns the output [B,H,W,D] of each stage."""
    first = self.block(output_dim=self.channels[0], parent=None)
    entry_dim = self.channels[0] // first.contraction
    entry = _convolution(
      self, "entry", entry_dim, self.entry_kernel, self.entry_stride
    )
    x = entry(images, deterministic=deterministic)
    if self.entry_max_pool:
      x = pooling.Pooling(window=(3, 3), strides=(2, 2))(x)
    stages = []
    for stage, (output_dim, number, stride, kernel) in enumerate(
      zip(self.channels, self.blocks, self.strides, self.kernels, strict=True)
    ):
      for i in range(number):
        block = self.block(
          output_dim=output_dim,
          kernel_size=kernel,
          stride=stride if i == 0 else 1,
          norm=_copy(self.norm),
          last_norm=_copy(self.last_norm),
          activation=self.activation,
          drop_rate=self.drop_rate,
          padding=self.padding,
          kernel_init=self.kernel_init,
          dtype=self.dtype,
          param_dtype=self.param_dtype,
          name=f"stage_{stage}_block_{i}",
        )
        x = block(x, deterministic=deterministic)
      stages.append(x)
    return stages


_BASIC: Final = {"channels": (64, 128, 256, 512), "block": BasicBlock}

# Fields of `ResNet` by depth; 5 is Praxis's for tests.
SIZES: Final[Mapping[int, Mapping[str, Any]]] = {
  5: {"channels": (16,), "blocks": (1,), "strides": (1,), "kernels": (1,)},
  18: {"blocks": (2, 2, 2, 2), **_BASIC},
  34: {"blocks": (3, 4, 6, 3), **_BASIC},
  50: {"blocks": (3, 4, 6, 3)},
  56: {"blocks": (3, 3, 9, 3)},
  83: {"blocks": (3, 3, 18, 3)},
  101: {"blocks": (3, 4, 23, 3)},
  152: {"blocks": (3, 8, 36, 3)},
}


def _convolution(
  owner: _Block | ResNet,
  name: str,
  output_dim: int,
  kernel_size: int,
  stride: int,
  *,
  is_last: bool = False,
  activate: bool = True,
) -> convolutions.ConvNormAct:
  """Returns a convolution with the fields of `owner`, as its submodule."""
  norm = owner.norm
  if is_last and owner.last_norm is not None:
    norm = owner.last_norm
  # The channels of images and of groups are too few to be split.
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
    _make_default_norm(owner.dtype) if norm is None else _copy(norm),
    owner.activation if activate and not is_last else None,
    name=name,
  )


def _copy(template: nn.Module | None) -> nn.Module | None:
  return None if template is None else template.clone(parent=None, name=None)
