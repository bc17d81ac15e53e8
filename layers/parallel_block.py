"""A transformer block whose two branches have the same input.

  x = x + dropout(attention(norm(x)) + feed_forward(feed_forward_norm(x)))

Their products can run side by side, and tensor parallelism adds both up at
once. With one norm for both it is that of GPT-J and PaLM (Chowdhery et al.
2022, https://arxiv.org/abs/2204.02311, section 2); with two that of GPT-NeoX.
"""

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import block


class ParallelBlock(nn.Module):
  """Attention beside feed-forward, with one residual.

  Attributes:
    norm: Maps [B,T,D] to [B,T,D].
    attention: Called with tokens, positions, segment ids, the prefix where
      there is one, and `cache_length`.
    feed_forward: Maps [B,T,D] to [B,T,D].
    feed_forward_norm: Of what the feed-forward layer is given; `None` gives it
      what attention gets.
    dropout: Called with a branch and `deterministic`, as `nn.Dropout` is;
      `None` is no dropout.
    residual: Adds a branch to the residual stream, such as
      `StochasticResidual`; `None` is a plain sum.
  """

  norm: nn.Module
  attention: nn.Module
  feed_forward: nn.Module
  feed_forward_norm: nn.Module | None = None
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
    normed = self.norm(x)
    branch = block.attended(
      self.attention, normed, positions, segment_ids, prefix, cache_length
    )
    if self.feed_forward_norm is not None:
      normed = self.feed_forward_norm(x)
    branch += feed_forward(normed)
    return block.pinned(add(x, branch))
