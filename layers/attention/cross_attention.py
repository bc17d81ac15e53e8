"""Attention of a sequence to an encoder's memory.

Queries come from the sequence, keys and values from the memory. While decoding
the memory does not change, so its keys and values are made once, in prefill,
and kept in the collection `cache`:

  * training: `layer(x, memory, segment_ids, memory_segment_ids)`;
  * prefill: the same with `cache_length` (any number: it sizes the caches of
    self-attention, while the memory is kept whole);
  * decoding: `layer(x, None, segment_ids, None)`.

A token sees the memory of its own segment: padding (segment 0) is never seen,
and packed examples see their own encoder inputs only, if the segments of both
sides agree. There is no order here, so nothing is rotated or masked by
position.

Letters: B batch, T length, S memory length, N heads, K key/value heads,
H head_dim.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import remat
from paxon.layers.attention import (
  cache_variables,
  kernels,
  kv_cache,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.quantization import products
from paxon.sharding import axes, checks

# Both scale by the true number of summed terms: D into heads, N * H out.
_projection_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
)
_output_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=2
)


class MemoryCache(nn.Module):
  """Keeps the keys and values of a memory, which never grow.

  Attributes:
    storage: How they are kept.
  """

  storage: kv_cache.Storage = kv_cache.AsIs()

  @nn.compact
  def __call__(
    self, new: kv_cache.KeyValues | None, *, keep: bool, dtype: DTypeLike
  ) -> kv_cache.KeyValues:
    """Returns the keys and values of the memory.

    Args:
      new: What was made of the memory; None reads what is kept.
      keep: Whether `new` is kept (prefill).
      dtype: Dtype of keys and values that are read.

    Raises:
      ValueError: There is nothing to read, or something is kept already.
    """
    filled = cache_variables.is_filled(self)
    if new is None:
      if not filled:
        raise ValueError(
          "There is no memory, and no cache that holds its keys and values; "
          "give the memory, in a prefill together with cache_length."
        )
      slots = cache_variables.load(self).slots
      return kv_cache.unpacked(slots, self.storage, dtype=dtype)
    if filled:
      raise ValueError(
        "A memory was given, but the cache holds its keys and values already; "
        "give None while decoding, or leave the collection "
        f"{kv_cache.COLLECTION!r} out."
      )
    if keep:
      cache_variables.save(
        self,
        kv_cache.packed(new, self.storage),
        new.key.shape[1],
        slot_axis=axes.KV_LENGTH,
      )
    return new


class CrossAttention(nn.Module):
  """Attention of a sequence to a memory.

  Attributes:
    num_heads: Number of query heads.
    num_kv_heads: Number of key/value heads; divides `num_heads`.
    head_dim: Width of a head.
    kernel: Computes attention from queries, keys, values and the mask.
    cache: Where keys and values of the memory are kept while decoding.
    projection_init: Initializer of the kernels of queries, keys and values.
    output_init: Initializer of the kernel of the output.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
    einsum: The contraction of the projections.
    use_bias: Whether learned values are added to queries, keys, values and,
      unless `output_bias` says otherwise, the output.
    output_bias: Whether a learned value is added to the output; `None` is as
      `use_bias` says.
    logit_scale: What products of queries and keys are multiplied by; `None` is
      `head_dim ** -0.5`.
    logit_cap: Bends attention logits into `(-logit_cap, logit_cap)`, if the
      kernel can; `None` does not.
    query_norm: Maps queries [B,T,N,H] to the same; `None` leaves them.
    key_norm: Maps keys [B,S,K,H] likewise, before they are kept.
    query_scale: Maps queries [B,T,N,H] to the same, after their norm.
    sinks: Called with the number of heads; what it returns, [N], are logits for
      nothing (`attention.sinks`), if the kernel can. `None` is no sinks.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  kernel: kernels.Kernel = kernels.plain
  # A new part for each layer: a shared default would be a shared cache.
  cache: nn.Module = dataclasses.field(
    default_factory=functools.partial(MemoryCache, parent=None)
  )
  projection_init: nn.initializers.Initializer = _projection_init
  output_init: nn.initializers.Initializer = _output_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum
  use_bias: bool = False
  output_bias: bool | None = None
  logit_scale: float | None = None
  logit_cap: float | None = None
  query_norm: nn.Module | None = None
  key_norm: nn.Module | None = None
  query_scale: nn.Module | None = None
  sinks: nn.Module | None = None

  quantization_roles: ClassVar[tuple[str, ...]] = (
    products.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_heads", "num_kv_heads", "head_dim")
    checks.check_multiple(self, "num_heads", "num_kv_heads")
    checks.check_positive(self, "logit_cap", "logit_scale")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    memory: Float[Array, "memory_batch kv_length memory_embed"] | None,
    segment_ids: Int[Array, "batch length"] | None = None,
    memory_segment_ids: Int[Array, "memory_batch kv_length"] | None = None,
    *,
    cache_length: int | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns what each token gathered from the memory of its segment.

    Several rows of `x` may share a row of the memory (several samples of one
    prompt): rows `i * n` to `i * n + n - 1` then see row `i`, which is kept
    once.

    Args:
      x: The tokens.
      memory: What the encoder returned; None reads the cache.
      segment_ids: Segments of the tokens; 0 is padding, whose output is zero.
        None is one document without padding.
      memory_segment_ids: Segments of the memory likewise.
      cache_length: Keeps keys and values for decoding (prefill).

    Raises:
      ValueError: Shapes do not fit, or what is kept and what is given are
        both there, or both not.
    """
    segment_ids = attention_mask.fill_segments(self, x, segment_ids)
    layer = projections.Layer(
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
    query = projections.to_heads(
      layer, "query", x, self.num_heads, self.head_dim
    )
    if self.query_norm is not None:
      query = self.query_norm(query)
    if self.query_scale is not None:
      query = self.query_scale(query)
    query = remat.tag(query, remat.ATTENTION_QUERY)
    seen = self.cache(
      self._key_values(layer, memory, memory_segment_ids),
      keep=cache_length is not None,
      dtype=query.dtype,
    )
    context = self._gathered(query, segment_ids, seen)
    context = remat.tag(context, remat.ATTENTION_CONTEXT)
    bias = self.use_bias if self.output_bias is None else self.output_bias
    return projections.output(
      layer,
      context,
      x.shape[-1],
      kernel_init=self.output_init,
      use_bias=bias,
    )

  def _key_values(
    self,
    layer: projections.Layer,
    memory: jax.Array | None,
    memory_segment_ids: jax.Array | None,
  ) -> kv_cache.KeyValues | None:
    """Returns what is made of a memory."""
    if memory is None:
      return None
    memory_segment_ids = attention_mask.fill_segments(
      self, memory, memory_segment_ids, field="memory_segment_ids"
    )
    key, value = (
      projections.to_heads(
        layer,
        name,
        memory,
        self.num_kv_heads,
        self.head_dim,
        heads_axis=axes.KV_HEADS,
      )
      for name in ("key", "value")
    )
    if self.key_norm is not None:
      key = self.key_norm(key)
    return kv_cache.tokens(
      remat.tag(key, remat.ATTENTION_KEY),
      remat.tag(value, remat.ATTENTION_VALUE),
      jnp.zeros_like(memory_segment_ids),
      memory_segment_ids,
    )

  def _gathered(
    self,
    query: jax.Array,
    segment_ids: jax.Array,
    seen: kv_cache.KeyValues,
  ) -> jax.Array:
    """Returns what the kernel gives, [B,T,N,H]."""
    batch, rows = query.shape[0], seen.key.shape[0]
    if batch % rows:
      raise ValueError(
        f"{type(self).__name__} got {batch} rows of tokens for {rows} rows of "
        "memory; there must be as many, or a multiple."
      )
    # Without an order among queries, those of one memory are one long row.
    shape = query.shape
    query = query.reshape(rows, -1, *shape[2:])
    segment_ids = segment_ids.reshape(rows, -1)
    mask = attention_mask.AttentionMask(
      q_positions=jnp.zeros_like(segment_ids),
      kv_positions=seen.positions,
      q_segment_ids=segment_ids,
      kv_segment_ids=seen.segment_ids,
      causal=False,
    )
    # Given where they are set only, so that a kernel need not know of them.
    more: dict[str, Any] = {}
    if self.logit_cap is not None:
      more["logit_cap"] = self.logit_cap
    if self.logit_scale is not None:
      more["scale"] = self.logit_scale
    if self.sinks is not None:
      more["sinks"] = self.sinks(self.num_heads)
    context = self.kernel(query, seen.key, seen.value, mask, **more)
    return context.reshape(shape)
