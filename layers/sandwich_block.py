"""A transformer block with norms on both sides of each branch.

  x = x + dropout(post_attention_norm(attention(attention_norm(x))))
  x = x + dropout(post_feed_forward_norm(feed_forward(feed_forward_norm(x))))

With all four norms it is that of Gemma 2 (2024, https://arxiv.org/abs/2408.00118,
section 2); without the inner ones that of OLMo 2 (2024,
https://arxiv.org/abs/2501.00656, section 2.1), which normalizes only what is
added to the residual stream.
"""

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import block


class SandwichBlock(nn.Module):
  """Attention and feed-forward with norms before and after each.

  Attributes:
    attention: Called with tokens, positions, segment ids, the prefix where
      there is one, and `cache_length`.
    post_attention_norm: Maps what attention gives, [B,T,D], to [B,T,D].
    feed_forward: Maps [B,T,D] to [B,T,D].
    post_feed_forward_norm: Maps what the feed-forward layer gives.
    attention_norm: Of what attention is given; `None` is none.
    feed_forward_norm: Of what the feed-forward layer is given; `None` is none.
    dropout: Called with a branch and `deterministic`, as `nn.Dropout` is;
      `None` is no dropout.
    residual: Adds a branch to the residual stream, such as
      `StochasticResidual`; `None` is a plain sum.
  """

  attention: nn.Module
  post_attention_norm: nn.Module
  feed_forward: nn.Module
  post_feed_forward_norm: nn.Module
  attention_norm: nn.Module | None = None
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
    given = x if self.attention_norm is None else self.attention_norm(x)
    branch = block.attended(
      self.attention, given, positions, segment_ids, prefix, cache_length
    )
    branch = self.post_attention_norm(branch)
    x = add(x, branch)
    given = x if self.feed_forward_norm is None else self.feed_forward_norm(x)
    branch = self.post_feed_forward_norm(feed_forward(given))
    return block.pinned(add(x, branch))
