"""Attention masks, described by positions, segments and a few rules.

A key is visible to a query if all of these hold:

  * both are in the same segment (document), and that is not 0 (padding);
  * if `causal`: the key's position is not after the query's, or both are
    tokens of a prefix;
  * if `window` is set: the key is less than `window` positions away;
  * if `right_window` is set: the key is at most that many positions later, and
    `window` applies to earlier keys only;
  * if `chunk` is set: their positions are in the same chunk, which is
    `position // chunk`.

Positions restart in each segment, so they are compared inside of a segment
only. A kernel gets this description and decides how to apply it; `to_array` is
the plain way. A kernel that applies the fields itself must reject the `rules`
that it does not support. Letters: B batch, T queries, S keys.
"""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paxon.layers.attention import cache_variables

# Names of what hides or shows keys beyond segments; those of the fields.
CAUSAL = "causal"
WINDOW = "window"
RIGHT_WINDOW = "right_window"
CHUNK = "chunk"
PREFIX = "prefix"


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "q_positions",
    "kv_positions",
    "q_segment_ids",
    "kv_segment_ids",
    "q_prefix",
    "kv_prefix",
  ),
  meta_fields=("causal", "window", "right_window", "chunk"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
  """A description of visible keys.

  Attributes:
    q_positions: Positions of the queries, int [B, T].
    kv_positions: Positions of the keys, int [B, S].
    q_segment_ids: Segments of the queries, int [B, T]; 0 is padding.
    kv_segment_ids: Segments of the keys, int [B, S]; 0 is padding.
    causal: Whether later keys are hidden.
    window: How many positions are visible, the query's own included; on both
      sides if not causal. `None` is no limit.
    right_window: How many later positions are visible, if not causal; 0 is
      none. `None` is as `window` says.
    chunk: Number of positions of a chunk, which see each other only. `None` is
      one chunk.
    q_prefix: Which queries are of a prefix, bool [B, T]: `causal` hides
      nothing of the prefix from them. `None` is no prefix.
    kv_prefix: Which keys are, bool [B, S]; given where `q_prefix` is.
  """

  q_positions: jax.Array
  kv_positions: jax.Array
  q_segment_ids: jax.Array
  kv_segment_ids: jax.Array
  causal: bool = True
  window: int | None = None
  right_window: int | None = None
  chunk: int | None = None
  q_prefix: jax.Array | None = None
  kv_prefix: jax.Array | None = None

  def __post_init__(self) -> None:
    check_rules(
      "AttentionMask",
      causal=self.causal,
      window=self.window,
      right_window=self.right_window,
      chunk=self.chunk,
    )
    if (self.q_prefix is None) != (self.kv_prefix is None):
      raise ValueError(
        "AttentionMask.q_prefix and kv_prefix must be given together."
      )
    if self.q_prefix is not None and not self.causal:
      raise ValueError(
        "AttentionMask.q_prefix needs causal=True; without it all tokens see "
        "each other already."
      )

  @property
  def rules(self) -> frozenset[str]:
    """Which rules are in force besides segments; names as of the fields."""
    in_force = {
      CAUSAL: self.causal,
      WINDOW: self.window is not None,
      RIGHT_WINDOW: self.right_window is not None,
      CHUNK: self.chunk is not None,
      PREFIX: self.q_prefix is not None,
    }
    return frozenset(name for name, is_set in in_force.items() if is_set)

  @property
  def reach(self) -> tuple[int | None, int | None]:
    """How many positions before and after a query may be visible, at most.

    `None` is no limit.
    """
    size = self.window if self.chunk is None else self.chunk
    side = None if size is None else size - 1
    if self.causal and self.q_prefix is None:
      return side, 0
    return side, side if self.right_window is None else self.right_window

  def to_array(self) -> Bool[Array, "batch 1 length kv_length"]:
    """Returns the mask as a matrix for all heads; True means attend."""
    segment = _column(self.q_segment_ids)
    kv_segment = _row(self.kv_segment_ids)
    visible = (segment == kv_segment) & (kv_segment != 0)
    position, kv_position = _column(self.q_positions), _row(self.kv_positions)
    distance = position - kv_position
    if self.causal:
      earlier = distance >= 0
      if self.q_prefix is not None and self.kv_prefix is not None:
        earlier |= _column(self.q_prefix) & _row(self.kv_prefix)
      visible &= earlier
    if self.window is not None:
      far = distance if self.right_window is not None else jnp.abs(distance)
      visible &= far < self.window
    if self.right_window is not None:
      visible &= distance >= -self.right_window
    if self.chunk is not None:
      visible &= position // self.chunk == kv_position // self.chunk
    return visible

  def sees_any(
    self, visible: Bool[Array, "batch 1 length kv_length"]
  ) -> Bool[Array, "batch length"]:
    """Returns which queries see a key at all.

    Whatever the rules are, a token of a sequence that attends to itself sees
    itself, unless it is padding. Then the matrix is not read, so that compilers
    need not write it.

    Args:
      visible: What `to_array` returned.
    """
    is_own = (
      self.q_positions is self.kv_positions
      and self.q_segment_ids is self.kv_segment_ids
    )
    if is_own:
      return self.q_segment_ids != 0
    return jnp.any(visible, axis=-1)[:, 0]


def check_rules(
  name: str,
  *,
  causal: bool,
  window: int | None,
  right_window: int | None,
  chunk: int | None,
) -> None:
  """Raises ValueError unless the rules make sense together.

  Args:
    name: Whose fields they are.
    causal: As of `AttentionMask`, and so are the others.
    window: See there.
    right_window: See there.
    chunk: See there.
  """
  for field, size in (("window", window), ("chunk", chunk)):
    if size is not None and size <= 0:
      raise ValueError(
        f"{name}.{field} must be positive, got {size}; None is no limit."
      )
  if right_window is not None and right_window < 0:
    raise ValueError(
      f"{name}.right_window must be at least 0, got {right_window}; None is as "
      "`window` says."
    )
  if right_window is not None and causal:
    raise ValueError(
      f"{name}.right_window ({right_window}) needs causal=False: causal "
      "attention sees nothing later."
    )
  if chunk is not None and (window is not None or right_window is not None):
    raise ValueError(
      f"{name}.chunk ({chunk}) and a window ({window}, right_window "
      f"{right_window}) exclude each other; leave one of them None."
    )


def fill_tokens(
  layer: nn.Module,
  x: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
  prefix: jax.Array | None = None,
  *,
  rank: int = 3,
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
  """Checks the arguments of a layer and returns its positions and segments.

  Args:
    layer: The bound layer that was called, for messages and its cache.
    x: Tokens, [B,T,D] or ids [B,T].
    positions: Positions [B,T]; None counts from 0 in each sequence.
    segment_ids: Segments [B,T]; None is one document without padding.
    prefix: True for tokens of a prefix, bool [B,T]; None is no prefix.
    rank: Rank of `x`.

  Raises:
    TypeError: Positions or segments are not integers, or a prefix not boolean.
    ValueError: Shapes do not fit, or positions are missing while decoding.
  """
  segment_ids = fill_segments(layer, x, segment_ids, rank=rank)
  name, shape = type(layer).__name__, x.shape[:2]
  if positions is None and cache_variables.COLLECTION in layer.variables:
    raise ValueError(
      f"{name} needs `positions` while decoding: the number of tokens before "
      "each new one."
    )
  if positions is None:
    count = jnp.arange(shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(count[None], shape)
  _check_array(name, shape, "positions", positions)
  if prefix is not None:
    _check_array(name, shape, "prefix", prefix, "a boolean", jnp.bool)
  return positions, segment_ids


def fill_segments(
  layer: nn.Module,
  x: jax.Array,
  segment_ids: jax.Array | None,
  *,
  field: str = "segment_ids",
  rank: int = 3,
) -> Int[Array, "batch length"]:
  """Checks the segments of a layer's tokens; None is one unpadded document.

  Args:
    layer: The layer that was called, for messages.
    x: Tokens, [B,T,D] or ids [B,T].
    segment_ids: Segments [B,T].
    field: Name of the argument, for messages.
    rank: Rank of `x`.

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


def is_in_order(
  mask: AttentionMask,
) -> Bool[Array, " batch"]:
  """Returns which sequences hold whole segments one after another, in order.

  A kernel that applies causality and windows by the index of a token, not by
  its position, is right only for these. Ids of segments must rise, as packing
  makes them, so that one pass finds an id that occurs again; padding may stand
  between segments. Queries and keys must be the same tokens.

  Args:
    mask: A mask of as many queries as keys.
  """
  ids, positions = mask.q_segment_ids, mask.q_positions
  # Positions of padding mean nothing.
  same_tokens = (ids == mask.kv_segment_ids) & (
    (positions == mask.kv_positions) | (ids == 0)
  )
  before, here = ids[:, :-1], ids[:, 1:]
  continues = (here == before) & (positions[:, 1:] == positions[:, :-1] + 1)
  begins = here > jax.lax.cummax(ids, axis=1)[:, :-1]
  in_order = (here == 0) | continues | begins
  return jnp.all(same_tokens, axis=1) & jnp.all(in_order, axis=1)


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


def _column(x: jax.Array) -> jax.Array:
  return x[:, None, :, None]


def _row(x: jax.Array) -> jax.Array:
  return x[:, None, None, :]
