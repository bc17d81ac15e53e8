"""Matmul FLOPs of fused attention kernels, from their equations in a jaxpr.

A backward kernel recomputes some matmuls that plain attention keeps. cuDNN
skips what its mask type hides, splash what the table of blocks says, if that is
constant in the jaxpr.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, Final

import jax
import numpy as np

from paxon.runner.plan.program_text import kernels

# CAUSAL and PADDING_CAUSAL of JAX's MaskType.
_CUDNN_CAUSAL: Final = (2, 3)
# Matmuls by name of the primitive or Pallas call: those that plain attention
# has too, and those that are computed again.
_CUDNN: Final = {
  "dot_product_attention_fwd": (2, 0),
  "dot_product_attention_fwd_wrapper": (2, 0),
  "dot_product_attention_bwd": (4, 1),
  "dot_product_attention_bwd_wrapper": (4, 1),
}
_SPLASH_KEYS: Final = "splash_mha_dkv_segmented_no_residuals"
_SPLASH: Final = {
  "splash_mha_fwd_segmented_residuals": (2, 0),
  "splash_mha_fwd_segmented_no_residuals": (2, 0),
  "splash_mha_dq_segmented_no_residuals": (1, 2),
  _SPLASH_KEYS: (3, 1),
}
# The kernel that computes gradients of queries, too, has more results.
_SPLASH_FUSED: Final = (4, 1)
_SPLASH_RESULTS: Final = 4


@dataclasses.dataclass(frozen=True)
class Attention:
  """FLOPs of one call of an attention kernel.

  Attributes:
    needed: FLOPs that plain attention has too, as if no block were skipped.
    again: FLOPs that the kernel recomputes.
    share: Share of query-key pairs that it computes; None if not known.
  """

  needed: int
  again: int
  share: float | None


def attention(eqn: Any, known: Mapping[Any, Any]) -> Attention | None:
  """Returns the FLOPs of an attention kernel; None for any other equation.

  Args:
    eqn: An equation of a jaxpr.
    known: Values of the variables that are constant.
  """
  name = eqn.primitive.name
  if name in _CUDNN:
    query, key = (v.aval.shape for v in eqn.invars[:2])
    # `layout` is JAX's AttentionLayout: 0 is BTNH, 1 is BNTH.
    kv_length = key[2 if eqn.params["layout"] else 1]
    (needed, again), share = _CUDNN[name], _cudnn_share(eqn)
  elif (name := eqn.params.get("name")) in _SPLASH:
    query, key = (array.shape for array in _splash_operands(eqn))
    kv_length = key[-2]
    (needed, again), share = _SPLASH[name], _splash_share(eqn, known)
    if name == _SPLASH_KEYS and len(eqn.outvars) > _SPLASH_RESULTS:
      needed, again = _SPLASH_FUSED
  else:
    return None
  matmul = 2 * math.prod(query) * kv_length
  return Attention(needed * matmul, again * matmul, share)


def _cudnn_share(eqn: Any) -> float | None:
  """The share of T x S pairs that cuDNN computes; None if all.

  It skips blocks above the diagonal and before a window; the least is the
  unmasked pairs.
  """
  mask = eqn.params["mask_type"]
  if getattr(mask, "value", mask) not in _CUDNN_CAUSAL:
    return None
  axis = 2 if eqn.params["layout"] else 1
  length, kv_length = (v.aval.shape[axis] for v in eqn.invars[:2])
  if length != kv_length:
    return None
  window = eqn.params.get("sliding_window_length")
  return kernels.causal_share(length, window)


def _splash_operands(eqn: Any) -> list[Any]:
  """Queries [..T,H] and keys [..S,H]."""
  return [
    v.aval
    for v in eqn.invars
    if jax.dtypes.issubdtype(v.aval.dtype, np.floating)
  ][:2]


def _splash_share(eqn: Any, known: Mapping[Any, Any]) -> float | None:
  """The share of blocks that splash computes; None if not known.

  Its first operands are tables [heads,queries,keys] of blocks: the next block
  to load, then whether a block is skipped (0), masked or whole.
  """
  tables = [v for v in eqn.invars if v.aval.ndim == 3][:2]
  table = known.get(tables[1]) if len(tables) == 2 else None
  if table is None or not jax.dtypes.issubdtype(table.dtype, np.integer):
    return None
  query, key = _splash_operands(eqn)
  blocks = [
    next(
      int(getattr(size, "block_size", size))
      for size in reversed(mapping.block_shape[:-1])
    )
    for mapping in eqn.params["grid_mapping"].block_mappings
    if jax.dtypes.issubdtype(mapping.array_aval.dtype, np.floating)
  ][:2]
  computed = np.count_nonzero(np.asarray(table)) / table.shape[0]
  share = computed * math.prod(blocks) / (query.shape[-2] * key.shape[-2])
  return min(share, 1.0)
