"""Token ids as what a stack is given: a sum of embeddings, normed, dropped."""

from flax import linen as nn
import jax


def embedded(
  ids: jax.Array,
  positions: jax.Array,
  *,
  embedding: nn.Module,
  position_embedding: nn.Module | None = None,
  norm: nn.Module | None = None,
  dropout: nn.Module | None = None,
  types: tuple[nn.Module, jax.Array] | None = None,
  deterministic: bool = True,
) -> jax.Array:
  """Returns [B,T,D].

  Args:
    ids: Int [B,T].
    positions: Int [B,T], from 0 in each segment.
    embedding: Maps ids to [B,T,D].
    position_embedding: Called with positions and the width of a token; added.
    norm: Maps the sum to [B,T,D].
    dropout: Called with what the norm gives, and `deterministic`.
    types: An embedding and the ids [B,T] that it maps to [B,T,D]; added.
    deterministic: Whether dropout is off.
  """
  x = embedding(ids)
  if types is not None:
    table, type_ids = types
    x += table(type_ids).astype(x.dtype)
  if position_embedding is not None:
    x += position_embedding(positions, x.shape[-1]).astype(x.dtype)
  x = normed(x, norm)
  return x if dropout is None else dropout(x, deterministic=deterministic)


def normed(x: jax.Array, norm: nn.Module | None) -> jax.Array:
  """Returns `norm(x)`, or `x` where there is no norm."""
  return x if norm is None else norm(x)
