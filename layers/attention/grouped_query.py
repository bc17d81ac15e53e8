"""Self-attention with fewer key/value heads than query heads.

With `num_kv_heads == num_heads` this is multi-head attention, with one
key/value head multi-query attention, between them grouped-query attention
(Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). There is no bias,
norm, dropout or residual here.

Einsum letters: B batch, T length, D embed, N heads, K key/value heads,
H head_dim.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import dimensions, remat, rotary_embedding
from paxon.layers.attention import kernels, kv_cache
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import axes, logical

# Both scale by the true number of summed terms: D into heads, N * H out.
_projection_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
)
_output_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=2
)


# Numbers of key/value heads that a message proposes.
_MAX_PROPOSED = 256


class GroupedQueryAttention(nn.Module):
  """Attention of a sequence to itself.

  Attributes:
    num_heads: Number of query heads.
    num_kv_heads: Number of key/value heads; divides `num_heads`.
    head_dim: Width of a head.
    rotary: Maps queries or keys [B,T,N,H] and positions [B,T] to what the
      kernel gets; `None` leaves positions to the mask.
    kernel: Computes attention from queries, keys, values and the mask.
    cache: Where keys and values are kept while decoding.
    causal: Whether later tokens are hidden.
    window: How many positions a token sees, its own included; None for all.
    projection_init: Initializer of the kernels of queries, keys and values.
    output_init: Initializer of the kernel of the output.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
    einsum: The contraction of the projections.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  rotary: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  kernel: kernels.Kernel = kernels.plain
  # A new part for each layer: a shared default would be a shared cache. No
  # parent, or an enclosing module would adopt it before this one does.
  cache: nn.Module = dataclasses.field(
    default_factory=functools.partial(kv_cache.ContiguousCache, parent=None)
  )
  causal: bool = True
  window: int | None = None
  projection_init: nn.initializers.Initializer = _projection_init
  output_init: nn.initializers.Initializer = _output_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  def __post_init__(self) -> None:
    super().__post_init__()
    name = type(self).__name__
    dimensions.check(self, "num_heads", "num_kv_heads", "head_dim", "window")
    if self.num_heads % self.num_kv_heads:
      heads = self.num_heads
      # The small ones suffice, and a huge number is not worth a search.
      small = range(1, min(heads, _MAX_PROPOSED) + 1)
      divisors = [str(n) for n in (*small, heads) if heads % n == 0]
      divisors = list(dict.fromkeys(divisors))
      choice = " or ".join(filter(None, (", ".join(divisors[:-1]), str(heads))))
      raise ValueError(
        f"{name}.num_heads ({heads}) must be a multiple of num_kv_heads "
        f"({self.num_kv_heads}); use {choice}."
      )

    # Known early for our own embedding; other callables check when called.
    is_rotary = isinstance(self.rotary, rotary_embedding.Rotary)
    if is_rotary and self.head_dim % 2:
      raise ValueError(
        f"{name}.head_dim must be even for Rotary, got {self.head_dim}."
      )

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns what each token gathered from those it sees.

    Args:
      x: The tokens.
      positions: Their positions, from 0 in each segment.
      segment_ids: Their segments; 0 is padding, which gathers zeros.
      cache_length: Makes a cache with this number of slots (prefill).
    """
    query, key, value = self._projections(x)
    if self.rotary is not None:
      query = self.rotary(query, positions)
      key = self.rotary(key, positions)
    query = remat.tag(query, remat.ATTENTION_QUERY)
    key = remat.tag(key, remat.ATTENTION_KEY)
    value = remat.tag(value, remat.ATTENTION_VALUE)

    seen = self.cache(
      key, value, positions, segment_ids, cache_length=cache_length
    )
    mask = attention_mask.AttentionMask(
      q_positions=positions,
      kv_positions=seen.positions,
      q_segment_ids=segment_ids,
      kv_segment_ids=seen.segment_ids,
      causal=self.causal,
      window=self.window,
    )
    context = self.kernel(query, seen.key, seen.value, mask)
    context = remat.tag(context, remat.ATTENTION_CONTEXT)
    return self._output(context, x.shape[-1])

  def _projections(self, x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns queries [B,T,N,H], keys and values [B,T,K,H]."""
    D, N, K, H = x.shape[-1], self.num_heads, self.num_kv_heads, self.head_dim
    init = self.projection_init
    weights = [
      self._weight("query", init, (D, N, H), (axes.EMBED, axes.HEADS)),
      self._weight("key", init, (D, K, H), (axes.EMBED, axes.KV_HEADS)),
      self._weight("value", init, (D, K, H), (axes.EMBED, axes.KV_HEADS)),
    ]
    x, *weights = dtypes.promote_dtype(x, *weights, dtype=self.dtype)
    # Pinned so that tensor parallelism splits heads, and a sequence split over
    # devices stays split through the projections.
    heads = (axes.ACTIVATION_HEADS,) + 2 * (axes.ACTIVATION_KV_HEADS,)
    return tuple(
      logical.constrain(
        self.einsum("BTD,DNH->BTNH", x, weight),
        (axes.BATCH, axes.LENGTH, head, axes.ACTIVATION_HEAD_DIM),
      )
      for weight, head in zip(weights, heads, strict=True)
    )

  def _output(self, context: jax.Array, embed_dim: int) -> jax.Array:
    shape = (self.num_heads, self.head_dim, embed_dim)
    init = logical.partitioned(
      self.output_init, (axes.HEADS, axes.HEAD_DIM, axes.EMBED)
    )
    weight = self.param("out", init, shape, self.param_dtype)
    context, weight = dtypes.promote_dtype(context, weight, dtype=self.dtype)
    output = self.einsum("BTNH,NHD->BTD", context, weight)
    return remat.tag(output, remat.ATTENTION_OUTPUT)

  def _weight(
    self,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    names: tuple[str, str],
  ) -> jax.Array:
    init = logical.partitioned(init, (*names, axes.HEAD_DIM))
    return self.param(name, init, shape, self.param_dtype)
