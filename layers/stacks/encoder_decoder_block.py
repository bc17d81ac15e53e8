"""Blocks of a decoder that also reads a memory, the output of an encoder.

Pre-norm (`CrossBlock`):

  x = x + dropout(self_attention(self_attention_norm(x)))
  x = x + dropout(cross_attention(cross_attention_norm(x), memory))
  x = x + dropout(feed_forward(feed_forward_norm(x)))

and post-norm (`PostNormCrossBlock`), each norm after its residual. The blocks
of the encoder are those of any stack, with attention that is not causal.
"""

from typing import ClassVar

from flax import linen as nn
import jax
from jaxtyping import Array, Float, Int

from paxon.layers import contracts, token_context
from paxon.layers.stacks import block


class CrossBlock(nn.Module):
  """Self-attention, attention to a memory and feed-forward.

  Attributes:
    self_attention_norm: Maps [B,T,D] to [B,T,D].
    self_attention: Called with tokens and their `TokenContext`.
    cross_attention_norm: Maps [B,T,D] to [B,T,D].
    cross_attention: Called with tokens, the memory, the context of the tokens
      and the segment ids of the memory.
    feed_forward_norm: Maps [B,T,D] to [B,T,D].
    feed_forward: Maps [B,T,D] to [B,T,D].
    dropout: Called with a branch and `deterministic`, like `nn.Dropout`;
      `None` disables it.
    residual: Adds a branch to the residual stream, such as
      `StochasticResidual`; `None` is a plain sum.
  """

  self_attention_norm: nn.Module
  self_attention: contracts.TokenMixer
  cross_attention_norm: nn.Module
  cross_attention: nn.Module
  feed_forward_norm: nn.Module
  feed_forward: nn.Module
  dropout: nn.Module | None = None
  residual: nn.Module | None = None

  is_post_norm: ClassVar[bool] = False

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext,
    memory: Float[Array, "batch memory_length memory_embed"] | None,
    memory_segment_ids: Int[Array, "batch memory_length"] | None,
    *,
    skip_memory: bool = False,
    layer_index: Int[Array, ""] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed tokens.

    Args:
      x: The residual stream.
      context: Positions and segments of the tokens. A token reads the memory of
        its own segment.
      memory: Output of the encoder; `None` while decoding, when its keys and
        values are in the cache.
      memory_segment_ids: Its segments; `None` without a memory.
      skip_memory: Skips attention to the memory.
      layer_index: Index of the layer, passed to `residual`.
    """
    feed_forward = block.bind_feed_forward(self.feed_forward, context)
    add = block.make_residual(self.dropout, self.residual, context, layer_index)

    def self_attention(x: jax.Array) -> jax.Array:
      return self.self_attention(x, context)

    def cross_attention(x: jax.Array) -> jax.Array:
      return self.cross_attention(x, memory, context, memory_segment_ids)

    def combine(
      x: jax.Array, norm: nn.Module, branch: block.Branch
    ) -> jax.Array:
      if self.is_post_norm:
        return norm(add(x, branch(x)))
      return add(x, branch(norm(x)))

    x = combine(x, self.self_attention_norm, self_attention)
    if not skip_memory:
      x = combine(x, self.cross_attention_norm, cross_attention)
    x = combine(x, self.feed_forward_norm, feed_forward)
    return block.constrain(x)


class PostNormCrossBlock(CrossBlock):
  """`CrossBlock` with each norm after its residual.

  Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1.
  """

  is_post_norm: ClassVar[bool] = True
