"""Multi-head latent attention (MLA): keys and values from one latent vector.

Each token has a latent `c` [R] and one rotated key `k` [P], which all heads
share; with a head's own matrices,

  key = [key_kernel c, k]      value = value_kernel c
  query = [unrotated part, rotated part]

A cache stores only `c` and `k`. DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434,
section 2.1 (V3 has the same).

Training and prefill make keys and values ("expanded"). Decoding attends to the
latents themselves, by the identity

  query . (key_kernel c) = (key_kernel^T query) . c

("absorbed"): one key/value head of width R + P serves all query heads, and
keys and values of past tokens are never computed.

Einsum letters: B batch, T length, S keys, D embed, N heads, H head_dim (of any
part), R latent.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import contracts, linear, remat, token_context
from paxon.layers.attention import kernel_support, kernels, kv_cache
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import projections as attention_projections
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_latent_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal"
)
# Keys or values of each head from latents.
_EXPANSION = "BSR,RNH->BSNH"


class LatentAttention(nn.Module):
  """Attention of a sequence to itself, by latents.

  Attributes:
    num_heads: Number of heads.
    head_dim: Width of the part of queries and keys without positions.
    rope_dim: Width of the part that is rotated.
    value_dim: Width of the values of a head.
    latent_dim: Width of the latent of keys and values, R.
    rotary: Maps heads [B,T,N,rope_dim] and positions [B,T] to rotated ones.
    query_latent_dim: Width of a latent of queries; `None` makes queries from
      the tokens.
    latent_norm: Maps latents [B,T,R] to the same shape, before they are stored;
      the paper has an RMS norm. `None` leaves them.
    query_latent_norm: Maps latents of queries likewise.
    kernel: Computes attention from expanded keys and values.
    latent_kernel: Computes attention to latents, while decoding: one key/value
      head of width `latent_dim + rope_dim`.
    cache: Stores latents and rotated keys while decoding.
    logit_scale: Factor of the dot products of queries and keys; `None` is
      `(head_dim + rope_dim) ** -0.5`.
    latent_init: Initializer of the kernels of latents [D, R].
    projections: Kernels of queries, keys, values and the output; no biases.

  The other attributes are those of `GroupedQueryAttention`.
  """

  num_heads: int
  head_dim: int
  rope_dim: int
  value_dim: int
  latent_dim: int
  rotary: Callable[[jax.Array, jax.Array], jax.Array]
  query_latent_dim: int | None = None
  latent_norm: nn.Module | None = None
  query_latent_norm: nn.Module | None = None
  kernel: kernels.Kernel = kernels.auto
  latent_kernel: kernels.Kernel = kernels.auto
  # A new part for each layer: a shared default would be a shared cache.
  cache: nn.Module = dataclasses.field(
    default_factory=functools.partial(kv_cache.ContiguousCache, parent=None)
  )
  mask: attention_mask.MaskRules = attention_mask.MaskRules()
  logit_scale: float | None = None
  latent_init: nn.initializers.Initializer = _latent_init
  projections: attention_projections.SeparateProjections = (
    attention_projections.SeparateProjections()
  )
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (
    matmuls.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    widths = ("head_dim", "rope_dim", "value_dim", "latent_dim")
    checks.check_size(self, "num_heads", *widths, "query_latent_dim")
    checks.check_positive(self, "logit_scale")
    # As in `GroupedQueryAttention`.
    if isinstance(self.rotary, contracts.Rotary):
      self.rotary.check_width(self.rope_dim, f"{type(self).__name__}.rope_dim")
    if self.query_latent_norm is not None and self.query_latent_dim is None:
      raise ValueError(
        "LatentAttention.query_latent_norm needs query_latent_dim; without it "
        "there is no latent of queries."
      )
    attention_projections.check_separate(self, self.projections)
    if self.projections.use_bias or self.projections.output_bias:
      raise ValueError("LatentAttention.projections must have no biases.")

  @property
  def num_kv_heads(self) -> int:
    """Number of key/value heads."""
    return self.num_heads

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the tokens after attention; called like `GroupedQueryAttention`.

    Raises:
      TypeError: Positions or segments are not integers.
      ValueError: Shapes do not fit, or a prefix is given while decoding.
    """
    positions, segment_ids = context.fill_arrays(self, x)
    # As in `GroupedQueryAttention`.
    rotated = positions
    rotary = self.rotary
    if isinstance(rotary, contracts.Rotary) and rotary.depends_on_length:
      rotated = jnp.where(segment_ids == 0, 0, positions)
    query = self._query(x, rotated)
    stored = self.cache(
      self._latents(x, rotated)[:, :, None],
      None,
      positions,
      segment_ids,
      cache_length=context.cache_length,
    )
    name = type(self).__name__
    mask = stored.mask(name, positions, segment_ids, context.prefix, self.mask)
    is_decoding = stored.key.shape[1] != x.shape[1]
    head_kernels = self._head_kernels(query.dtype)
    if is_decoding:
      heads = self._attend_absorbed(query, stored, mask, *head_kernels)
    else:
      heads = self._attend_expanded(query, stored.key, mask, *head_kernels)
    heads = remat.tag(heads, remat.ATTENTION_CONTEXT)
    return self.projections.output(self, heads, x.shape[-1])

  def _query(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns queries [B,T,N,head_dim + rope_dim], the last part rotated."""
    if self.query_latent_dim is not None:
      x = self._down("query_latent", self.query_latent_dim)(x)
      if self.query_latent_norm is not None:
        x = self.query_latent_norm(x)
    width = self.head_dim + self.rope_dim
    query = self.projections.project(self, "query", x, head_dim=width)
    plain, rotated = jnp.split(query, [self.head_dim], axis=-1)
    rotated = self.rotary(rotated, positions)
    query = jnp.concatenate([plain, rotated], axis=-1)
    return remat.tag(query, remat.ATTENTION_QUERY)

  def _latents(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the stored latent and rotated key of each token [B,T,R + P]."""
    # One product makes both, as both are read from the same tokens.
    both = self._down("latent", self.latent_dim + self.rope_dim)(x)
    latent, key = jnp.split(both, [self.latent_dim], axis=-1)
    if self.latent_norm is not None:
      latent = self.latent_norm(latent)
    key = self.rotary(key[:, :, None], positions)[:, :, 0]
    return jnp.concatenate([latent, key], axis=-1)

  def _down(self, name: str, width: int) -> linear.Linear:
    return linear.Linear(
      width,
      use_bias=False,
      kernel_axes=(axes.EMBED, axes.RANK),
      kernel_init=self.latent_init,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      einsum=matmuls.name_einsum(self.einsum, name),
      name=name,
    )

  def _head_kernels(self, dtype: DTypeLike) -> list[jax.Array]:
    """Returns the kernels [R,N,H] of keys and of values."""
    made = []
    for name, width in (("key", self.head_dim), ("value", self.value_dim)):
      # `embed`, as of all kernels: the dimension that is split over `fsdp`.
      init = logical.partitioned(
        self.projections.kernel_init,
        (axes.EMBED, axes.HEADS, axes.HEAD_DIM),
        read_dtype=dtype,
      )
      shape = (self.latent_dim, self.num_heads, width)
      made.append(self.param(name, init, shape, self.param_dtype))
    return dtypes.promote_dtype(*made, dtype=dtype)

  def _attend_expanded(
    self,
    query: jax.Array,
    seen: jax.Array,
    mask: attention_mask.AttentionMask,
    key_kernel: jax.Array,
    value_kernel: jax.Array,
  ) -> jax.Array:
    """Returns the context [B,T,N,value_dim] by keys and values of each head."""
    seen = seen.astype(query.dtype)
    latent, rotated = jnp.split(seen[:, :, 0], [self.latent_dim], axis=-1)
    names = (axes.BATCH, axes.LENGTH, axes.ACTIVATION_HEADS)
    key, value = (
      logical.constrain(
        matmuls.call(self.einsum, name, _EXPANSION, latent, kernel),
        (*names, axes.ACTIVATION_HEAD_DIM),
      )
      for name, kernel in (("key", key_kernel), ("value", value_kernel))
    )
    shape = (*key.shape[:3], self.rope_dim)
    shared = jnp.broadcast_to(rotated[:, :, None], shape)
    key = jnp.concatenate([key, shared], axis=-1)
    key = remat.tag(key, remat.ATTENTION_KEY)
    value = remat.tag(value, remat.ATTENTION_VALUE)
    more: dict[str, Any] = {}
    if self.logit_scale is not None:
      more["scale"] = self.logit_scale
    if not _takes_other_widths(self.kernel):
      more["scale"] = self._scale()
      width = max(self.head_dim + self.rope_dim, self.value_dim)
      query, key, value = (_widen(x, width) for x in (query, key, value))
    context = self.kernel(query, key, value, mask, **more)
    return context[..., : self.value_dim]

  def _attend_absorbed(
    self,
    query: jax.Array,
    stored: kv_cache.KeyValues,
    mask: attention_mask.AttentionMask,
    key_kernel: jax.Array,
    value_kernel: jax.Array,
  ) -> jax.Array:
    """Returns the same context by latents alone."""
    key_kernel, value_kernel = (
      matmuls.find_kernel(self.einsum, name, _EXPANSION, kernel)
      for name, kernel in (("key", key_kernel), ("value", value_kernel))
    )
    plain, rotated = jnp.split(query, [self.head_dim], axis=-1)
    plain = matmuls.call(
      self.einsum, "key_absorbed", "BTNH,RNH->BTNR", plain, key_kernel
    )
    query = jnp.concatenate([plain, rotated], axis=-1)
    # The rotated keys go along as values, and are cut off: a value without
    # them would be a copy of the cache.
    context = kernels.call(
      self.latent_kernel,
      query,
      stored.key,
      stored.key,
      mask,
      parts=stored.parts,
      scale=self._scale(),
    )
    context = context[..., : self.latent_dim]
    return matmuls.call(
      self.einsum, "value_absorbed", "BTNR,RNH->BTNH", context, value_kernel
    )

  def _scale(self) -> float:
    width = self.head_dim + self.rope_dim
    return width**-0.5 if self.logit_scale is None else self.logit_scale


def _takes_other_widths(kernel: kernels.Kernel) -> bool:
  """Whether values may have another width than keys; no, if not declared."""
  support = kernel_support.find_support(kernel)
  refused = kernel_support.Feature.VALUE_WIDTH
  return support is not None and refused not in support.unsupported


def _widen(x: jax.Array, width: int) -> jax.Array:
  """Returns heads with zeros as further features."""
  return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])
