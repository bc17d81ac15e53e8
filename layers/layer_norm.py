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

from paxon.layers import precision
from paxon.sharding import axes, logical


class LayerNorm(nn.Module):
  """Normalizes the last axis of its input.

  Attributes:
    epsilon: Added to the variance.
    use_bias: Whether a learned value is added to each feature.
    scale_init: Initializer of the factor per feature.
    bias_init: Initializer of the bias.
    dtype: Dtype of the result. `None` promotes input and parameters.
    param_dtype: Dtype in which scale and bias are stored.
  """

  epsilon: float = 1e-6
  use_bias: bool = True
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 < self.epsilon < 1:
      raise ValueError(
        "LayerNorm.epsilon must be positive and less than 1, got "
        f"{self.epsilon}."
      )

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length embed"]
  ) -> Float[Array, "batch length embed"]:
    """Returns the normalized `x`; every position is independent."""
    scale = self._vector("scale", self.scale_init, x.shape[-1])
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    # float32 because the sums over a wide bfloat16 vector lose all but their
    # first digits; scale and bias are applied before rounding.
    x = precision.widened(x)
    # Not the mean of squares less the square of the mean, which cancels where
    # the mean is large.
    x -= jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(variance + self.epsilon)
    x *= scale.astype(x.dtype)[None, None, :]
    if self.use_bias:
      bias = self._vector("bias", self.bias_init, x.shape[-1])
      x += bias.astype(x.dtype)[None, None, :]
    return x.astype(dtype)

  def _vector(
    self, name: str, init: nn.initializers.Initializer, size: int
  ) -> jax.Array:
    init = logical.partitioned(init, (axes.EMBED,))
    return self.param(name, init, (size,), self.param_dtype)
