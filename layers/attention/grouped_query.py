"""Self-attention with fewer key/value heads than query heads.

With `num_kv_heads == num_heads` this is multi-head attention, with one
key/value head multi-query attention, between them grouped-query attention
(Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). There is no dropout or
residual here, and no norm but those of queries and keys.

Einsum letters: B batch, T length, D embed, N heads, K key/value heads,
H head_dim.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import dimensions, remat, rotary_embedding
from paxon.layers.attention import kernels, kv_cache
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import projections as attention_projections
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
    projections: How queries, keys and values are made: with a kernel for each
      (`SeparateProjections`), or with one (`CombinedProjections`).
    use_bias: Whether learned values are added to queries, keys, values and the
      output.
    logit_cap: Bends attention logits into `(-logit_cap, logit_cap)`, if the
      kernel can; `None` does not.
    query_norm: Maps queries [B,T,N,H] to the same, before they are rotated;
      `None` leaves them.
    key_norm: Maps keys [B,T,K,H] likewise, before they are stored.
    position_bias: Called with the positions of queries [B,T] and of keys [B,S]
      and the number of heads; what it returns, [B,N,T,S], is added to the
      logits, if the kernel can. `None` adds nothing.
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
  projections: attention_projections.Projections = (
    attention_projections.SeparateProjections()
  )
  use_bias: bool = False
  logit_cap: float | None = None
  query_norm: nn.Module | None = None
  key_norm: nn.Module | None = None
  position_bias: nn.Module | None = None

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
    if self.logit_cap is not None and not self.logit_cap > 0:
      raise ValueError(
        f"{name}.logit_cap must be positive or None, got {self.logit_cap}."
      )
    # Known early for our own embedding; other callables check when called.
    rotary = self.rotary
    whole = isinstance(rotary, rotary_embedding.Rotary) and (
      rotary.rotary_dim is None
    )
    if whole and self.head_dim % 2:
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
    query, key, value = self._projected(x)
    if self.query_norm is not None:
      query = self.query_norm(query)
    if self.key_norm is not None:
      key = self.key_norm(key)
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
    # Given where they are set only, so that a kernel need not know of them.
    more: dict[str, Any] = {}
    if self.logit_cap is not None:
      more["logit_cap"] = self.logit_cap
    if self.position_bias is not None:
      more["bias"] = self.position_bias(
        positions, seen.positions, self.num_heads
      )
    context = self.kernel(query, seen.key, seen.value, mask, **more)
    context = remat.tag(context, remat.ATTENTION_CONTEXT)
    return self._output(context, x.shape[-1])

  def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B,T,N,H], keys and values [B,T,K,H]."""
    layer = attention_projections.Layer(
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      use_bias=self.use_bias,
      kernel_init=self.projection_init,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      einsum=self.einsum,
      param=self.param,
    )
    return self.projections(layer, x)

  def _output(self, context: jax.Array, embed_dim: int) -> jax.Array:
    shape = (self.num_heads, self.head_dim, embed_dim)
    init = logical.partitioned(
      self.output_init, (axes.HEADS, axes.HEAD_DIM, axes.EMBED)
    )
    weight = self.param("out", init, shape, self.param_dtype)
    bias = None
    if self.use_bias:
      bias_init = logical.partitioned(nn.initializers.zeros, (axes.EMBED,))
      bias = self.param("out_bias", bias_init, (embed_dim,), self.param_dtype)
    context, weight, bias = dtypes.promote_dtype(
      context, weight, bias, dtype=self.dtype
    )
    output = self.einsum("BTNH,NHD->BTD", context, weight)
    if bias is not None:
      output += bias[None, None, :]
    return remat.tag(output, remat.ATTENTION_OUTPUT)
