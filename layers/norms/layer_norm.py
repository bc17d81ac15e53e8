"""Layer norm: `(x - mean) / sqrt(variance + epsilon) * scale + bias`.

Ba et al. 2016, https://arxiv.org/abs/1607.06450. Mean and variance are those of
the features of each token.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import precision, remat
from paxon.layers.cpu import forms
from paxon.layers.norms import norm_scale
from paxon.sharding import axes, checks


class LayerNorm(nn.Module):
  """Normalizes the last axis of its input.

  Attributes:
    epsilon: Added to the variance.
    use_bias: Whether there is a bias.
    scale_init: Initializer of the scale.
    bias_init: Initializer of the bias.
    dtype: Dtype of the result. `None` promotes input and parameters.
    param_dtype: Dtype in which scale and bias are stored.
    use_scale: Whether there is a scale.
    scale_offset: The stored parameter is the scale minus this (1 in Pax).
    axis: Logical axis of the features.
  """

  epsilon: float = 1e-6
  use_bias: bool = True
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
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
    self, x: Float[Array, "*batch embed"]
  ) -> Float[Array, "*batch embed"]:
    """Returns the normalized `x`."""
    scale = norm_scale.make_scale(self, x.shape[-1], self.axis)
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    # float32 because sums in bfloat16 lose precision; scale and bias are
    # applied before rounding.
    shape = x.shape
    x = forms.drop_single_axes(precision.widen(x))
    # Not mean(x**2) - mean(x)**2, which cancels if the mean is large.
    mean = jnp.mean(x, axis=-1, keepdims=True)
    x -= remat.tag(mean, remat.NORM_STATISTICS)
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(variance + self.epsilon)
    x *= remat.tag(factor, remat.NORM_STATISTICS)
    bias = norm_scale.make_bias(self, x.shape[-1], self.axis)
    x = norm_scale.apply_scale(x, scale, self.scale_offset, bias)
    return x.astype(dtype).reshape(shape)
