"""A stack that reads a text both ways: embeddings, stack, norm.

What models of whole texts share: `masked_lm` and the text's part of
`classifier`. With attention that is not causal it is an encoder; with causal
attention it reads from left to right.
"""

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import embedded_tokens


class TextEncoder(nn.Module):
  """Maps token ids to states.

  Attributes:
    embedding: Maps ids [B,T] to [B,T,D].
    stack: Called with tokens, positions, segment ids and `deterministic`.
    final_norm: Maps [B,T,D] to [B,T,D]; `None` where the last block ends with a
      norm.
    position_embedding: Called with positions [B,T] and the width of a token;
      added. `None` leaves positions to the attention.
    type_embedding: Maps the type ids of tokens (which of two texts) to [B,T,D];
      added. `None` is a model without types.
    embedding_norm: Maps the sum to what the stack is given; `None` leaves it.
    embedding_dropout: Called with it and `deterministic`; `None` is no dropout.
  """

  embedding: nn.Module
  stack: nn.Module
  final_norm: nn.Module | None = None
  position_embedding: nn.Module | None = None
  type_embedding: nn.Module | None = None
  embedding_norm: nn.Module | None = None
  embedding_dropout: nn.Module | None = None

  def __call__(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    type_ids: Int[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch length embed"]:
    """Returns the states of the tokens; as `hidden`."""
    return self.hidden(
      inputs, positions, segment_ids, type_ids, deterministic=deterministic
    )

  def hidden(
    self,
    inputs: Int[Array, "batch length"],
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    type_ids: Int[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch length embed"]:
    """Returns the states of the tokens.

    Args:
      inputs: Token ids.
      positions: Positions, from 0 in each segment; None counts from 0 in each
        sequence.
      segment_ids: Segments; 0 is padding. None is one document without
        padding.
      type_ids: Types of the tokens; by default all are of type 0.
      deterministic: Whether dropout is off.

    Raises:
      ValueError: There are types, and the model has no embedding of them.
    """
    types = None
    if self.type_embedding is not None:
      type_ids = jnp.zeros_like(inputs) if type_ids is None else type_ids
      types = self.type_embedding, type_ids
    elif type_ids is not None:
      raise ValueError(
        f"{type(self).__name__}.type_embedding is None, but type_ids were "
        "given; set it, or leave them out."
      )
    positions, segment_ids = attention_mask.fill_tokens(
      self, inputs, positions, segment_ids, rank=2
    )
    x = embedded_tokens.embedded(
      inputs,
      positions,
      embedding=self.embedding,
      types=types,
      position_embedding=self.position_embedding,
      norm=self.embedding_norm,
      dropout=self.embedding_dropout,
      deterministic=deterministic,
    )
    x = self.stack(x, positions, segment_ids, deterministic=deterministic)
    return embedded_tokens.normed(x, self.final_norm)
