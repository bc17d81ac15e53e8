"""Position biases of attention logits: ALiBi, T5, Transformer-XL.

`Alibi` and `RelativeBias` are submodules of an attention layer, `(q_positions
[B,T], kv_positions [B,S], number of heads) -> [B,N,T,S]` in float32. Positions
restart in each packed document; pairs across documents are masked.

`TransformerXlPosition` depends on the content of queries:

  logit[t, s] = (q_t . k_s + q_t . r_{t-s} + u . k_s + v . r_{t-s}) * scale

for `r_d = W [sin(d f), cos(d f)]`, frequencies `f` as of sinusoidal positions,
and learned `W`, `u`, `v`. Dai et al. 2019, https://arxiv.org/abs/1901.02860,
section 3.3. The sinusoid of a difference is a sum of products of sinusoids, so
the terms with `r` are one matmul of a function of the queries with `[cos(s f),
sin(s f)]`. Any positions work (packed, of a cache), and none needs a table of
distances.

Letters: B batch, T queries, S keys, N heads.
"""

from collections.abc import Callable
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.sharding import axes, checks, logical


class Alibi(nn.Module):
  """Minus the distance, times a slope of each head's own.

  With N heads, a power of two, the slopes are `2 ** (-8 * (n + 1) / N)`; for
  another N, those of the power of two below, and then every other one of twice
  that power. Press et al. 2021, https://arxiv.org/abs/2108.12409. There is
  nothing to learn.
  """

  def __call__(
    self,
    q_positions: Int[Array, "batch length"],
    kv_positions: Int[Array, "batch kv_length"],
    num_heads: int,
  ) -> Float[Array, "batch heads length kv_length"]:
    """Returns the bias of each head, query and key."""
    distance = jnp.abs(_distance(q_positions, kv_positions))
    slopes = jnp.asarray(_slopes(num_heads), jnp.float32)
    return -slopes[None, :, None, None] * distance.astype(jnp.float32)[:, None]


class RelativeBias(nn.Module):
  """A learned value per head and bucket of distances, as T5 has it.

  Half of the buckets (of each direction) hold one distance each; the others
  grow, so that the last one begins near `max_distance`. Raffel et al. 2019,
  https://arxiv.org/abs/1910.10683, section 2.1. T5 has one table for all
  layers: mark the part with `layers.stacks.shared.shared`.

  Attributes:
    num_buckets: Number of values of a head; even, and a multiple of 4 if
      bidirectional.
    max_distance: All distances from here on share the last bucket.
    bidirectional: Whether later keys have buckets of their own (half of them);
      otherwise they are taken as distance 0.
    table_init: Initializer of the table [buckets, N].
    param_dtype: Dtype in which the table is stored.
  """

  num_buckets: int = 32
  max_distance: int = 128
  bidirectional: bool = False
  table_init: nn.initializers.Initializer = nn.initializers.normal(1.0)
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_buckets", "max_distance")
    parts = 4 if self.bidirectional else 2
    if self.num_buckets % parts:
      raise ValueError(
        f"RelativeBias.num_buckets must be a multiple of {parts}, got "
        f"{self.num_buckets}."
      )
    if self.max_distance <= self.num_buckets // parts:
      raise ValueError(
        f"RelativeBias.max_distance ({self.max_distance}) must exceed the "
        f"{self.num_buckets // parts} distances that have separate buckets."
      )

  @nn.compact
  def __call__(
    self,
    q_positions: Int[Array, "batch length"],
    kv_positions: Int[Array, "batch kv_length"],
    num_heads: int,
  ) -> Float[Array, "batch heads length kv_length"]:
    """Returns the bias of each head, query and key."""
    table = self.param(
      "table",
      logical.partitioned(
        self.table_init, (None, axes.HEADS), regularized=False
      ),
      (self.num_buckets, num_heads),
      self.param_dtype,
    )
    bucket = self._bucket(_distance(q_positions, kv_positions))
    bias = jnp.take(precision.widen(table), bucket, axis=0, mode="clip")
    return jnp.moveaxis(bias, 3, 1)

  def _bucket(self, distance: jax.Array) -> jax.Array:
    """The bucket of each distance; positive where the key is earlier."""
    buckets, first = self.num_buckets, jnp.zeros_like(distance)
    if self.bidirectional:
      buckets //= 2
      first = jnp.where(distance < 0, buckets, 0)
      distance = jnp.abs(distance)
    else:
      distance = jnp.maximum(distance, 0)
    exact = buckets // 2
    # How far along the growing buckets, by the logarithm.
    ratio = jnp.maximum(distance, exact).astype(jnp.float32) / exact
    along = jnp.log(ratio) / math.log(self.max_distance / exact)
    growing = exact + (along * (buckets - exact)).astype(distance.dtype)
    growing = jnp.minimum(growing, buckets - 1)
    return first + jnp.where(distance < exact, distance, growing)


def _distance(
  q_positions: jax.Array, kv_positions: jax.Array
) -> Int[Array, "batch length kv_length"]:
  return q_positions[:, :, None] - kv_positions[:, None, :]


def _slopes(num_heads: int) -> list[float]:
  def make_powers(power: int) -> list[float]:
    return [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]

  below = 2 ** int(math.log2(num_heads))
  return (make_powers(below) + make_powers(2 * below)[::2])[:num_heads]


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

    The function maps such queries, or some of them, their positions [B,T] and
    those of keys [B,S] to [B,N,T,S], times `scale`. It makes no parameters, so
    it may be called in JAX's transformations.
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
    content, position = (precision.widen(x) for x in (content, position))

    def relative(
      query: Float[Array, "rows length heads head_dim"],
      q_positions: Int[Array, "rows length"],
      kv_positions: Int[Array, "rows kv_length"],
    ) -> Float[Array, "rows heads length kv_length"]:
      wide = precision.widen(query)
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

    wide = precision.widen(query)
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
