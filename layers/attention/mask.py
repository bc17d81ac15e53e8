"""Who may attend to whom, described by data instead of by a matrix.

A key is visible to a query if all of these hold:

  * both are in the same segment (document), and that is not 0 (padding);
  * if `causal`: the key's position is not after the query's;
  * if `window` is given: their positions differ by less than `window`.

Positions restart in each segment, so they are compared inside a segment only.
A kernel gets this description and decides how to apply it; `to_array` is the
plain way. Letters: B batch, T queries, S keys.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "q_positions",
    "kv_positions",
    "q_segment_ids",
    "kv_segment_ids",
  ),
  meta_fields=("causal", "window"),
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
  """

  q_positions: jax.Array
  kv_positions: jax.Array
  q_segment_ids: jax.Array
  kv_segment_ids: jax.Array
  causal: bool = True
  window: int | None = None

  def __post_init__(self) -> None:
    if self.window is not None and self.window <= 0:
      raise ValueError(
        f"AttentionMask.window must be positive, got {self.window}; None is "
        "no limit."
      )

  def to_array(self) -> Bool[Array, "batch 1 length kv_length"]:
    """Returns the mask as a matrix for all heads; True means attend."""
    segment = _column(self.q_segment_ids)
    kv_segment = _row(self.kv_segment_ids)
    visible = (segment == kv_segment) & (kv_segment != 0)
    distance = _column(self.q_positions) - _row(self.kv_positions)
    if self.causal:
      visible &= distance >= 0
    if self.window is not None:
      visible &= jnp.abs(distance) < self.window
    return visible


def _column(x: Int[Array, "batch length"]) -> jax.Array:
  return x[:, None, :, None]


def _row(x: Int[Array, "batch kv_length"]) -> jax.Array:
  return x[:, None, None, :]
