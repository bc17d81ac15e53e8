"""Ring attention: sequences split over devices, keys and values rotate.

Each device keeps its queries and receives the keys and values of all devices,
one shard after another, so no device ever holds all keys or logits of a
sequence: only two shards and the logits of a block. `ring_passes` has the
computation of one device.

With a causal mask the last device would attend to everything and the first to
almost nothing. Therefore each device first gets two chunks of the sequence, one
from either end, so that the work is the same on all devices (zigzag).
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers.attention import kernel_support, per_device, ring_passes
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import checks
from paxon.sharding import rules as sharding_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
  """A kernel for sequences that are split over devices.

  Without a mesh, or for whole sequences, it is blockwise attention. A single
  query (a decoding step) is not moved: each device attends to its own keys, and
  the partial sums are reduced.

  A block is the largest number of tokens that divides the shard of a device and
  is not above its field.

  Attributes:
    block_q: Queries of a block.
    block_kv: Keys of a block.
    balanced: Whether causal work is balanced over devices, which costs one more
      exchange of queries, keys, values and results.
  """

  block_q: int = 512
  block_kv: int = 512
  balanced: bool = True
  support: ClassVar[kernel_support.Support] = kernel_support.RING

  def __post_init__(self) -> None:
    if None in (self.block_q, self.block_kv):
      raise ValueError("Ring.block_q and block_kv must be positive, got None.")
    checks.check_size(self, "block_q", "block_kv")

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

    The softmax is in float32. A bias is not supported: a ring avoids anything
    of size T x S.

    Raises:
      ValueError: The kernel does not support this call.
    """
    kernel_support.check_call(
      self.support,
      query,
      key,
      value,
      mask,
      logit_cap=logit_cap,
      bias=bias,
      sinks=sinks,
    )
    num_heads = query.shape[2]
    query, key, value, sinks = per_device.fill_devices(query, key, value, sinks)
    heads, kv_heads = per_device.splits(query, key, name="Ring")
    attend = functools.partial(
      self._attend,
      rules=mask.rules,
      scale=query.shape[-1] ** -0.5 if scale is None else scale,
      logit_cap=logit_cap,
    )
    q_tokens, kv_tokens = _split_tokens(mask)
    # The plan recognizes the kernel by this name.
    with jax.named_scope("ring_attention"):
      if heads is None or kv_heads is None:
        attend = functools.partial(attend, q_axes=(), kv_axes=())
        return attend(query, key, value, q_tokens, kv_tokens, sinks)
      attend = functools.partial(
        attend,
        q_axes=sharding_rules.as_tuple(heads[1]),
        kv_axes=sharding_rules.as_tuple(kv_heads[1]),
      )
      mapped = jax.shard_map(
        attend,
        in_specs=(
          heads,
          kv_heads,
          kv_heads,
          jax.P(*heads[:2]),
          jax.P(*kv_heads[:2]),
          jax.P(heads[2]),
        ),
        out_specs=heads,
        # Rotating keys vary over the ring and are not marked as varying.
        check_vma=False,
      )
      out = mapped(query, key, value, q_tokens, kv_tokens, sinks)
      return out[:, :, :num_heads]

  def _attend(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    q_tokens: ring_passes.Tokens,
    kv_tokens: ring_passes.Tokens,
    sinks: jax.Array | None,
    *,
    q_axes: tuple[str, ...],
    kv_axes: tuple[str, ...],
    rules: attention_mask.MaskRules,
    scale: float,
    logit_cap: float | None,
  ) -> jax.Array:
    """Attention of one device."""
    B, T, N, _ = query.shape
    K = key.shape[2]
    sizes = jax.sharding.get_abstract_mesh().shape
    size = math.prod(sizes[axis] for axis in kv_axes)
    is_ring = size > 1 and q_axes == kv_axes
    is_zigzag = (is_ring and self.balanced and is_uneven(rules)) and not (
      T % 2 or key.shape[1] % 2
    )
    pieces = 2 if is_zigzag else 1
    setup = ring_passes.Setup(
      axes=kv_axes,
      size=size if is_ring else 1,
      block_q=_block(self.block_q, T // pieces),
      block_kv=_block(self.block_kv, key.shape[1] // pieces),
      scale=scale,
      logit_cap=logit_cap,
      rules=rules,
    )
    query = query.reshape(B, T, K, N // K, -1)
    if sinks is not None:
      sinks = sinks.reshape(K, N // K)
    if size > 1 and not is_ring:
      out = _together(setup, query, key, value, q_tokens, kv_tokens, sinks)
      return out.reshape(B, T, N, -1)
    arrays: Any = (query, key, value, q_tokens, kv_tokens)
    if is_zigzag:
      arrays = deal_tokens(arrays, kv_axes, size)
    out = ring_passes.attend(setup, *arrays, sinks)
    if is_zigzag:
      out = deal_tokens(out, kv_axes, size, is_back=True)
    return out.reshape(B, T, N, -1)


def _split_tokens(
  mask: attention_mask.AttentionMask,
) -> tuple[ring_passes.Tokens, ring_passes.Tokens]:
  """Returns the tokens of queries, and those of keys."""
  return (
    ring_passes.Tokens(mask.q_positions, mask.q_segment_ids, mask.q_prefix),
    ring_passes.Tokens(mask.kv_positions, mask.kv_segment_ids, mask.kv_prefix),
  )


def is_uneven(rules: attention_mask.MaskRules) -> bool:
  """Returns whether later queries attend to many more keys."""
  return rules == attention_mask.MaskRules()


def _block(most: int, length: int) -> int:
  """The largest divisor of `length` up to `most`."""
  return max(n for n in range(1, min(most, length) + 1) if length % n == 0)


def _together(
  setup: ring_passes.Setup,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  q_tokens: ring_passes.Tokens,
  kv_tokens: ring_passes.Tokens,
  sinks: jax.Array | None,
) -> jax.Array:
  """Attention of queries that every device has, to keys that are split."""
  highest, total, values = ring_passes.gather_sums(
    setup, query, key, value, q_tokens, kv_tokens
  )
  # No gradient: the result does not depend on it.
  top = jax.lax.pmax(jax.lax.stop_gradient(highest), setup.axes)
  shrink = jnp.exp(highest - top)
  sums = ring_passes.Sums(
    top,
    jax.lax.psum(total * shrink, setup.axes),
    jax.lax.psum(values * shrink[..., None], setup.axes),
  )
  out, _ = ring_passes.finish(sums, sinks)
  return out.astype(query.dtype)


def deal_tokens(
  tree: Any, axes: tuple[str, ...], size: int, *, is_back: bool = False
) -> Any:
  """Returns arrays [B,length,...] with a chunk from either end of sequences.

  Of 2 * size chunks of a sequence, device i has 2i and 2i + 1, and gets one of
  i and 2 * size - 1 - i for each; `is_back` undoes it.
  """

  def to(piece: int) -> int:
    return min(piece, 2 * size - 1 - piece)

  def deal(x: jax.Array) -> jax.Array:
    halves = []
    for half, part in enumerate(jnp.split(x, 2, axis=1)):
      pairs = [(i, to(2 * i + half)) for i in range(size)]
      if is_back:
        pairs = [(b, a) for a, b in pairs]
      halves.append(jax.lax.ppermute(part, axes, pairs))
    return jnp.concatenate(halves, axis=1)

  return jax.tree.map(deal, tree)
