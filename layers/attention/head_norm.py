"""Norms and scales of queries and keys.

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

from paxon.layers import precision
from paxon.layers.norms import rms_norm
from paxon.sharding import axes, logical


class HeadNorm(rms_norm.RmsNorm):
  """`RmsNorm` over the last axis of [B,T,N,H].

  Attributes:
    axis: Logical axis of the features, the head's own.
  """

  axis: str = axes.HEAD_DIM


class AllHeadsNorm(nn.Module):
  """Root-mean-square norm over all heads together, as in OLMoE.

  Attributes:
    epsilon: Added to the mean square.
    axis: Logical axis of the heads.
    scale_init: Initializer of the scale [N,H].
    dtype: Dtype of the result. `None` promotes input and scale.
    param_dtype: Dtype in which the scale is stored.
  """

  epsilon: float = 1e-6
  axis: str = axes.HEADS
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length heads head_dim"]
  ) -> Float[Array, "batch length heads head_dim"]:
    """Returns the normalized `x`."""
    init = logical.partitioned(self.scale_init, (self.axis, axes.HEAD_DIM))
    scale = self.param("scale", init, x.shape[2:], self.param_dtype)
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    x = precision.widen(x)
    mean_square = jnp.mean(x * x, axis=(-2, -1), keepdims=True)
    x *= jax.lax.rsqrt(mean_square + self.epsilon)
    return (x * scale.astype(x.dtype)[None, None]).astype(dtype)


class SeparateNorm(nn.Module):
  """Norm of each head with its own scale, as in Command R.

  Attributes:
    subtracts_mean: Whether it is a layer norm instead of a root-mean-square
      norm.

  The other attributes are those of `AllHeadsNorm`.
  """

  epsilon: float = 1e-6
  subtracts_mean: bool = False
  axis: str = axes.HEADS
  scale_init: nn.initializers.Initializer = nn.initializers.ones
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length heads head_dim"]
  ) -> Float[Array, "batch length heads head_dim"]:
    """Returns the normalized `x`."""
    init = logical.partitioned(self.scale_init, (self.axis, axes.HEAD_DIM))
    scale = self.param("scale", init, x.shape[2:], self.param_dtype)
    dtype = dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
    x = precision.widen(x)
    if self.subtracts_mean:
      x -= jnp.mean(x, axis=-1, keepdims=True)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(mean_square + self.epsilon)
    return (x * scale.astype(x.dtype)[None, None]).astype(dtype)


class QueryKeyNorm(nn.Module):
  """The norms of queries and keys of an attention layer.

  They belong to the layer, whose parameters are `query_norm/...` and
  `key_norm/...`; the layer calls `kernels.bind_fields` first.

  Attributes:
    query_norm: Maps queries [B,T,N,H] to the same shape; `None` leaves them.
    key_norm: Maps keys [B,T,K,H] likewise, before they are stored in a cache.
    after_rotary: Whether rotary positions come before the norms, as in Pax.
  """

  query_norm: nn.Module | None = None
  key_norm: nn.Module | None = None
  after_rotary: bool = False

  @nn.nowrap
  def normalize_query(self, x: jax.Array) -> jax.Array:
    """Returns the normalized queries."""
    return x if self.query_norm is None else self.query_norm(x)

  @nn.nowrap
  def normalize_key(self, x: jax.Array) -> jax.Array:
    """Returns the normalized keys."""
    return x if self.key_norm is None else self.key_norm(x)


class PerDimScale(nn.Module):
  """Multiplies each feature of queries by a positive learned factor.

    x * softplus(scale) / log(2)

  which is `x` for the initial scale of zero. With the kernel's own `H ** -0.5`
  this is Pax's `PerDimScale`, which multiplies queries by
  `softplus(scale) * 1.442695041 / sqrt(H)`. One scale serves all heads.

  Attributes:
    scale_init: Initializer of the scale, before the softplus.
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
    factor = jax.nn.softplus(precision.widen(scale)) / math.log(2.0)
    x = precision.widen(x)
    return (x * factor.astype(x.dtype)[None, None, None, :]).astype(dtype)
