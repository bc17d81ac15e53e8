"""Self-attention: multi-head, grouped-query and multi-query.

With `num_kv_heads == num_heads` this is multi-head attention, with one
key/value head multi-query attention, between them grouped-query attention
(Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). Variants are submodules
and plain objects in the fields of the layer. There is no dropout or residual
here, and no norm but those of queries and keys.

Letters: B batch, T length, S keys, D embed, N heads, K key/value heads,
H head_dim.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import contracts, remat, token_context
from paxon.layers.attention import kernels, kv_cache
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import projections as attention_projections
from paxon.quantization import matmuls
from paxon.sharding import checks


class GroupedQueryAttention(nn.Module):
  """Attention of a sequence to itself.

  Attributes:
    num_heads: Number of query heads.
    num_kv_heads: Number of key/value heads; divides `num_heads`.
    head_dim: Width of a head.
    rotary: Maps queries or keys [B,T,N,H] and positions [B,T] to rotated ones;
      `None` uses positions in the mask (and in `logits`) only.
    mask: Causality, windows and chunks.
    projections: Kernels and biases of queries, keys, values and the output,
      and of gates of the output.
    convolution: Maps queries, keys, values and segments to convolved queries,
      keys and values, as in Primer (`recurrent.head_convolution`); `None` does
      not.
    head_norm: Norms of queries and keys (`head_norm.QueryKeyNorm`), or `None`.
    limit: Clips queries, keys and values to `[-limit, limit]`, after norms and
      before rotary positions, as in OLMo; `None` does not.
    logits: Scale, soft cap, biases and sinks of the logits. The kernel must
      support those that are set.
    ngrammer: Augments the weighted values of the heads by n-grams of their
      codes, such as a `quantizers.ngrammer.Ngrammer` with a quantizer of N
      groups (Roy et al. 2022, https://arxiv.org/abs/2207.06366); `None` does
      not.
    kernel: Computes attention from queries, keys, values and the mask.
    cache: Stores keys and values while decoding.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the kernels are stored.
    einsum: The contraction of the projections.
    max_logits: Records the largest logit of each head
      (`max_logits.MaxLogits`), for `learners.qk_clip`; `None` does not.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  rotary: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  mask: attention_mask.MaskRules = attention_mask.MaskRules()
  projections: attention_projections.Projections = (
    attention_projections.SeparateProjections()
  )
  convolution: nn.Module | None = None
  head_norm: nn.Module | None = None
  limit: float | None = None
  # Factories, because default objects would be shared by two layers; without a
  # parent, because an enclosing module would adopt them.
  logits: kernels.Logits = dataclasses.field(
    default_factory=functools.partial(kernels.Logits, parent=None)
  )
  ngrammer: nn.Module | None = None
  kernel: kernels.Kernel = kernels.auto
  cache: nn.Module = dataclasses.field(
    default_factory=functools.partial(kv_cache.ContiguousCache, parent=None)
  )
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum
  max_logits: nn.Module | None = None

  quantization_roles: ClassVar[tuple[str, ...]] = (
    matmuls.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_heads", "num_kv_heads", "head_dim")
    checks.check_multiple(self, "num_heads", "num_kv_heads")
    checks.check_positive(self, "limit")
    if self.max_logits is not None and self.head_norm is not None:
      raise ValueError(
        f"{type(self).__name__}.max_logits serves to scale the kernels of"
        " queries and keys, which head_norm makes ineffective; set one of them."
      )
    if isinstance(self.rotary, contracts.Rotary):
      self.rotary.check_width(self.head_dim, f"{type(self).__name__}.head_dim")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the tokens after attention.

    Args:
      x: The tokens.
      context: Their positions and segments.

    Raises:
      TypeError: Positions or segments are not integers.
      ValueError: Shapes do not fit, or a prefix is given while decoding.
    """
    positions, segment_ids = context.fill_arrays(self, x)
    query, key, value = self.projections(self, x)
    if self.convolution is not None:
      query, key, value = self.convolution(query, key, value, context)
    if self.limit is not None:
      value = jnp.clip(value, -self.limit, self.limit)
    query, key = self._normalize_and_rotate(query, key, positions, segment_ids)
    logits = kernels.bind_fields(self.logits, self)
    query, bias = logits.prepare(query)
    query = remat.tag(query, remat.ATTENTION_QUERY)
    key = remat.tag(key, remat.ATTENTION_KEY)
    value = remat.tag(value, remat.ATTENTION_VALUE)
    stored = self.cache(
      key, value, positions, segment_ids, cache_length=context.cache_length
    )
    name = type(self).__name__
    mask = stored.mask(name, positions, segment_ids, context.prefix, self.mask)
    if self.max_logits is not None:
      scale = self.head_dim**-0.5 if logits.scale is None else logits.scale
      self.max_logits(query, stored.key.astype(query.dtype), mask, scale=scale)
    keywords = logits.keywords(self.kernel, query, mask, bias)
    assert stored.value is not None
    heads = kernels.call(
      self.kernel,
      query,
      stored.key,
      stored.value,
      mask,
      parts=stored.parts,
      **keywords,
    )
    heads = remat.tag(heads, remat.ATTENTION_CONTEXT)
    if self.ngrammer is not None:
      merged = heads.reshape(*heads.shape[:2], -1)
      heads = self.ngrammer(None, merged, context).reshape(heads.shape)
    gate = self.projections.find_gate(self, x)
    if gate is not None:
      heads *= gate.astype(heads.dtype)
    return self.projections.output(self, heads, x.shape[-1])

  def _normalize_and_rotate(
    self,
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys with their norms and rotary positions."""
    norm, rotary = None, self.rotary
    # Padding after a document must not add to its length.
    if isinstance(rotary, contracts.Rotary) and rotary.depends_on_length:
      positions = jnp.where(segment_ids == 0, 0, positions)
    if self.head_norm is not None:
      norm = kernels.bind_fields(self.head_norm, self)
    if norm is not None and not norm.after_rotary:
      query, key = norm.normalize_query(query), norm.normalize_key(key)
    if self.limit is not None:
      query = jnp.clip(query, -self.limit, self.limit)
      key = jnp.clip(key, -self.limit, self.limit)
    if rotary is not None:
      query, key = rotary(query, positions), rotary(key, positions)
    if norm is not None and norm.after_rotary:
      query, key = norm.normalize_query(query), norm.normalize_key(key)
    return query, key
