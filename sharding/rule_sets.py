"""Rule sets by name, for the knob `rules` of experiments.

A mesh axis of size one splits nothing, so most experiments use `default` and
choose a mesh. The table lists the splits and the communication of each step. W
is a kernel (`embed` by `mlp`, `heads` or `vocab`), x an activation
[batch, length, width].

  default            W by embed over fsdp, by its other axis over tensor; x by
                     batch over data, fsdp and expert, by length over sequence,
                     by heads and mlp over tensor. Communication of `fsdp`,
                     `tensor` and `sequence`, for mesh axes larger than one.
  data               W whole; x by batch. All-reduce of gradients.
  fsdp               W by embed over fsdp (ZeRO-3); x by batch. All-gather of W
                     in each pass, reduce-scatter of its gradient.
  tensor             W by heads, mlp and vocab over tensor (Megatron); x by
                     batch, and by the same axes. All-reduce of x after
                     attention and after the feed-forward layer, each pass.
  sequence           x by batch, and by length over sequence (context
                     parallelism); W by embed over sequence. As `fsdp` over
                     sequence; attention gathers keys and values, or passes them
                     around with the kernel `ring.Ring`.
  expert             kernels of experts by expert, other W by embed over expert;
                     x by batch, and by expert in expert layers.
  2d                 `default`, and x between layers by width over tensor (as in
                     Pax), which also splits the activations saved for the
                     backward pass. All-gather of x before each matmul and
                     reduce-scatter after it, instead of the all-reduce.
  weight_stationary  W as in `default`; x by batch over data and expert, by
                     width over fsdp, by heads and mlp over tensor. No W is
                     gathered, x is reduced over both axes: for decoding, where
                     x is small and W is large.
  replicated         W whole; x by batch over all axes of the mesh (as in pmap).
                     All-reduce of gradients.

Combine `data`, `fsdp`, `tensor`, `sequence` and `expert` with `+`:
`fsdp+tensor+sequence` splits the embed axis of W over fsdp and sequence.
"""

from collections.abc import Mapping
from typing import Final

from paxon.sharding import axes, suggestions
from paxon.sharding import rules as rules_lib

DEFAULT: Final = "default"

_Entries = Mapping[str, rules_lib.MeshAxes]

# Rules added to `data` by each combinable set.
_PARTS: Final[Mapping[str, _Entries]] = {
  "data": {},
  "fsdp": {axes.EMBED: axes.FSDP},
  "tensor": {
    axes.VOCAB: axes.TENSOR,
    axes.MLP: axes.TENSOR,
    axes.HEADS: axes.TENSOR,
    axes.KV_HEADS: axes.TENSOR,
    axes.ACTIVATION_VOCAB: axes.TENSOR,
    axes.ACTIVATION_MLP: axes.TENSOR,
    axes.ACTIVATION_HEADS: axes.TENSOR,
    axes.ACTIVATION_KV_HEADS: axes.TENSOR,
  },
  "sequence": {axes.EMBED: axes.SEQUENCE, axes.LENGTH: axes.SEQUENCE},
  "expert": {
    axes.EXPERTS: axes.EXPERT,
    axes.ACTIVATION_EXPERTS: axes.EXPERT,
    axes.EMBED: axes.EXPERT,
  },
}

# Sets that cannot be combined, as changes of the default rules.
_WHOLE: Final[Mapping[str, _Entries]] = {
  DEFAULT: {},
  "2d": {axes.ACTIVATION_EMBED: axes.TENSOR},
  "weight_stationary": {
    axes.BATCH: (axes.DATA, axes.EXPERT),
    axes.ACTIVATION_EMBED: axes.FSDP,
  },
  "replicated": {
    **dict.fromkeys(axes.LOGICAL_AXES, None),
    axes.BATCH: axes.MESH_AXES,
  },
}

NAMES: Final = (*_WHOLE, *_PARTS)


def named(name: str) -> rules_lib.Rules:
  """Returns the rules of one of `NAMES`, or of several joined by `+`.

  Raises:
    ValueError: A rule set does not exist or cannot be combined.
  """
  if name in _WHOLE:
    return rules_lib.replace(rules_lib.DEFAULT_RULES, _WHOLE[name])
  parts = [part.strip() for part in name.split("+")]
  for part in parts:
    if part in _WHOLE:
      raise ValueError(
        f"rules {name!r}: {part!r} cannot be combined; those that can are"
        f" {', '.join(_PARTS)}."
      )
    if part not in _PARTS:
      close = suggestions.find_closest(part, NAMES)
      hint = f"; did you mean {close[0]!r}?" if close else "."
      raise ValueError(
        f"rules {name!r}: there is no rule set {part!r}{hint} Rule sets are"
        f" {', '.join(NAMES)}, and sums such as fsdp+tensor."
      )
  entries: dict[str, rules_lib.MeshAxes] = dict.fromkeys(axes.LOGICAL_AXES)
  entries[axes.BATCH] = (axes.DATA, axes.FSDP, axes.EXPERT)
  entries[axes.STAGES] = axes.STAGE
  for part in _PARTS:
    if part in parts:
      for logical, mesh_axis in _PARTS[part].items():
        entries[logical] = _joined(entries[logical], mesh_axis)
  return rules_lib.replace(rules_lib.DEFAULT_RULES, entries)


def _joined(
  first: rules_lib.MeshAxes, second: rules_lib.MeshAxes
) -> rules_lib.MeshAxes:
  """Returns the union of mesh axes, as a name if there is only one."""
  names = dict.fromkeys(
    (*rules_lib.as_tuple(first), *rules_lib.as_tuple(second))
  )
  return next(iter(names)) if len(names) == 1 else tuple(names)
