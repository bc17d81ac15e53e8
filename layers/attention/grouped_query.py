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
from typing import Any, ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import remat
from paxon.layers.attention import kernels, kv_cache
from paxon.layers.attention import mask as attention_mask
from paxon.layers.attention import projections as attention_projections
from paxon.quantization import products
from paxon.sharding import checks

# Both scale by the true number of summed terms: D into heads, N * H out.
_projection_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
)
_output_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=2
)


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
    use_bias: Whether learned values are added to queries, keys, values and,
      unless `output_bias` says otherwise, the output.
    logit_cap: Bends attention logits into `(-logit_cap, logit_cap)`, if the
      kernel can; `None` does not.
    query_norm: Maps queries [B,T,N,H] to the same, before they are rotated
      unless `norm_rotated`; `None` leaves them.
    key_norm: Maps keys [B,T,K,H] likewise, before they are stored.
    position_bias: Called with the positions of queries [B,T] and of keys [B,S]
      and the number of heads; what it returns, [B,N,T,S], is added to the
      logits, if the kernel can. `None` adds nothing.
    logit_scale: What products of queries and keys are multiplied by; `None` is
      `head_dim ** -0.5`.
    output_bias: Whether a learned value is added to the output; `None` is as
      `use_bias` says.
    sinks: Called with the number of heads; what it returns, [N], are logits for
      nothing (`attention.sinks`), if the kernel can. `None` is no sinks.
    query_scale: Maps queries [B,T,N,H] to the same, after they are rotated;
      `None` leaves them.
    chunk: Number of positions of a chunk, which see each other only; None for
      no chunks.
    right_window: How many later positions a token sees, if not `causal`; then
      `window` holds for earlier ones. None is as `window` says.
    norm_rotated: Whether the norms come after the rotation, as in Pax.
    relative_position: Called with the queries and the scale of logits; gives
      queries, and a function of them and of positions that makes a bias
      (`attention.transformer_xl`), if the kernel can. `None` leaves them.
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
  logit_scale: float | None = None
  output_bias: bool | None = None
  sinks: nn.Module | None = None
  query_scale: nn.Module | None = None
  chunk: int | None = None
  right_window: int | None = None
  norm_rotated: bool = False
  relative_position: nn.Module | None = None

  quantization_roles: ClassVar[tuple[str, ...]] = (
    products.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    name = type(self).__name__
    checks.check_size(self, "num_heads", "num_kv_heads", "head_dim")
    checks.check_size(self, "window", "chunk")
    checks.check_multiple(self, "num_heads", "num_kv_heads")
    checks.check_positive(self, "logit_cap", "logit_scale")
    attention_mask.check_rules(
      name,
      causal=self.causal,
      window=self.window,
      right_window=self.right_window,
      chunk=self.chunk,
    )

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    prefix: Bool[Array, "batch length"] | None = None,
    *,
    cache_length: int | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns what each token gathered from those it sees.

    Args:
      x: The tokens.
      positions: Their positions, from 0 in each segment; None counts from 0 in
        each sequence. Required while decoding.
      segment_ids: Their segments (documents); 0 is padding, whose output is
        zero. None is one document without padding.
      prefix: Which of them are of their segment's prefix, whose tokens see each
        other although attention is causal. While decoding, new tokens are of no
        prefix: all of it must be in the prompt.
      cache_length: Makes a cache with this number of slots (prefill).

    Raises:
      ValueError: Shapes do not fit, or a prefix is given that cannot be seen.
    """
    positions, segment_ids = attention_mask.fill_tokens(
      self, x, positions, segment_ids, prefix
    )
    layer = self._layer()
    query, key, value = self.projections(layer, x)
    query = self._placed(query, positions, self.query_norm)
    key = self._placed(key, positions, self.key_norm)
    if self.query_scale is not None:
      query = self.query_scale(query)
    relative = None
    if self.relative_position is not None:
      scale = self.logit_scale or self.head_dim**-0.5
      query, relative = self.relative_position(query, scale)
    query = remat.tag(query, remat.ATTENTION_QUERY)
    key = remat.tag(key, remat.ATTENTION_KEY)
    value = remat.tag(value, remat.ATTENTION_VALUE)

    seen = self.cache(
      key, value, positions, segment_ids, cache_length=cache_length
    )
    mask = seen.mask(
      type(self).__name__,
      positions,
      segment_ids,
      prefix,
      causal=self.causal,
      window=self.window,
      right_window=self.right_window,
      chunk=self.chunk,
    )
    more = self._more(query, mask, relative)
    context = self.kernel(query, seen.key, seen.value, mask, **more)
    context = remat.tag(context, remat.ATTENTION_CONTEXT)
    bias = self.use_bias if self.output_bias is None else self.output_bias
    return attention_projections.output(
      layer,
      context,
      x.shape[-1],
      kernel_init=self.output_init,
      use_bias=bias,
    )

  def _layer(self) -> attention_projections.Layer:
    """Returns what projections need to know."""
    return attention_projections.Layer(
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

  def _placed(
    self, x: jax.Array, positions: jax.Array, norm: nn.Module | None
  ) -> jax.Array:
    """Returns queries or keys, normalized and rotated."""
    if norm is not None and not self.norm_rotated:
      x = norm(x)
    if self.rotary is not None:
      x = self.rotary(x, positions)
    if norm is not None and self.norm_rotated:
      x = norm(x)
    return x

  def _more(
    self,
    query: jax.Array,
    mask: attention_mask.AttentionMask,
    relative: Callable[..., jax.Array] | None,
  ) -> dict[str, Any]:
    """Returns what is set, only, so that a kernel need not know of the rest."""
    more: dict[str, Any] = {}
    if self.logit_cap is not None:
      more["logit_cap"] = self.logit_cap
    if self.logit_scale is not None:
      more["scale"] = self.logit_scale
    if self.sinks is not None:
      more["sinks"] = self.sinks(self.num_heads)

    def bias(
      query: jax.Array, q_positions: jax.Array, kv_positions: jax.Array
    ) -> jax.Array:
      total = None
      if relative is not None:
        total = relative(query, q_positions, kv_positions)
      if self.position_bias is not None:
        fixed = self.position_bias(q_positions, kv_positions, self.num_heads)
        total = fixed if total is None else total + fixed.astype(total.dtype)
      assert total is not None
      return total

    if self.position_bias is not None or relative is not None:
      if getattr(self.kernel, "takes_bias_function", False):
        more["bias"] = bias
      else:
        more["bias"] = bias(query, mask.q_positions, mask.kv_positions)
    return more
