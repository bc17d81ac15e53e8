"""Cross-attention: attention of a sequence to the memory of an encoder.

Queries come from the sequence, keys and values from the memory. While decoding
the memory does not change, so its keys and values are made once, in prefill,
and kept in the collection `cache`:

  * training: `layer(x, memory, context, memory_segment_ids)`;
  * prefill: the same with a `cache_length` in the context (any number: it sizes
    the caches of self-attention, while the memory is kept whole);
  * decoding: `layer(x, None, context)`.

A token attends to the memory of its own segment: padding (segment 0) is masked,
and packed examples attend to their own encoder inputs, if the segments of both
sides agree. Positions are not used: nothing is rotated or masked by position.

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

from paxon.layers import remat, token_context
from paxon.layers.attention import cache_variables, kernels, kv_cache
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import projections as attention_projections
from paxon.quantization import matmuls
from paxon.sharding import axes, checks


class MemoryCache(nn.Module):
  """Stores the keys and values of a memory, which never grow.

  Samples of a prompt share them, so `decoding.cache_rows` neither repeats nor
  selects them.

  Attributes:
    storage: Format of stored keys and values.
  """

  storage: kv_cache.Storage = kv_cache.AsIs()

  @nn.compact
  def __call__(
    self, new: kv_cache.KeyValues | None, *, keep: bool, dtype: DTypeLike
  ) -> kv_cache.KeyValues:
    """Returns the keys and values of the memory, stored ones if `new` is None.

    `keep` stores the new ones (prefill); `dtype` is that of stored ones when
    read.

    Raises:
      ValueError: There is nothing to read, or the cache is filled already.
    """
    filled = cache_variables.is_filled(self)
    if new is None:
      if not filled:
        raise ValueError(
          "There is no memory, and no cache with its keys and values; pass the "
          "memory, and in a prefill also cache_length."
        )
      slots = cache_variables.load(self).shared
      return kv_cache.from_arrays(slots, self.storage, dtype=dtype)
    if filled:
      raise ValueError(
        "A memory was given, but its keys and values are in the cache already; "
        "pass None while decoding, or leave out the collection "
        f"{kv_cache.COLLECTION!r}."
      )
    if keep:
      arrays = kv_cache.to_arrays(new, self.storage)
      cache_variables.save(
        self,
        {cache_variables.SHARED + name: x for name, x in arrays.items()},
        new.key.shape[1],
        slot_axis=axes.KV_LENGTH,
      )
    return new


class CrossAttention(nn.Module):
  """Attention of a sequence to a memory.

  Attributes:
    logits: Scale, soft cap and sinks of the logits. The kernel must support
      those that are set.
    cache: Stores keys and values of the memory while decoding.

  The other attributes are those of `GroupedQueryAttention`.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  projections: attention_projections.SeparateProjections = (
    attention_projections.SeparateProjections()
  )
  head_norm: nn.Module | None = None
  # Factories and no parent, as in `GroupedQueryAttention`.
  logits: kernels.Logits = dataclasses.field(
    default_factory=functools.partial(kernels.Logits, parent=None)
  )
  kernel: kernels.Kernel = kernels.auto
  cache: nn.Module = dataclasses.field(
    default_factory=functools.partial(MemoryCache, parent=None)
  )
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (
    matmuls.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_heads", "num_kv_heads", "head_dim")
    checks.check_multiple(self, "num_heads", "num_kv_heads")
    attention_projections.check_separate(self, self.projections)
    if self.logits.has_bias:
      raise ValueError(
        "CrossAttention.logits must have no position_bias or relative_position:"
        " a memory has no positions."
      )

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    memory: Float[Array, "memory_batch kv_length memory_embed"] | None,
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
    memory_segment_ids: Int[Array, "memory_batch kv_length"] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the tokens after attention to the memory of their segments.

    Several sequences of `x` may share a sequence of the memory (several samples
    of one prompt): sequences `i * n` to `i * n + n - 1` then attend to memory
    `i`, which is stored once.

    Args:
      x: The tokens.
      memory: The output of the encoder; None reads the cache.
      context: Segments of the tokens; positions are not used. With a
        `cache_length`, keys and values are stored for decoding (prefill).
      memory_segment_ids: Segments of the memory; 0 is padding. None is one
        document without padding.

    Raises:
      TypeError: Segments are not integers.
      ValueError: Shapes do not fit, or a memory is missing, or given although
        the cache is filled.
    """
    segment_ids = token_context.fill_segments(self, x, context.segment_ids)
    query = self.projections.project(self, "query", x)
    logits = kernels.bind_fields(self.logits, self)
    norm = None
    if self.head_norm is not None:
      norm = kernels.bind_fields(self.head_norm, self)
      query = norm.normalize_query(query)
    query, _ = logits.prepare(query)
    query = remat.tag(query, remat.ATTENTION_QUERY)
    stored = self.cache(
      self._key_values(memory, memory_segment_ids, norm),
      keep=context.cache_length is not None,
      dtype=query.dtype,
    )
    heads = self._attend(query, segment_ids, stored, logits)
    heads = remat.tag(heads, remat.ATTENTION_CONTEXT)
    return self.projections.output(self, heads, x.shape[-1])

  def _key_values(
    self,
    memory: jax.Array | None,
    memory_segment_ids: jax.Array | None,
    norm: Any,
  ) -> kv_cache.KeyValues | None:
    """Returns the keys and values of a memory."""
    if memory is None:
      return None
    memory_segment_ids = token_context.fill_segments(
      self, memory, memory_segment_ids, field="memory_segment_ids"
    )
    key, value = (
      self.projections.project(self, name, memory, heads_axis=axes.KV_HEADS)
      for name in ("key", "value")
    )
    if norm is not None:
      key = norm.normalize_key(key)
    return kv_cache.tokens(
      remat.tag(key, remat.ATTENTION_KEY),
      remat.tag(value, remat.ATTENTION_VALUE),
      jnp.zeros_like(memory_segment_ids),
      memory_segment_ids,
    )

  def _attend(
    self,
    query: jax.Array,
    segment_ids: jax.Array,
    stored: kv_cache.KeyValues,
    logits: kernels.Logits,
  ) -> jax.Array:
    """Returns the output of the kernel, [B,T,N,H]."""
    batch, memory_batch = query.shape[0], stored.key.shape[0]
    if batch % memory_batch:
      raise ValueError(
        f"{type(self).__name__} got a batch of {batch} sequences for "
        f"{memory_batch} memories; it must be a multiple."
      )
    # Queries have no order, so those of one memory are one long sequence.
    shape = query.shape
    query = query.reshape(memory_batch, -1, *shape[2:])
    segment_ids = segment_ids.reshape(memory_batch, -1)
    mask = attention_mask.AttentionMask(
      q_positions=jnp.zeros_like(segment_ids),
      kv_positions=stored.positions,
      q_segment_ids=segment_ids,
      kv_segment_ids=stored.segment_ids,
      rules=attention_mask.MaskRules(causal=False),
    )
    keywords = logits.keywords(self.kernel, query, mask)
    assert stored.value is not None
    heads = kernels.call(
      self.kernel, query, stored.key, stored.value, mask, **keywords
    )
    return heads.reshape(shape)
