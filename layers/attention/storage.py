"""How a cache holds keys and values: as they are, cast, or quantized.

A storage is a part of a cache. It maps rows of features to the arrays that are
kept, and back; the cache puts these arrays into slots, moves and shards them,
and never looks inside. So a storage knows of no slots, and a cache of no
number format:

  encode(x [B, T, K, H]) -> {part: array of x's leading dimensions}
  decode(parts, dtype)   -> [B, S, K, H]

The parts are kept as variables named after what they hold: part `""` of `key`
is `key`, part `scale` is `key_scale`. Each row is encoded by itself, so a row
may be written into any slot, and a slot that was never written (zeros in every
part) is never attended to.

A row of NaN must stay NaN: caches mark tokens that found no slot by it.
"""

from collections.abc import Mapping
import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@runtime_checkable
class Storage(Protocol):
  """What caches need of a storage."""

  def encode(self, x: jax.Array) -> Mapping[str, jax.Array]:
    """Returns what is kept of `x` [B,T,K,H], by the name of the part.

    Every part begins with the dimensions [B,T]; those that it has beyond are
    K, H in this order, and the last may have another size.
    """
    ...

  def decode(
    self, parts: Mapping[str, jax.Array], dtype: DTypeLike
  ) -> jax.Array:
    """Returns rows [B,S,K,H] of this dtype from their parts."""
    ...


@dataclasses.dataclass(frozen=True)
class AsIs:
  """Keeps rows in the dtype that they come in."""

  def encode(self, x: jax.Array) -> Mapping[str, jax.Array]:
    """Returns `x` as its only part."""
    return {"": x}

  def decode(
    self, parts: Mapping[str, jax.Array], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the rows."""
    return parts[""].astype(dtype)


@dataclasses.dataclass(frozen=True)
class Cast:
  """Keeps rows in another floating-point dtype.

  Attributes:
    dtype: Dtype of what is kept; one that has NaN.
  """

  dtype: DTypeLike

  def __post_init__(self) -> None:
    dtype = jnp.dtype(self.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        f"Cast.dtype must be a floating-point dtype, got {dtype.name}; "
        "integers need a scale, which another storage keeps."
      )

  def encode(self, x: jax.Array) -> Mapping[str, jax.Array]:
    """Returns `x`, rounded, as its only part."""
    return {"": x.astype(self.dtype)}

  def decode(
    self, parts: Mapping[str, jax.Array], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the rounded rows in `dtype`."""
    return parts[""].astype(dtype)
