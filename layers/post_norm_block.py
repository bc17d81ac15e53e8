"""The post-norm transformer block, of the first transformers and BERT.

  x = attention_norm(x + dropout(attention(x)))
  x = feed_forward_norm(x + dropout(feed_forward(x)))

Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1. A model of
such blocks has no norm of its own after the stack.
"""

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import block


class PostNormBlock(nn.Module):
  """Attention and feed-forward, each with a norm after its residual.

  Attributes:
    attention: Called with tokens, positions, segment ids, the prefix where
      there is one, and `cache_length`.
    attention_norm: Maps [B,T,D] to [B,T,D].
    feed_forward: Maps [B,T,D] to [B,T,D].
    feed_forward_norm: Maps [B,T,D] to [B,T,D].
    dropout: Called with a branch and `deterministic`, as `nn.Dropout` is;
      `None` is no dropout.
    residual: Adds a branch to the residual stream, such as
      `StochasticResidual`; `None` is a plain sum.
  """

  attention: nn.Module
  attention_norm: nn.Module
  feed_forward: nn.Module
  feed_forward_norm: nn.Module
  dropout: nn.Module | None = None
  residual: nn.Module | None = None

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    prefix: Bool[Array, "batch length"] | None = None,
    *,
    cache_length: int | None = None,
    deterministic: bool = True,
    layer_index: Int[Array, ""] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed tokens; as `TransformerBlock` is called."""
    feed_forward = block.fed(self.feed_forward, deterministic)
    add = block.added(self.dropout, self.residual, deterministic, layer_index)
    branch = block.attended(
      self.attention, x, positions, segment_ids, prefix, cache_length
    )
    x = self.attention_norm(add(x, branch))
    branch = feed_forward(x)
    x = self.feed_forward_norm(add(x, branch))
    return block.pinned(x)
