"""Relative positions of Transformer-XL, which depend on what a query holds.

  logit[t, s] = (q_t . k_s + q_t . r_{t-s} + u . k_s + v . r_{t-s}) * scale

for `r_d = W [sin(d f), cos(d f)]`, frequencies `f` as of sinusoidal positions,
and learned `W`, `u`, `v`; there are no other positions. Dai et al. 2019,
https://arxiv.org/abs/1901.02860, section 3.3.

The sinusoid of a difference is a sum of products of sinusoids, so the terms
with `r` are one product of what queries make with `[cos(s f), sin(s f)]`. Any
positions will do (packed, of a cache), and none needs a table of distances.

Letters: B batch, T queries, S keys, N heads, H head_dim, F features of `r`.
"""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.sharding import axes, checks, logical

# `(query with u [B,T,N,H], q_positions [B,T], kv_positions [B,S]) ->
# [B,N,T,S]`.
_Relative = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_kernel_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
)


class TransformerXlPosition(nn.Module):
  """Adds `u` to queries, and gives the part of the logits that has `r`.

  Attributes:
    embed_dim: Number of sinusoids; even. The paper's is the model's width.
    max_wavelength: The slowest sinusoid turns once in about `2 * pi *
      max_wavelength` positions.
    kernel_init: Initializer of `W` [F,N,H].
    bias_init: Initializer of `u` and `v` [N,H].
    param_dtype: Dtype in which they are stored.
  """

  embed_dim: int
  max_wavelength: float = 10_000.0
  kernel_init: nn.initializers.Initializer = _kernel_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "embed_dim")
    if self.embed_dim % 2:
      raise ValueError(
        f"TransformerXlPosition.embed_dim must be even, got {self.embed_dim}."
      )
    if self.max_wavelength <= 1:
      raise ValueError(
        "TransformerXlPosition.max_wavelength must exceed 1, got "
        f"{self.max_wavelength}."
      )

  @nn.compact
  def __call__(
    self, query: Float[Array, "batch length heads head_dim"], scale: float
  ) -> tuple[Float[Array, "batch length heads head_dim"], _Relative]:
    """Returns queries with `u`, and the bias of the logits as a function.

    Args:
      query: Queries without positions.
      scale: What the kernel multiplies products by.

    Returns:
      The queries for the kernel. And a function of such queries, or some of
      them, their positions [B,T] and those of keys [B,S], that gives
      [B,N,T,S]; it has no parameters left to make, so it may be called inside
      of JAX's transformations.
    """
    N, H = query.shape[2:]
    weight = self.param(
      "relative",
      logical.partitioned(
        self.kernel_init, (axes.EMBED, axes.HEADS, axes.HEAD_DIM)
      ),
      (self.embed_dim, N, H),
      self.param_dtype,
    )
    # Of rank two, but no matrices: weight decay is not for them.
    bias_init = logical.partitioned(
      self.bias_init, (axes.HEADS, axes.HEAD_DIM), regularized=False
    )
    content = self.param("content_bias", bias_init, (N, H), self.param_dtype)
    position = self.param("position_bias", bias_init, (N, H), self.param_dtype)
    content, position = (precision.widened(x) for x in (content, position))

    def relative(
      query: Float[Array, "rows length heads head_dim"],
      q_positions: Int[Array, "rows length"],
      kv_positions: Int[Array, "rows kv_length"],
    ) -> Float[Array, "rows heads length kv_length"]:
      wide = precision.widened(query)
      wide += (position - content).astype(wide.dtype)[None, None]
      made = jnp.einsum("BTNH,FNH->BTNF", wide, weight.astype(wide.dtype))
      by_sine, by_cosine = jnp.split(made, 2, axis=-1)
      sin, cos = self._waves(q_positions, wide.dtype)
      sin, cos = sin[:, :, None], cos[:, :, None]
      # sin(t - s) = sin t cos s - cos t sin s; cos(t - s) likewise.
      queries = jnp.concatenate(
        [
          by_sine * sin + by_cosine * cos,
          by_cosine * sin - by_sine * cos,
        ],
        axis=-1,
      )
      sin, cos = self._waves(kv_positions, wide.dtype)
      keys = jnp.concatenate([cos, sin], axis=-1)
      return jnp.einsum("BTNF,BSF->BNTS", queries, keys) * scale

    wide = precision.widened(query)
    wide += content.astype(wide.dtype)[None, None]
    return wide.astype(query.dtype), relative

  def _waves(
    self, positions: jax.Array, dtype: DTypeLike
  ) -> tuple[jax.Array, jax.Array]:
    """Returns sines and cosines [B,T,F/2] of positions."""
    exponent = jnp.arange(0, self.embed_dim, 2, dtype=dtype) / self.embed_dim
    frequency = jnp.asarray(self.max_wavelength, dtype) ** -exponent
    angle = positions.astype(dtype)[:, :, None] * frequency[None, None]
    return jnp.sin(angle), jnp.cos(angle)
