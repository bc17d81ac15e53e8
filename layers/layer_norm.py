"""Layer norm: `(x - mean) / sqrt(variance + epsilon) * scale + bias`.

Ba et al. 2016, https://arxiv.org/abs/1607.06450. Mean and variance are those of
the features of one token.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import norm_scale, precision
from paxon.sharding import axes, checks, logical


class LayerNorm(nn.Module):
  """Normalizes the last axis of its input.

  Attributes:
    epsilon: Added to the variance.
    use_bias: Whether a learned value is added to each feature.
    scale_init: Initializer of the factor per feature.
    bias_init: Initializer of the bias.
    dtype: Dtype of the result. `None` promotes input and parameters.
    param_dtype: Dtype in which scale and bias are stored.
    use_scale: Whether there is a factor per feature.
    scale_offset: Added to what is stored to get the factor; `scale_init` is
      that of the factor still. Pax stores the factor less one.
  """

  epsilon: float = 1e-6
  use_bias: bool = True
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  use_scale: bool = True
  scale_offset: float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_interval(self, "(0, 1)", "epsilon")

  @nn.compact
  def __call__(
    self, x: Float[Array, "*batch embed"]
  ) -> Float[Array, "*batch embed"]:
    """Returns the normalized `x`; every vector is independent."""
    scale = norm_scale.stored(self, x.shape[-1], axes.EMBED)
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    # float32 because the sums over a wide bfloat16 vector lose all but their
    # first digits; scale and bias are applied before rounding.
    x = precision.widened(x)
    # Not the mean of squares less the square of the mean, which cancels where
    # the mean is large.
    x -= jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(variance + self.epsilon)
    x = norm_scale.scaled(x, scale, self.scale_offset)
    if self.use_bias:
      init = logical.partitioned(self.bias_init, (axes.EMBED,))
      bias = self.param("bias", init, (x.shape[-1],), self.param_dtype)
      x += norm_scale.over_features(bias, x)
    return x.astype(dtype)
