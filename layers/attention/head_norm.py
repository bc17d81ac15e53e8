"""Root-mean-square norm of each head, for queries and keys.

Normalized queries and keys bound the logits of attention (Dehghani et al. 2023,
https://arxiv.org/abs/2302.05442, section 2.2). One scale serves all heads, as
in Qwen 3 and Gemma 3.
"""

import math

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import precision, rms_norm
from paxon.sharding import axes, logical


class HeadNorm(rms_norm.RmsNorm):
  """`RmsNorm` over the last axis of [B,T,N,H].

  Attributes:
    axis: Logical axis of the features, the head's own.
  """

  axis: str = axes.HEAD_DIM


class PerDimScale(nn.Module):
  """Multiplies each feature by a positive learned factor.

  Attributes:
    scale_init: Initializer of what the softplus makes factors of.
    dtype: Dtype of the result. `None` promotes input and scale.
    param_dtype: Dtype in which the scale is stored.
  """

  scale_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length heads head_dim"]
  ) -> Float[Array, "batch length heads head_dim"]:
    """Returns the scaled `x`; every head is independent."""
    scale = self.param(
      "scale",
      logical.partitioned(self.scale_init, (axes.HEAD_DIM,)),
      (x.shape[-1],),
      self.param_dtype,
    )
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    factor = jax.nn.softplus(precision.widened(scale)) / math.log(2.0)
    x = precision.widened(x)
    return (x * factor.astype(x.dtype)[None, None, None, :]).astype(dtype)
