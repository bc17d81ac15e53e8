"""Block-local attention for windows and chunks: memory O(T * window).

A sequence is split into blocks. The queries of a block attend to the keys of
their block and of as many blocks around it as the mask reaches, so that another
kernel gets a batch of short sequences:

  queries [B, T, N, H] -> [B * blocks, block, N, H]
  keys    [B, T, K, H] -> [B * blocks, (before + 1 + after) * block, K, H]

The mask must have a limit (`window`, `right_window`, `chunk`); it is applied to
each pair, so the result is that of the other kernel on whole sequences. Masks
use positions, blocks use indices: inside of a segment both must differ alike,
and later segments must have larger ids, as packing makes them. Other sequences
become NaN.

Letters: B batch, T length, N heads, K key/value heads, H head_dim.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers.attention import kernel_support, kernels
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import checks

# Smaller blocks leave matrix units idle.
_MIN_BLOCK = 128

_BiasFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalBlocks:
  """A kernel for masks that reach a limited number of positions.

  Attributes:
    block_length: Number of queries of a block; `None` is the reach of the mask,
      and 128 at least. Sequences that are not longer are left whole.
    kernel: Computes attention inside of blocks, and of calls with a cache.
  """

  block_length: int | None = None
  kernel: kernels.Kernel = kernels.auto

  # A layer gives a bias as a function, because its matrix would be T x T.
  takes_bias_function: ClassVar[bool] = True

  def __post_init__(self) -> None:
    checks.check_size(self, "block_length")

  @property
  def support(self) -> kernel_support.Support:
    """Features that the inner kernel supports, for masks with a limit."""
    return kernel_support.combine(kernel_support.LOCAL_BLOCKS, self.kernel)

  def __call__(
    self,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    mask: attention_mask.AttentionMask,
    *,
    bias: _BiasFunction | jax.Array | None = None,
    **settings: Any,
  ) -> Float[Array, "batch length heads value_dim"]:
    """Returns the weighted values; called like `kernels.plain`.

    `bias` is a function, called once for the queries of blocks; arrays are not
    supported. Other keywords are for the kernel inside of blocks.

    Raises:
      ValueError: The mask has no limit, or the bias is a matrix.
    """
    kernel_support.check_call(self.support, query, key, value, mask, bias=bias)
    before, after = mask.reach
    # Implied by the check.
    assert before is not None
    assert after is not None
    assert not isinstance(bias, jax.Array)
    block = self.block_length or max(before + 1, after + 1, _MIN_BLOCK)
    # With a cache a few queries see many slots, in arbitrary order.
    if query.shape[1] != key.shape[1] or query.shape[1] <= block:
      return self._attend(query, key, value, mask, bias, settings)
    cut = _Cut(
      length=query.shape[1],
      block=block,
      before=-(-before // block),
      after=-(-after // block),
    )
    out = self._attend(
      cut.blocks(query),
      cut.contexts(key),
      cut.contexts(value),
      _cut_mask(mask, cut),
      bias,
      settings,
    )
    out = cut.join(out)
    broken = jnp.where(attention_mask.is_in_order(mask), 0.0, jnp.nan)
    return out + broken.astype(out.dtype)[:, None, None, None]

  def _attend(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: attention_mask.AttentionMask,
    bias: _BiasFunction | None,
    settings: dict[str, Any],
  ) -> jax.Array:
    if bias is not None:
      bias_matrix = bias(query, mask.q_positions, mask.kv_positions)
      settings = {**settings, "bias": bias_matrix}
    return self.kernel(query, key, value, mask, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
  """How sequences are split: lengths in tokens, then in blocks."""

  length: int
  block: int
  before: int
  after: int

  @property
  def count(self) -> int:
    return -(-self.length // self.block)

  def blocks(self, x: jax.Array) -> jax.Array:
    """Returns [B * blocks, block, ...] of [B, T, ...]."""
    return self._apart(x).reshape(-1, self.block, *x.shape[2:])

  def contexts(self, x: jax.Array) -> jax.Array:
    """Returns each block with those around it.

    Blocks are shifted, not gathered: the derivative of a gather would scatter,
    and sequences that are split over devices would be gathered.
    """
    x = self._apart(x)
    shifts = range(self.before, -self.after - 1, -1)
    x = jnp.concatenate([_shift(x, by) for by in shifts], axis=2)
    return x.reshape(-1, *x.shape[2:])

  def join(self, x: jax.Array) -> jax.Array:
    """Undoes `blocks`."""
    x = x.reshape(-1, self.count * self.block, *x.shape[2:])
    return x[:, : self.length]

  def _apart(self, x: jax.Array) -> jax.Array:
    """Returns [B, blocks, block, ...], the last block filled up."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, self.count * self.block - self.length)
    return jnp.pad(x, widths).reshape(
      x.shape[0], self.count, self.block, *x.shape[2:]
    )


def _shift(x: jax.Array, by: int) -> jax.Array:
  """Moves blocks to later indices; zeros, which are masked, come in."""
  if by == 0:
    return x
  widths = [(0, 0, 0)] * x.ndim
  widths[1] = (by, -by, 0)
  return jax.lax.pad(x, jnp.zeros((), x.dtype), widths)


def _cut_mask(
  mask: attention_mask.AttentionMask, cut: _Cut
) -> attention_mask.AttentionMask:
  q_prefix, kv_prefix = mask.q_prefix, mask.kv_prefix
  return dataclasses.replace(
    mask,
    q_positions=cut.blocks(mask.q_positions),
    q_segment_ids=cut.blocks(mask.q_segment_ids),
    q_prefix=None if q_prefix is None else cut.blocks(q_prefix),
    kv_positions=cut.contexts(mask.kv_positions),
    kv_segment_ids=cut.contexts(mask.kv_segment_ids),
    kv_prefix=None if kv_prefix is None else cut.contexts(kv_prefix),
  )
