"""Root-mean-square norm of each head, for queries and keys.

Normalized queries and keys bound the logits of attention (Dehghani et al. 2023,
https://arxiv.org/abs/2302.05442, section 2.2). One scale serves all heads, as
in Qwen 3 and Gemma 3.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.sharding import axes, logical


class HeadNorm(nn.Module):
  """Normalizes each head, and multiplies by a learned factor per feature.

  Attributes:
    epsilon: Added to the mean square.
    scale_init: Initializer of the factor.
    dtype: Dtype of the result. `None` promotes input and scale.
    param_dtype: Dtype in which the scale is stored.
  """

  epsilon: float = 1e-6
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 < self.epsilon < 1:
      raise ValueError(
        "HeadNorm.epsilon must be positive and less than 1, got "
        f"{self.epsilon}."
      )

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length heads head_dim"]
  ) -> Float[Array, "batch length heads head_dim"]:
    """Returns the normalized `x`; every head is independent."""
    scale = self.param(
      "scale",
      logical.partitioned(self.scale_init, (axes.HEAD_DIM,)),
      (x.shape[-1],),
      self.param_dtype,
    )
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    # float32, and the scale before rounding, as in `RmsNorm`.
    x = precision.widened(x)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(mean_square + self.epsilon)
    return (x * scale.astype(x.dtype)[None, None, None, :]).astype(dtype)
