"""The largest attention logit of each head, recorded in training.

  maximum_n = max over sequences, queries t and visible keys s of
              scale query_tn . key_sk

before a soft cap and without biases. Fused kernels do not return logits, so
they are computed a second time, by chunks of queries and without a gradient:
one more matmul, besides the two of a forward pass of attention.
`learners.qk_clip` scales the kernels of heads with too large logits. The
forward pass replaces the variable; microbatches and devices are combined by
their maximum.

Letters: B batch, T length, S keys, K key/value heads, G queries per kv head,
H head_dim.
"""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers.attention import mask as attention_mask
from paxon.sharding import axes, checks, variables

COLLECTION = variables.MAX_LOGITS


class MaxLogits(nn.Module):
  """Records the largest logits of an attention layer.

  Attributes:
    chunk: Number of queries whose logits are computed together.
  """

  chunk: int = 512

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "chunk")

  @nn.compact
  def __call__(
    self,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    mask: attention_mask.AttentionMask,
    *,
    scale: float,
  ) -> None:
    """Records the largest logits, if the collection is mutable.

    Args:
      query: Queries as the kernel gets them.
      key: Keys.
      mask: Keys that queries attend to; a head without any records the least
        float32.
      scale: Factor of the dot products.
    """
    init = variables.make_boxed_init(
      nn.initializers.zeros,
      (axes.HEADS,),
      shape=query.shape[2:3],
      dtype=jnp.float32,
      combine=variables.CombineRule.MAX,
    )
    maximum: nn.Variable[Any] = self.variable(COLLECTION, "maximum", init)
    if self.is_mutable_collection(COLLECTION) and not self.is_initializing():
      query, key = jax.lax.stop_gradient((query, key))
      maximum.value = scale * find_max(query, key, mask, chunk=self.chunk)


def find_max(
  query: jax.Array,
  key: jax.Array,
  mask: attention_mask.AttentionMask,
  *,
  chunk: int,
) -> Float[Array, " heads"]:
  """Returns the largest dot product of each head, by chunks of queries."""
  batch, length, heads, width = query.shape
  chunk = min(chunk, length)
  padding = -length % chunk

  def cut_chunks(x: jax.Array | None) -> jax.Array | None:
    """Returns [chunks, B, chunk, ...], filled with padding: segment 0."""
    if x is None:
      return None
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def find(part: tuple[Any, ...]) -> jax.Array:
    queries, positions, segment_ids, prefix = part
    seen = dataclasses.replace(
      mask, q_positions=positions, q_segment_ids=segment_ids, q_prefix=prefix
    ).to_array()[:, :, None]
    grouped = queries.reshape(batch, chunk, key.shape[2], -1, width)
    logits = jnp.einsum(
      "BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=jnp.float32
    )
    least = jnp.finfo(jnp.float32).min
    return jnp.max(jnp.where(seen, logits, least), axis=(0, 3, 4))

  parts = tuple(
    cut_chunks(x)
    for x in (
      query,
      mask.q_positions,
      mask.q_segment_ids,
      mask.q_prefix,
    )
  )
  return jnp.max(jax.lax.map(find, parts), axis=0).reshape(heads)
