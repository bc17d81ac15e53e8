"""Vanilla networks: residual networks without shortcuts and batch norm.

Zhang, Botev and Martens 2022, https://arxiv.org/abs/2203.08120. Kernels begin
orthogonal, and the activation is a leaky ReLU that keeps the mean square of
normally distributed values:

  activation(x) = sqrt(2 / (1 + slope ** 2)) * max(x, slope * x)

Blocks are the bottlenecks of `resnet`. `SIZES` has Praxis's depths.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import initializers
from paxon.layers.vision import convolutions, pooling
from paxon.sharding import axes, checks, logical

# Width of an input of a bottleneck compared with its inner width.
_CONTRACTION = 4


@dataclasses.dataclass(frozen=True)
class TailoredLeakyRelu:
  """A leaky ReLU that keeps the mean square of normal values.

  Attributes:
    negative_slope: Slope below zero. The paper finds it from the depth of the
      network; 0.4 is Praxis's for ResNet-50.
  """

  negative_slope: float = 0.4

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the activation of each element."""
    gain = math.sqrt(2.0 / (1.0 + self.negative_slope**2))
    return gain * jax.nn.leaky_relu(x, self.negative_slope)


class VanillaNet(nn.Module):
  """A convolutional network without shortcuts; the defaults have 50 layers.

  Attributes:
    channels: Channels of each stage's blocks, multiples of 4.
    blocks: Number of blocks of each stage.
    strides: Stride of each stage's first block.
    kernels: Kernel size of each stage.
    entry_kernel: Size of the first convolution's kernel.
    entry_stride: Its stride.
    entry_max_pool: Whether maximum pooling, 3 x 3 with stride 2, follows it.
    pooled: Whether the mean over the image is returned.
    activation: Applied to each convolution.
    padding: The zeros around the inputs of convolutions.
    kernel_init: Initializer of all kernels.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
  """

  channels: Sequence[int] = (256, 512, 1024, 2048)
  blocks: Sequence[int] = (3, 4, 6, 3)
  strides: Sequence[int] = (1, 2, 2, 2)
  kernels: Sequence[int] = (3, 3, 3, 3)
  entry_kernel: int = 7
  entry_stride: int = 2
  entry_max_pool: bool = True
  pooled: bool = True
  activation: Callable[[jax.Array], jax.Array] = TailoredLeakyRelu()
  padding: convolutions.Padding = convolutions.Padding.CENTERED
  kernel_init: nn.initializers.Initializer = initializers.Orthogonal()
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
          f"VanillaNet.{name} must have a positive number for each stage, like"
          f" channels ({self.channels}), got {value}."
        )
    if any(each % _CONTRACTION for each in self.channels):
      raise ValueError(
        f"VanillaNet.channels must be multiples of {_CONTRACTION}, got"
        f" {self.channels}."
      )

  @nn.compact
  def __call__(
    self,
    images: Float[Array, "batch height width channels"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *out"]:
    """Returns the features, [B,D] if `pooled`; training changes nothing."""
    del deterministic
    x = self._convolve(
      "entry",
      images,
      self.channels[0] // _CONTRACTION,
      self.entry_kernel,
      self.entry_stride,
    )
    if self.entry_max_pool:
      x = pooling.Pooling(window=(3, 3), strides=(2, 2))(x)
    for stage, (width, number, stride, kernel) in enumerate(
      zip(self.channels, self.blocks, self.strides, self.kernels, strict=True)
    ):
      inner = width // _CONTRACTION
      for i in range(number):
        name = f"stage_{stage}_block_{i}"
        middle = stride if i == 0 else 1
        x = self._convolve(f"{name}_in", x, inner, 1, 1)
        x = self._convolve(f"{name}_mid", x, inner, kernel, middle)
        x = self._convolve(f"{name}_out", x, width, 1, 1)
    return pooling.pool_all(x, axes=(1, 2)) if self.pooled else x

  def _convolve(
    self, name: str, x: jax.Array, output_dim: int, size: int, stride: int
  ) -> jax.Array:
    """Returns the activation of a convolution with bias."""
    # The channels of images are too few to be split.
    kernel_axes = (None if name == "entry" else axes.EMBED, axes.MLP)
    y = convolutions.Conv(
      output_dim,
      (size, size),
      stride,
      padding=self.padding,
      kernel_axes=kernel_axes,
      kernel_init=self.kernel_init,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      name=name,
    )(x)
    names = (axes.BATCH, None, None, axes.ACTIVATION_EMBED)
    return logical.constrain(self.activation(y), names)


# Fields of `VanillaNet` by depth; 5 is Praxis's for tests.
SIZES: Final[Mapping[int, Mapping[str, Any]]] = {
  5: {"channels": (16,), "blocks": (1,), "strides": (1,), "kernels": (1,)},
  50: {"blocks": (3, 4, 6, 3)},
  101: {"blocks": (3, 4, 23, 3)},
  152: {"blocks": (3, 8, 36, 3)},
}
