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

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRules:
  """Rules of visibility besides segments; the default is plain causality.

  Attributes:
    causal: Mask later keys.
    window: Number of visible positions, the query's own included; on both sides
      if not causal. `None` is no limit.
    right_window: Number of visible later positions, if not causal; 0 is none.
      `None` is the same limit as `window`.
    chunk: Number of positions of a chunk, inside of which tokens attend to each
      other. `None` is one chunk.
  """

  causal: bool = True
  window: int | None = None
  right_window: int | None = None
  chunk: int | None = None

  def __post_init__(self) -> None:
    checks.check_size(self, "window", "chunk")
    checks.check_non_negative(self, "right_window")
    if self.right_window is not None and self.causal:
      raise ValueError(
        f"MaskRules.right_window ({self.right_window}) needs causal=False: "
        "causal attention masks all later tokens."
      )
    is_limited = self.window is not None or self.right_window is not None
    if self.chunk is not None and is_limited:
      raise ValueError(
        f"MaskRules.chunk ({self.chunk}) cannot be combined with a window "
        f"({self.window}, right_window {self.right_window})."
      )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
  """A description of the keys that each query attends to.

  Attributes:
    q_positions: Positions of the queries, int [B, T].
    kv_positions: Positions of the keys, int [B, S].
    q_segment_ids: Segments of the queries, int [B, T]; 0 is padding.
    kv_segment_ids: Segments of the keys, int [B, S]; 0 is padding.
    rules: Causality, windows and chunks.
    q_prefix: True for queries of a prefix, bool [B, T]; they attend to all keys
      of the prefix although `causal`. `None` is no prefix.
    kv_prefix: True for keys of a prefix, bool [B, S]; set with `q_prefix`.
  """

  q_positions: jax.Array
  kv_positions: jax.Array
  q_segment_ids: jax.Array
  kv_segment_ids: jax.Array
  rules: MaskRules = dataclasses.field(
    default=MaskRules(), metadata={"static": True}
  )
  q_prefix: jax.Array | None = None
  kv_prefix: jax.Array | None = None

  def __post_init__(self) -> None:
    if (self.q_prefix is None) != (self.kv_prefix is None):
      raise ValueError(
        "AttentionMask.q_prefix and kv_prefix must be given together."
      )
    if self.q_prefix is not None and not self.rules.causal:
      raise ValueError(
        "AttentionMask.q_prefix needs causal=True; otherwise all tokens attend "
        "to each other already."
      )

  @property
  def by_position(self) -> bool:
    """Whether visibility depends on positions, not on segments alone."""
    return self.rules != MaskRules(causal=False)

  @property
  def is_self(self) -> bool:
    """Whether queries and keys are the same tokens.

    They are if they share their arrays; a transformation makes copies of them.
    """
    return (
      self.q_positions is self.kv_positions
      and self.q_segment_ids is self.kv_segment_ids
    )

  @property
  def reach(self) -> tuple[int | None, int | None]:
    """The largest visible distance before and after a query; None: no limit."""
    rules = self.rules
    size = rules.window if rules.chunk is None else rules.chunk
    side = None if size is None else size - 1
    if rules.causal and self.q_prefix is None:
      return side, 0
    return side, side if rules.right_window is None else rules.right_window

  def to_array(self) -> Bool[Array, "batch 1 length kv_length"]:
    """Returns the mask as a matrix for all heads; True means attend."""
    segment = _column(self.q_segment_ids)
    kv_segment = _row(self.kv_segment_ids)
    visible = (segment == kv_segment) & (kv_segment != 0)
    position, kv_position = _column(self.q_positions), _row(self.kv_positions)
    rules, distance = self.rules, position - kv_position
    if rules.causal:
      earlier = distance >= 0
      if self.q_prefix is not None and self.kv_prefix is not None:
        earlier |= _column(self.q_prefix) & _row(self.kv_prefix)
      visible &= earlier
    if rules.window is not None:
      far = distance if rules.right_window is not None else jnp.abs(distance)
      visible &= far < rules.window
    if rules.right_window is not None:
      visible &= distance >= -rules.right_window
    if rules.chunk is not None:
      visible &= position // rules.chunk == kv_position // rules.chunk
    return visible

  def sees_any(
    self, visible: Bool[Array, "batch 1 length kv_length"]
  ) -> Bool[Array, "batch length"]:
    """Returns which queries attend to at least one key of `to_array()`.

    In self-attention every token but padding attends to itself. Then the matrix
    is not read, so that compilers need not write it.
    """
    if self.is_self:
      return self.q_segment_ids != 0
    return jnp.any(visible, axis=-1)[:, 0]


def is_in_order(
  mask: AttentionMask,
) -> Bool[Array, " batch"]:
  """Returns which sequences hold whole segments one after another, in order.

  A kernel that applies causality and windows by the index of a token, not by
  its position, is right only for these. Ids of segments must rise, as packing
  makes them, so that one pass finds an id that occurs again; padding may stand
  between segments. Queries and keys must be the same tokens.
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


def _column(x: jax.Array) -> jax.Array:
  return x[:, None, :, None]


def _row(x: jax.Array) -> jax.Array:
  return x[:, None, None, :]
