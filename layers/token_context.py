"""Token context: positions and segments of tokens, and settings of a call.

Attention, mixers, blocks, stacks and encoders take it as one argument:

  layer(x)                                              one unpadded document
  layer(x, TokenContext(positions, segment_ids))        packed documents
  layer(x, TokenContext(positions, segment_ids, cache_length=128))    prefill

A model makes it from its arguments or from a batch, once. It is a tree of
arrays, so scans, rematerialization and pipelines pass it like an array;
`cache_length` and `deterministic` are constants of the compiled program.

Letters: B batch, T length.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from paxon.layers.attention import cache_variables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenContext:
  """Positions and segments of the tokens of a call, and its settings.

  Attributes:
    positions: Int [B,T], from 0 in each segment. None counts from 0 in each
      sequence; attention needs them while decoding. Recurrent layers read
      tokens in the order of the array instead.
    segment_ids: Segments (documents), int [B,T]; 0 is padding, whose output is
      zero. None is one document without padding.
    prefix: True for the tokens of a segment's prefix, bool [B,T], which attend
      to each other although attention is causal; None is no prefix. While
      decoding, new tokens belong to no prefix: the whole prefix must be in the
      prompt. Recurrent layers reject it.
    cache_length: Makes a cache with this number of slots (prefill). Layers
      whose state has a fixed size accept any number.
    deterministic: Disables dropout and other random changes of training; if
      False, the random streams of the layers are needed.
  """

  positions: jax.Array | None = None
  segment_ids: jax.Array | None = None
  prefix: jax.Array | None = None
  cache_length: int | None = dataclasses.field(
    default=None, kw_only=True, metadata={"static": True}
  )
  deterministic: bool = dataclasses.field(
    default=True, kw_only=True, metadata={"static": True}
  )

  @classmethod
  def from_batch(
    cls, batch: Mapping[str, jax.Array], *, deterministic: bool = True
  ) -> "TokenContext":
    """Returns the context of a batch's `inputs`.

    The batch has `positions` and `segment_ids`, and optionally `prefix`.
    """
    return cls(
      batch["positions"],
      batch["segment_ids"],
      batch.get("prefix"),
      deterministic=deterministic,
    )

  def fill(
    self, layer: nn.Module, x: jax.Array, *, rank: int = 3
  ) -> "TokenContext":
    """Returns the context with positions and segments; see `fill_arrays`."""
    positions, segment_ids = self.fill_arrays(layer, x, rank=rank)
    return dataclasses.replace(
      self, positions=positions, segment_ids=segment_ids
    )

  def fill_arrays(
    self, layer: nn.Module, x: jax.Array, *, rank: int = 3
  ) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Checks the context of a layer's tokens; returns positions and segments.

    Args:
      layer: The bound layer that was called, for messages and its cache.
      x: Tokens, [B,T,D], or ids [B,T] with rank 2.
      rank: Rank of `x`.

    Raises:
      TypeError: Positions or segments are not integers, or a prefix is not
        boolean.
      ValueError: Shapes do not fit, or positions are missing while decoding.
    """
    segment_ids = fill_segments(layer, x, self.segment_ids, rank=rank)
    name, shape, positions = type(layer).__name__, x.shape[:2], self.positions
    if positions is None and cache_variables.COLLECTION in layer.variables:
      raise ValueError(
        f"{name} needs `positions` while decoding: the number of tokens before "
        "each new one."
      )
    if positions is None:
      count = jnp.arange(shape[1], dtype=jnp.int32)
      positions = jnp.broadcast_to(count[None], shape)
    _check_array(name, shape, "positions", positions)
    if self.prefix is not None:
      _check_array(name, shape, "prefix", self.prefix, "a boolean", jnp.bool)
    return positions, segment_ids


ONE_DOCUMENT: Final = TokenContext()


def fill_segments(
  layer: nn.Module,
  x: jax.Array,
  segment_ids: jax.Array | None,
  *,
  field: str = "segment_ids",
  rank: int = 3,
) -> Int[Array, "batch length"]:
  """Checks the segments of a layer's tokens; None is one unpadded document.

  The tokens are [B,T,D], or ids [B,T] with rank 2; `field` is for messages.

  Raises:
    TypeError: They are not integers, such as a float attention mask.
    ValueError: Shapes do not fit.
  """
  name = type(layer).__name__
  if x.ndim != rank:
    needed = "[batch, length, embed]" if rank == 3 else "[batch, length]"
    raise ValueError(f"{name} needs tokens of shape {needed}, got {x.shape}.")
  if segment_ids is None:
    return jnp.ones(x.shape[:2], jnp.int32)
  _check_array(name, x.shape[:2], field, segment_ids)
  return segment_ids


def _check_array(
  name: str,
  shape: tuple[int, ...],
  field: str,
  array: jax.Array,
  words: str = "an integer",
  kind: Any = jnp.integer,
) -> None:
  got = f"got {jnp.dtype(array.dtype).name}{list(array.shape)}"
  if not jnp.issubdtype(array.dtype, kind):
    hint = ""
    if field.endswith("segment_ids"):
      hint = " Segments are numbered from 1 in each sequence; 0 is padding."
    raise TypeError(
      f"{name}: `{field}` must be {words} array of shape [batch, length], "
      f"{got}.{hint}"
    )
  if array.shape != shape:
    raise ValueError(
      f"{name}: `{field}` must have the shape [batch, length] = {list(shape)} "
      f"of the tokens, {got}."
    )
