"""A learned scale of each feature of queries, as Pax has it by default.

  x * softplus(scale) / log(2)

which is `x` where the scale is zero, its first value. With the kernel's own
`H ** -0.5` that is Pax's `PerDimScale`, which multiplies queries by
`softplus(scale) * 1.442695041 / sqrt(H)`. A part of an attention layer: queries
[B,T,N,H], rotated -> the same. One scale serves all heads.
"""

import math

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.sharding import axes, logical


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
