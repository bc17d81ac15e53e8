"""Transformer blocks: attention and feed-forward with norms and residuals.

  pre-norm   x = x + dropout(attention(attention_norm(x)))
             x = x + dropout(feed_forward(feed_forward_norm(x)))
  post-norm  x = attention_norm(x + dropout(attention(x)))
             x = feed_forward_norm(x + dropout(feed_forward(x)))
  sandwich   x = x + dropout(post_norm(attention(attention_norm(x)))), ...
  parallel   x = x + dropout(attention(norm(x)) + feed_forward(norm(x)))

  mixer      x = x + dropout(mixer(norm(x)))

`TransformerBlock` is pre-norm. All blocks are called alike. Rematerialization
belongs to the stack that owns the block; `encoder_decoder_block` has blocks
with cross-attention.
"""

from collections.abc import Callable
import functools

from flax import linen as nn
import jax
from jaxtyping import Array, Float, Int

from paxon.layers import contracts, token_context
from paxon.layers.stacks import shared
from paxon.sharding import axes, logical

# Attention and feed-forward as functions of their input, and the residual.
Branch = Callable[[jax.Array], jax.Array]
Residual = Callable[[jax.Array, jax.Array], jax.Array]


class Block(nn.Module):
  """Base of blocks, which define the order of norms and residuals.

  Subclasses have the fields `attention`, `feed_forward`, `dropout` and
  `residual`, as in `TransformerBlock`.
  """

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
    *,
    layer_index: Int[Array, ""] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed tokens.

    Args:
      x: The residual stream.
      context: Positions and segments of the tokens.
      layer_index: Index of the layer, passed to `residual`.
    """

    def attention(x: jax.Array) -> jax.Array:
      return self.attention(x, context)

    feed_forward = bind_feed_forward(self.feed_forward, context)
    add = make_residual(self.dropout, self.residual, context, layer_index)
    y = self.combine(
      x, gather_lengths(attention), gather_lengths(feed_forward), add
    )
    return constrain(y)

  @nn.nowrap
  def combine(
    self, x: jax.Array, attention: Branch, feed_forward: Branch, add: Residual
  ) -> jax.Array:
    """Returns the residual stream [B,T,D] after both branches."""
    raise NotImplementedError


class TransformerBlock(Block):
  """Pre-norm block: attention and feed-forward, each with norm and residual.

  Attributes:
    attention_norm: Maps [B,T,D] to [B,T,D].
    attention: Mixes tokens.
    feed_forward_norm: Maps [B,T,D] to [B,T,D].
    feed_forward: Maps [B,T,D] to [B,T,D].
    dropout: Applied to each branch; called with `deterministic`, like
      `nn.Dropout`. `None` disables it.
    residual: Adds a branch to the residual stream, such as
      `StochasticResidual`; `None` is a plain sum.
  """

  attention_norm: nn.Module
  attention: contracts.TokenMixer
  feed_forward_norm: nn.Module
  feed_forward: nn.Module
  dropout: nn.Module | None = None
  residual: nn.Module | None = None

  @nn.nowrap
  def combine(
    self, x: jax.Array, attention: Branch, feed_forward: Branch, add: Residual
  ) -> jax.Array:
    """Returns the tokens after both branches."""
    x = add(x, attention(self.attention_norm(x)))
    return add(x, feed_forward(self.feed_forward_norm(x)))


class PostNormBlock(Block):
  """Post-norm block of the original transformer and of BERT.

  Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1. The stack
  of such a model is not followed by another norm. The fields are those of
  `TransformerBlock`.
  """

  attention: contracts.TokenMixer
  attention_norm: nn.Module
  feed_forward: nn.Module
  feed_forward_norm: nn.Module
  dropout: nn.Module | None = None
  residual: nn.Module | None = None

  @nn.nowrap
  def combine(
    self, x: jax.Array, attention: Branch, feed_forward: Branch, add: Residual
  ) -> jax.Array:
    """Returns the tokens after both branches."""
    x = self.attention_norm(add(x, attention(x)))
    return self.feed_forward_norm(add(x, feed_forward(x)))


class SandwichBlock(Block):
  """Block with norms before and after attention and feed-forward.

  With all four norms it is that of Gemma 2 (2024,
  https://arxiv.org/abs/2408.00118, section 2); without `attention_norm` and
  `feed_forward_norm` that of OLMo 2 (2024, https://arxiv.org/abs/2501.00656,
  section 2.1), which normalizes only what is added to the residual stream.

  Attributes, besides those of `TransformerBlock`:
    post_attention_norm: Normalizes the output of attention.
    post_feed_forward_norm: Normalizes the output of the feed-forward layer.
    attention_norm: Normalizes the input of attention; `None` disables it.
    feed_forward_norm: Normalizes the input of the feed-forward layer; `None`
      disables it.
  """

  attention: contracts.TokenMixer
  post_attention_norm: nn.Module
  feed_forward: nn.Module
  post_feed_forward_norm: nn.Module
  attention_norm: nn.Module | None = None
  feed_forward_norm: nn.Module | None = None
  dropout: nn.Module | None = None
  residual: nn.Module | None = None

  @nn.nowrap
  def combine(
    self, x: jax.Array, attention: Branch, feed_forward: Branch, add: Residual
  ) -> jax.Array:
    """Returns the tokens after both branches."""
    normed = x if self.attention_norm is None else self.attention_norm(x)
    x = add(x, self.post_attention_norm(attention(normed)))
    normed = x if self.feed_forward_norm is None else self.feed_forward_norm(x)
    return add(x, self.post_feed_forward_norm(feed_forward(normed)))


class ParallelBlock(Block):
  """Block that adds attention and feed-forward of one input.

  Their matmuls can run side by side, and tensor parallelism reduces both at
  once. With one norm it is that of GPT-J and PaLM (Chowdhery et al. 2022,
  https://arxiv.org/abs/2204.02311, section 2); with two that of GPT-NeoX.

  Attributes, besides those of `TransformerBlock`:
    norm: Maps [B,T,D] to [B,T,D].
    feed_forward_norm: Normalizes the input of the feed-forward layer; `None`
      uses `norm` for both.
    dropout: Applied to the sum of both branches.
  """

  norm: nn.Module
  attention: contracts.TokenMixer
  feed_forward: nn.Module
  feed_forward_norm: nn.Module | None = None
  dropout: nn.Module | None = None
  residual: nn.Module | None = None

  @nn.nowrap
  def combine(
    self, x: jax.Array, attention: Branch, feed_forward: Branch, add: Residual
  ) -> jax.Array:
    """Returns the tokens after both branches."""
    normed = self.norm(x)
    branch = attention(normed)
    if self.feed_forward_norm is not None:
      normed = self.feed_forward_norm(x)
    return add(x, branch + feed_forward(normed))


class MixerBlock(nn.Module):
  """Pre-norm block with one branch, such as that of Mamba.

  Attributes:
    norm: Maps [B,T,D] to [B,T,D].
    mixer: Mixes tokens.
    dropout: Dropout of the branch, as in `TransformerBlock`.
    residual: The residual, as in `TransformerBlock`.
  """

  norm: nn.Module
  mixer: contracts.TokenMixer
  dropout: nn.Module | None = None
  residual: nn.Module | None = None

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
    *,
    layer_index: Int[Array, ""] | None = None,
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed tokens; see `Block`."""
    mixer = gather_lengths(lambda x: self.mixer(x, context))
    mixed = mixer(self.norm(x))
    add = make_residual(self.dropout, self.residual, context, layer_index)
    return constrain(add(x, mixed))


def bind_feed_forward(
  feed_forward: nn.Module, context: token_context.TokenContext
) -> Callable[[jax.Array], jax.Array]:
  """Returns the feed-forward layer as a function of the tokens alone.

  `deterministic` is passed only to layers with dropout, and `segment_ids` with
  it only to those that declare `takes_segment_ids`, so any module that maps
  tokens to tokens can be a feed-forward layer.
  """
  deterministic = context.deterministic
  module = feed_forward
  if isinstance(module, shared.Shared):
    module = module.part
  if isinstance(module, contracts.TakesSegments) and module.takes_segment_ids:
    return functools.partial(
      feed_forward,
      segment_ids=context.segment_ids,
      deterministic=deterministic,
    )
  if not isinstance(module, contracts.HasDropout) or module.dropout is None:
    return feed_forward
  return functools.partial(feed_forward, deterministic=deterministic)


def make_residual(
  dropout: nn.Module | None,
  residual: nn.Module | None,
  context: token_context.TokenContext,
  layer_index: jax.Array | None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the residual connection `(x, branch) -> x + dropout(branch)`."""
  deterministic = context.deterministic

  def add(x: jax.Array, branch: jax.Array) -> jax.Array:
    if dropout is not None:
      branch = dropout(branch, deterministic=deterministic)
    if residual is None:
      return x + branch
    return residual(x, branch, layer_index, deterministic=deterministic)

  return add


def gather_lengths(branch: Branch) -> Branch:
  """Returns a branch with whole sequences, on a residual stream without.

  Its output and gradient are gathered as well, so that the compiler does not
  gather weights instead, or exchange heads for tokens.

  Args:
    branch: Maps [B,T,D] to [B,T,D].
  """

  def run(x: jax.Array) -> jax.Array:
    y = branch(logical.gather_lengths(x))
    whole = logical.gather_lengths(y)
    return y if whole is y else constrain(whole)

  return run


def constrain(x: jax.Array) -> jax.Array:
  """Constrains the residual stream, which a stack carries between layers.

  It is saved for the backward pass, so all layers shard it alike.
  """
  names = (axes.BATCH, axes.ACTIVATION_LENGTH, axes.ACTIVATION_EMBED)
  return logical.constrain(x, names)
