"""Whether places in a row say what positions say.

A kernel that goes by places in a row, and not by positions, is right only where
the two differ alike within each segment.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from paxon.layers.attention import mask as attention_mask


def is_in_order(
  mask: attention_mask.AttentionMask,
) -> Bool[Array, " batch"]:
  """Returns for each row whether its segments stand in one piece, in order.

  Ids of segments must rise, as packing makes them, so that one pass finds an id
  that comes back; padding may stand between segments. Queries and keys must be
  the same tokens.

  Args:
    mask: Of as many queries as keys.
  """
  ids, positions = mask.q_segment_ids, mask.q_positions
  # Positions of padding mean nothing.
  same_tokens = (ids == mask.kv_segment_ids) & (
    (positions == mask.kv_positions) | (ids == 0)
  )
  before, here = ids[:, :-1], ids[:, 1:]
  goes_on = (here == before) & (positions[:, 1:] == positions[:, :-1] + 1)
  begins = here > jax.lax.cummax(ids, axis=1)[:, :-1]
  in_order = (here == 0) | goes_on | begins
  return jnp.all(same_tokens, axis=1) & jnp.all(in_order, axis=1)
