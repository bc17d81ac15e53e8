"""Attention by chunks of queries: memory O(T * length of a chunk).

Another kernel gets one chunk of queries after the other with all keys, in a
compiled loop. Chunks are recomputed in the backward pass, so no matrix of size
T x S ever exists, except for a bias. It supports any mask; for masks with a
limit `local_blocks` is faster. Pax calls it `chunked_attn_num_seq_split`.

Letters: B batch, T queries, S keys, N heads, K key/value heads, H head_dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers.attention import kernel_support, kernels
from paxon.layers.attention import mask as attention_mask
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryChunks:
  """A kernel that computes by chunks of queries.

  Attributes:
    length: Number of queries of a chunk; shorter sequences are one chunk.
    kernel: Computes attention of a chunk.
  """

  length: int = 512
  kernel: kernels.Kernel = kernels.auto

  def __post_init__(self) -> None:
    checks.check_size(self, "length")

  @property
  def support(self) -> kernel_support.Support:
    """Features that the inner kernel supports."""
    return kernel_support.combine(kernel_support.QUERY_CHUNKS, self.kernel)

  def __call__(
    self,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    mask: attention_mask.AttentionMask,
    *,
    bias: Float[Array, "batch heads length kv_length"] | None = None,
    **settings: Any,
  ) -> Float[Array, "batch length heads value_dim"]:
    """Returns the weighted values; called like `kernels.plain`.

    Raises:
      ValueError: The inner kernel does not support the call.
    """
    per_query = {
      "query": query,
      "q_positions": mask.q_positions,
      "q_segment_ids": mask.q_segment_ids,
      "q_prefix": mask.q_prefix,
      "bias": None if bias is None else jnp.moveaxis(bias, 2, 1),
    }
    per_query = {k: v for k, v in per_query.items() if v is not None}

    # Recomputed in the backward pass: a loop would keep the weights of all.
    @jax.checkpoint
    def attend(chunk: dict[str, jax.Array]) -> jax.Array:
      part = dataclasses.replace(
        mask,
        q_positions=chunk["q_positions"],
        q_segment_ids=chunk["q_segment_ids"],
        q_prefix=chunk.get("q_prefix"),
      )
      more = dict(settings)
      if "bias" in chunk:
        more["bias"] = jnp.moveaxis(chunk["bias"], 1, 2)
      return self.kernel(chunk["query"], key, value, part, **more)

    length = query.shape[1]
    if length <= self.length:
      return attend(per_query)
    chunks = {name: self._cut_chunks(x) for name, x in per_query.items()}
    out = jnp.moveaxis(jax.lax.map(attend, chunks), 0, 1)
    out = out.reshape(out.shape[0], -1, *out.shape[3:])
    return out[:, :length]

  def _cut_chunks(self, x: jax.Array) -> jax.Array:
    """Returns [chunks, B, length, ...], the last chunk filled with zeros."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, -x.shape[1] % self.length)
    x = jnp.pad(x, widths)
    x = x.reshape(x.shape[0], -1, self.length, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)
