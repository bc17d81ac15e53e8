"""Discriminator of images and videos, and the adversarial loss that trains it.

The discriminator of StyleGAN (Karras et al. 2019,
https://arxiv.org/abs/1812.04948) as in MAGVIT and Praxis: residual blocks that
blur before they drop positions (Zhang 2019, https://arxiv.org/abs/1904.11486).
With logits d(x) of real and generated examples and averages m of their means,

  generator     = softplus(-d(fake))
  discriminator = softplus(-d(real)) + softplus(d(fake))
  lecam         = relu(d(real) - m_fake)**2 + relu(m_real - d(fake))**2
  penalty       = |gradient of d at real|**2

(LeCAM: Tseng et al. 2021, https://arxiv.org/abs/2104.03310; the penalty is R1,
Mescheder et al. 2018, https://arxiv.org/abs/1801.04406). One backward pass
trains both networks: the loss of the generator sees the discriminator's
parameters as constants, and the losses of the discriminator see `fake` as a
constant, so each parameter has the gradient of the loss of its network alone.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
import numpy as np

from paxon.layers import linear, precision
from paxon.layers.norms import batch_norm
from paxon.layers.vision import convolutions
from paxon.sharding import axes, checks, variables

_leaky_relu = functools.partial(nn.leaky_relu, negative_slope=0.2)


class BlurPool(nn.Module):
  """Blurs each channel by a binomial filter and keeps every other position.

  Attributes:
    filter_size: Size of the filter, such as 3 for [1, 2, 1] / 4 on each axis.
    strides: Stride of each axis, or of all.
  """

  filter_size: int = 3
  strides: int | Sequence[int] = 2

  def __post_init__(self) -> None:
    if not isinstance(self.strides, int):
      self.strides = tuple(self.strides)
    super().__post_init__()
    checks.check_size(self, "filter_size")

  def __call__(
    self, x: Float[Array, "batch *space channels"]
  ) -> Float[Array, "batch *out channels"]:
    """Returns ceil(size / stride) positions of each axis; zeros are around."""
    rank, channels = x.ndim - 2, x.shape[-1]
    strides = self.strides
    strides = (strides,) * rank if isinstance(strides, int) else strides
    size = self.filter_size
    taps = np.asarray([math.comb(size - 1, i) for i in range(size)])
    kernel = functools.reduce(np.multiply.outer, [taps / taps.sum()] * rank)
    kernel = jnp.asarray(kernel, x.dtype)[..., None, None]
    spatial = "THW"[-rank:]
    return jax.lax.conv_general_dilated(
      x,
      jnp.repeat(kernel, channels, axis=-1),
      window_strides=strides,
      padding="SAME",
      dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
      feature_group_count=channels,
    )


class DiscriminatorBlock(nn.Module):
  """Two convolutions around a `BlurPool`, and a shortcut; halves each axis.

  Attributes:
    output_dim: Channels of the output.
    filter_size: Size of the filter of `BlurPool`.
    activation: Applied to the result of each convolution.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
  """

  output_dim: int
  filter_size: int = 3
  activation: Callable[[jax.Array], jax.Array] = _leaky_relu
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch *space channels"]
  ) -> Float[Array, "batch *out output"]:
    """Returns the sum of branch and shortcut, divided by the root of 2."""
    pool = BlurPool(self.filter_size)
    shortcut = _conv(self, "shortcut", self.output_dim, x, 1, use_bias=False)
    y = self.activation(_conv(self, "first", x.shape[-1], x)(x))
    y = pool(y)
    y = self.activation(_conv(self, "last", self.output_dim, y)(y))
    return (y + shortcut(pool(x))) / math.sqrt(2)


class Discriminator(nn.Module):
  """Maps images or videos of one size to a logit, positive for real ones.

  Attributes:
    filters: Channels of the first level.
    multipliers: Channels after each block, as factors of `filters`; each block
      halves height, width and, of videos, time.
    filter_size: Size of the filters of `BlurPool`.
    activation: Applied after convolutions and the hidden layer.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
  """

  filters: int = 64
  multipliers: Sequence[int] = (2, 4, 4, 4)
  filter_size: int = 3
  activation: Callable[[jax.Array], jax.Array] = _leaky_relu
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    self.multipliers = tuple(self.multipliers)
    super().__post_init__()
    checks.check_size(self, "filters")
    if not self.multipliers or min(self.multipliers) <= 0:
      raise ValueError(
        f"Discriminator.multipliers must be positive, got {self.multipliers}."
      )

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch *space channels"]
  ) -> Float[Array, " batch"]:
    """Returns the logits."""
    fields: dict[str, Any] = {"dtype": self.dtype}
    fields |= {"param_dtype": self.param_dtype}
    x = self.activation(_conv(self, "first", self.filters, x)(x))
    for i, multiplier in enumerate(self.multipliers):
      block = DiscriminatorBlock(
        self.filters * multiplier,
        self.filter_size,
        self.activation,
        name=f"block_{i}",
        **fields,
      )
      x = block(x)
    width = x.shape[-1]
    x = self.activation(_conv(self, "last", width, x)(x))
    hidden = linear.Linear(
      width, activation=self.activation, name="hidden", **fields
    )
    x = hidden(x.reshape(len(x), -1))
    logit = linear.Linear(
      1, kernel_axes=(axes.EMBED, None), name="logit", **fields
    )
    return logit(x)[:, 0]


class AdversarialLoss(nn.Module):
  """Losses of a generator and of the discriminator of its results.

  Attributes:
    discriminator: Maps examples to logits [B], such as `Discriminator`.
    generator_weight: Factor of the generator's loss.
    lecam_weight: Factor of the LeCAM regularization.
    penalty_weight: Factor of the squared gradient at real examples; 0 does not
      compute it.
    decay: Decay of the averages of logits.
  """

  discriminator: nn.Module
  generator_weight: float = 0.1
  lecam_weight: float = 0.001
  penalty_weight: float = 0.0
  decay: float = 0.999

  def __post_init__(self) -> None:
    super().__post_init__()
    weights = ("generator_weight", "lecam_weight", "penalty_weight")
    checks.check_non_negative(self, *weights)
    checks.check_interval(self, "[0, 1]", "decay")

  @nn.compact
  def __call__(
    self,
    real: Float[Array, "batch *space channels"],
    fake: Float[Array, "batch *space channels"],
    weights: Float[Array, " batch"],
    *,
    deterministic: bool = True,
  ) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Returns the loss to minimize, a mean over examples, and its terms.

    Args:
      real: Examples of the data.
      fake: Results of the generator.
      weights: Weight of each example, zero for padding.
      deterministic: False (training) updates the averages of logits.

    Returns:
      The sum of all weighted terms. Terms without their weights: `generator`,
      `discriminator`, `lecam` and, unless its weight is 0, `penalty`.
    """
    kept = (weights > 0).reshape(-1, *(1,) * (real.ndim - 1))
    # Not multiplied: padding may be NaN.
    real, fake = (jnp.where(kept, x, 0) for x in (real, fake))
    on_real = precision.widen(self.discriminator(real))
    on_fake = precision.widen(self.discriminator(jax.lax.stop_gradient(fake)))
    network, values = self.discriminator.unbind()

    def judge(values: Any, x: jax.Array) -> jax.Array:
      logits: Any = network.apply(values, x)
      return precision.widen(logits)

    fooled = judge(jax.lax.stop_gradient(values), fake)
    share = weights.astype(on_real.dtype)
    share /= jnp.maximum(jnp.sum(share), jnp.finfo(share.dtype).tiny)

    def mean(x: jax.Array) -> jax.Array:
      return jnp.sum(x * share)

    mean_real = self._average("mean_real", mean(on_real), deterministic)
    mean_fake = self._average("mean_fake", mean(on_fake), deterministic)
    terms = {
      "generator": mean(nn.softplus(-fooled)),
      "discriminator": mean(nn.softplus(-on_real) + nn.softplus(on_fake)),
      "lecam": mean(
        jnp.square(nn.relu(on_real - mean_fake))
        + jnp.square(nn.relu(mean_real - on_fake))
      ),
    }
    total = self.generator_weight * terms["generator"]
    total += terms["discriminator"] + self.lecam_weight * terms["lecam"]
    if self.penalty_weight > 0:
      slopes = jax.grad(lambda x: jnp.sum(judge(values, x)))(real)
      squares = jnp.square(precision.widen(slopes)).reshape(len(real), -1)
      terms["penalty"] = mean(jnp.sum(squares, axis=1))
      total += self.penalty_weight * terms["penalty"]
    return total, terms

  def _average(
    self, name: str, found: jax.Array, deterministic: bool
  ) -> jax.Array:
    """Returns an average without this batch, which updates it in training."""
    boxed = variables.make_boxed_init(
      nn.initializers.zeros, (), shape=(), dtype=jnp.float32
    )
    average: Any = self.variable(batch_norm.COLLECTION, name, boxed)
    before = average.value
    can_update = self.is_mutable_collection(batch_norm.COLLECTION)
    if can_update and not (deterministic or self.is_initializing()):
      found = jax.lax.stop_gradient(found).astype(jnp.float32)
      average.value = self.decay * before + (1 - self.decay) * found
    return before.astype(found.dtype)


def _conv(
  owner: Discriminator | DiscriminatorBlock,
  name: str,
  output_dim: int,
  x: jax.Array,
  size: int = 3,
  use_bias: bool = True,
) -> convolutions.Conv:
  """Returns a convolution for inputs of the rank of `x`."""
  return convolutions.Conv(
    output_dim,
    (size,) * (x.ndim - 2),
    use_bias=use_bias,
    # The channels of images are too few to be split.
    kernel_axes=(None, axes.MLP),
    dtype=owner.dtype,
    param_dtype=owner.param_dtype,
    name=name,
  )
