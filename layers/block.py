"""The pre-norm transformer block.

  x = x + dropout(attention(attention_norm(x)))
  x = x + dropout(feed_forward(feed_forward_norm(x)))

Rematerialization belongs to the stack that owns the block. Other orders of the
same parts are `post_norm_block`, `sandwich_block` and `parallel_block`.
"""

from flax import linen as nn
import jax
from jaxtyping import Array, Float, Int

from paxon.sharding import axes, logical


class TransformerBlock(nn.Module):
  """Attention and feed-forward, each with its norm and residual.

  Attributes:
    attention_norm: Maps [B,T,D] to [B,T,D].
    attention: Called with tokens, positions, segment ids and `cache_length`.
    feed_forward_norm: Maps [B,T,D] to [B,T,D].
    feed_forward: Maps [B,T,D] to [B,T,D].
    dropout: Called with a branch and `deterministic`, as `nn.Dropout` is;
      `None` is no dropout.
  """

  attention_norm: nn.Module
  attention: nn.Module
  feed_forward_norm: nn.Module
  feed_forward: nn.Module
  dropout: nn.Module | None = None

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    *,
    cache_length: int | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed tokens.

    Args:
      x: The residual stream.
      positions: Positions, from 0 in each segment.
      segment_ids: Segments; 0 is padding.
      cache_length: Makes a cache with this number of slots (prefill).
      deterministic: Whether dropout is off; otherwise the random stream
        `dropout` is needed.
    """
    branch = self.attention(
      self.attention_norm(x), positions, segment_ids, cache_length=cache_length
    )
    x += dropped(branch, self.dropout, deterministic)
    branch = self.feed_forward(self.feed_forward_norm(x))
    return pinned(x + dropped(branch, self.dropout, deterministic))


def dropped(
  x: jax.Array, dropout: nn.Module | None, deterministic: bool
) -> jax.Array:
  """Returns a branch after its dropout, if it has one."""
  return x if dropout is None else dropout(x, deterministic=deterministic)


def pinned(x: jax.Array) -> jax.Array:
  """Pins the residual stream, which a stack carries from layer to layer.

  It is saved for the backward pass, so it is split the same in all layers.
  """
  names = (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)
  return logical.constrain(x, names)
