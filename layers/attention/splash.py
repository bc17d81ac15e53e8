"""Splash attention: JAX's fused kernel for TPUs, with no logits in memory.

Splash attention masks by the index of a token, which is fixed at compile time,
so that masked blocks are never computed, and by segments, which are data. If
each document of a sequence is contiguous, indices differ as positions do, and
both together are the mask. Other sequences become NaN, because a compiled step
cannot raise.

Letters: B batch, T queries, S keys, N heads, K key/value heads, H head_dim.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import remat
from paxon.layers.attention import kernel_support, kernels, per_device
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import checks

# Of the last dimension of a TPU's registers.
_LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splash:
  """Splash attention as a kernel.

  Sequences are padded to multiples of 128. A block is the largest multiple of
  128 that divides the padded length and is not above its field, so lengths that
  are multiples of the blocks are fastest. Queries are scaled before the matmul,
  in their own dtype. The policy `remat.save_only(remat.ATTENTION_RESIDUALS)`
  saves what the backward pass needs of the forward kernel.

  Attributes:
    block_q: Queries of a block.
    block_kv: Keys of a block in memory.
    block_kv_compute: Keys of a block that are multiplied at once; `None` is
      `block_kv`.
    block_q_backward: Queries of a block in the backward pass; `None` is
      `block_q`.
    block_kv_backward: Keys likewise; `None` is `block_kv`.
    fused_backward: Whether one kernel computes all gradients. It multiplies
      less, and keeps a gradient of the queries for each block of keys.
    with_cache: The kernel for calls with a cache, whose slots are not in the
      order of positions; `None` rejects them.
    interpret: Whether Pallas interprets the kernel, on any device, for tests.
  """

  block_q: int = 512
  block_kv: int = 512
  block_kv_compute: int | None = None
  block_q_backward: int | None = None
  block_kv_backward: int | None = None
  fused_backward: bool = False
  with_cache: kernels.Kernel | None = None
  interpret: bool = False

  def __post_init__(self) -> None:
    blocks = [
      field.name
      for field in dataclasses.fields(self)
      if field.name.startswith("block")
    ]
    for name, size in checks.get_values(self, *blocks):
      if size is not None and (size <= 0 or size % _LANES):
        raise ValueError(
          f"Splash.{name} must be a positive multiple of {_LANES}, got {size}."
        )

  @property
  def support(self) -> kernel_support.Support:
    """Features that the kernel supports."""
    support = kernel_support.SPLASH
    if self.with_cache is not None:
      support = support.without(kernel_support.Feature.CACHE)
    if self.interpret:
      support = dataclasses.replace(support, platforms=(), dtypes=())
    return support

  def __call__(
    self,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    mask: attention_mask.AttentionMask,
    *,
    logit_cap: float | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
  ) -> Float[Array, "batch length heads value_dim"]:
    """Returns the weighted values; called like `kernels.plain`.

    The softmax is in float32. A bias is not supported.

    Raises:
      ValueError: The kernel does not support this call.
    """
    settings: dict[str, Any] = {
      "logit_cap": logit_cap,
      "bias": bias,
      "sinks": sinks,
    }
    is_cached = query.shape[1] != key.shape[1] and mask.by_position
    if self.with_cache is not None and is_cached:
      settings = {**settings, "scale": scale}
      given = {k: v for k, v in settings.items() if v is not None}
      return self.with_cache(query, key, value, mask, **given)
    kernel_support.check_call(self.support, query, key, value, mask, **settings)
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def attend(
      query: jax.Array,
      key: jax.Array,
      value: jax.Array,
      mask: attention_mask.AttentionMask,
      sinks: jax.Array | None,
    ) -> jax.Array:
      return self._attend(query * scale, key, value, mask, sinks, logit_cap)

    return per_device.call(
      attend, query, key, value, mask, sinks, name="Splash"
    )

  def _attend(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: attention_mask.AttentionMask,
    sinks: jax.Array | None,
    logit_cap: float | None,
  ) -> jax.Array:
    """Attention of one device; the queries are scaled."""
    length, num_heads = query.shape[1:3]
    query, key, value = (
      jnp.swapaxes(_pad(x), 1, 2) for x in (query, key, value)
    )
    in_row = _in_row(mask, query.shape[2], key.shape[2])
    splash = splash_attention.make_splash_mha(
      splash_attention.MultiHeadMask([in_row] * num_heads),
      block_sizes=self.blocks(query.shape[2], key.shape[2]),
      attn_logits_soft_cap=logit_cap,
      residual_checkpoint_name=remat.ATTENTION_RESIDUALS,
      head_shards=1,
      q_seq_shards=1,
      interpret=self.interpret,
    )
    q_ids, kv_ids = _segments(mask)
    ids = splash_attention.SegmentIds(_pad(q_ids), _pad(kv_ids))
    # Typed as if it might return the residuals of its backward pass.
    out: Any = jax.vmap(splash, in_axes=(0, 0, 0, 0, None))(
      query, key, value, ids, sinks
    )
    out = jnp.swapaxes(out, 1, 2)[:, :length]
    if mask.by_position:
      broken = jnp.where(attention_mask.is_in_order(mask), 0.0, jnp.nan)
      out += broken.astype(out.dtype)[:, None, None, None]
      sees_any = mask.q_segment_ids != 0
    else:
      sees_any = mask.sees_any(mask.to_array())
    # The output of padding, and of queries without keys, is meaningless.
    zero = jnp.zeros((), out.dtype)
    return jnp.where(sees_any[:, :, None, None], out, zero)

  def blocks(self, length: int, kv_length: int) -> splash_attention.BlockSizes:
    """Returns the block sizes for lengths that are multiples of 128."""
    block_q = _block(self.block_q, length)
    block_kv = _block(self.block_kv, kv_length)
    block_q_dkv = _block(self.block_q_backward or self.block_q, length)
    block_kv_dkv = _block(self.block_kv_backward or self.block_kv, kv_length)
    compute = self.block_kv_compute
    return splash_attention.BlockSizes(
      block_q=block_q,
      block_kv=block_kv,
      block_kv_compute=_block(compute or block_kv, block_kv),
      block_q_dkv=block_q_dkv,
      block_kv_dkv=block_kv_dkv,
      block_kv_dkv_compute=_block(compute or block_kv_dkv, block_kv_dkv),
      block_q_dq=None if self.fused_backward else block_q_dkv,
      block_kv_dq=None if self.fused_backward else block_kv_dkv,
      use_fused_bwd_kernel=self.fused_backward,
    )


def _block(most: int, length: int) -> int:
  """The largest multiple of 128 up to `most` that divides `length`."""
  sizes = range(_LANES, min(most, length) + 1, _LANES)
  return max(size for size in sizes if length % size == 0)


def _pad(x: jax.Array) -> jax.Array:
  """Returns [B,T,...] with zeros behind, T a multiple of 128."""
  more = -x.shape[1] % _LANES
  return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))


def _in_row(
  mask: attention_mask.AttentionMask, length: int, kv_length: int
) -> splash_attention.Mask:
  """Returns the mask by indices."""
  shape = (length, kv_length)
  match mask.reach:
    case (None, None):
      return splash_attention.FullMask(shape)
    case (None, 0):
      return splash_attention.CausalMask(shape)
    case reach:
      return splash_attention.LocalMask(shape, window_size=reach, offset=0)


def _segments(
  mask: attention_mask.AttentionMask,
) -> tuple[Int[Array, "batch length"], Int[Array, "batch kv_length"]]:
  """Returns the segments of queries and keys; each chunk is a segment."""
  if mask.rules.chunk is None:
    return mask.q_segment_ids, mask.kv_segment_ids
  ids, chunks = mask.q_segment_ids, mask.q_positions // mask.rules.chunk
  begins = (ids[:, 1:] != ids[:, :-1]) | (chunks[:, 1:] != chunks[:, :-1])
  runs = jnp.cumsum(begins, axis=1, dtype=ids.dtype)
  runs = jnp.pad(runs, ((0, 0), (1, 0))) + 1
  runs = jnp.where(ids != 0, runs, 0)
  return runs, runs
