"""Root-mean-square norm: `x / sqrt(mean(x ** 2) + epsilon) * scale`.

Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. No mean is
subtracted and there is no bias. For norms of heads see `attention.head_norm`.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.layers.cpu import forms
from paxon.layers.norms import norm_scale
from paxon.sharding import axes, checks


class RmsNorm(nn.Module):
  """Normalizes the last axis of its input.

  Attributes:
    epsilon: Added to the mean square.
    scale_init: Initializer of the scale.
    dtype: Dtype of the result. `None` promotes input and scale.
    param_dtype: Dtype in which the scale is stored.
    use_scale: Whether there is a scale.
    scale_offset: The stored parameter is the scale minus this (1 in Gemma and
      Pax).
    axis: Logical axis of the features.
  """

  epsilon: float = 1e-6
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  use_scale: bool = True
  scale_offset: float = 0.0
  axis: str = axes.EMBED

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_interval(self, "(0, 1)", "epsilon")

  @nn.compact
  def __call__(
    self, x: Float[Array, "*batch features"]
  ) -> Float[Array, "*batch features"]:
    """Returns the normalized `x`."""
    scale = norm_scale.make_scale(self, x.shape[-1], self.axis)
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    # float32 because a bfloat16 sum of squares loses precision; the scale is
    # applied before rounding.
    shape = x.shape
    x = forms.drop_single_axes(precision.widen(x))
    # Not `jnp.square(x)`, whose derivative saves `2 x` in addition to `x`.
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(mean_square + self.epsilon)
    x = norm_scale.apply_scale(x, scale, self.scale_offset)
    return x.astype(dtype).reshape(shape)
