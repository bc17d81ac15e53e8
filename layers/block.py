"""The pre-norm transformer block.

  x = x + dropout(attention(attention_norm(x)))
  x = x + dropout(feed_forward(feed_forward_norm(x)))

Rematerialization belongs to the stack that owns the block. Other orders of the
same parts are `post_norm_block`, `sandwich_block` and `parallel_block`.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import shared
from paxon.sharding import axes, logical


class TransformerBlock(nn.Module):
  """Attention and feed-forward, each with its norm and residual.

  Attributes:
    attention_norm: Maps [B,T,D] to [B,T,D].
    attention: Called with tokens, positions, segment ids, the prefix where
      there is one, and `cache_length`.
    feed_forward_norm: Maps [B,T,D] to [B,T,D].
    feed_forward: Maps [B,T,D] to [B,T,D].
    dropout: Called with a branch and `deterministic`, as `nn.Dropout` is;
      `None` is no dropout.
    residual: Adds a branch to the residual stream, such as
      `StochasticResidual`; `None` is a plain sum.
  """

  attention_norm: nn.Module
  attention: nn.Module
  feed_forward_norm: nn.Module
  feed_forward: nn.Module
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
    """Returns the transformed tokens.

    Args:
      x: The residual stream.
      positions: Positions, from 0 in each segment.
      segment_ids: Segments; 0 is padding.
      prefix: Tokens that see each other in both directions, the beginning of
        each segment of a prefix language model; `None` is none.
      cache_length: Makes a cache with this number of slots (prefill).
      deterministic: Whether dropout is off; otherwise the random stream
        `dropout` is needed.
      layer_index: The number of the layer, for `residual`.
    """
    add = added(self.dropout, self.residual, deterministic, layer_index)
    branch = attended(
      self.attention,
      self.attention_norm(x),
      positions,
      segment_ids,
      prefix,
      cache_length,
    )
    x = add(x, branch)
    feed_forward = fed(self.feed_forward, deterministic)
    branch = feed_forward(self.feed_forward_norm(x))
    return pinned(add(x, branch))


def attended(
  attention: nn.Module,
  x: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  prefix: jax.Array | None,
  cache_length: int | None,
) -> jax.Array:
  """Returns what attention makes of `x`.

  It hears of a prefix only where there is one, so that one which cannot serve
  prefixes is still an attention.
  """
  tokens = (x, positions, segment_ids)
  if prefix is not None:
    tokens += (prefix,)
  return attention(*tokens, cache_length=cache_length)


def fed(
  feed_forward: nn.Module, deterministic: bool
) -> Callable[[jax.Array], jax.Array]:
  """Returns the feed-forward layer as a function of the tokens alone.

  It hears of `deterministic` only where it has a dropout, so any map of tokens
  is a feed-forward layer.
  """
  part = feed_forward
  if isinstance(part, shared.Shared):
    part = part.part
  if getattr(part, "dropout", None) is None:
    return feed_forward
  return functools.partial(feed_forward, deterministic=deterministic)


def added(
  dropout: nn.Module | None,
  residual: nn.Module | None,
  deterministic: bool,
  layer_index: jax.Array | None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns `(x, branch) -> x + dropout(branch)`, as a block asks for it."""

  def add(x: jax.Array, branch: jax.Array) -> jax.Array:
    if dropout is not None:
      branch = dropout(branch, deterministic=deterministic)
    if residual is None:
      return x + branch
    return residual(x, branch, layer_index, deterministic=deterministic)

  return add


def pinned(x: jax.Array) -> jax.Array:
  """Pins the residual stream, which a stack carries from layer to layer.

  It is saved for the backward pass, so it is split the same in all layers.
  """
  names = (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)
  return logical.constrain(x, names)
