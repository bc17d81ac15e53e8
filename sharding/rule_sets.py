"""Rule sets by name, for the knob `rules` of experiments.

A set says which mesh axes split what; the mesh says how many devices each axis
has. An axis of size one splits nothing, so most experiments keep `default` and
choose a mesh. In the table below, W is a kernel (`embed` by `mlp`, `heads` or
`vocab`), x an activation [batch, length, width], and "split n ways" is over the
named mesh axes. What each step sends, beside sums of metrics:

  default            W by embed over fsdp, by its other axis over tensor; x by
                     batch over data, fsdp and expert, by length over sequence,
                     by heads and mlp over tensor. Sends what `fsdp`, `tensor`
                     and `sequence` send for the axes that the mesh has.
  data               W whole; x by batch. All-reduce of gradients.
  fsdp               W by embed over fsdp (ZeRO-3); x by batch. All-gather of W
                     in each pass, reduce-scatter of its gradient.
  tensor             W by heads, mlp and vocab over tensor (Megatron); x by
                     batch, and by the same axes. All-reduce of x after
                     attention and after the feed-forward layer, each pass.
  sequence           x by batch, and by length over sequence (context
                     parallelism); W by embed over sequence. As `fsdp` over
                     sequence; attention gathers keys and values, or sends them
                     round where its kernel is `ring.Ring`.
  expert             kernels of experts by expert, other W by embed over expert;
                     x by batch, and by expert inside of expert layers.
  2d                 `default`, and x between layers by width over tensor, which
                     is Pax's recipe: what is saved for the backward pass is
                     split too. All-gather of x before each product and
                     reduce-scatter after it, instead of the all-reduce.
  weight_stationary  W as in `default`; x by batch over data and expert, by
                     width over fsdp, by heads and mlp over tensor. No W is ever
                     gathered, x is reduced over both axes: for decoding, where
                     x is small and W is not.
  replicated         W whole; x by batch over all axes of the mesh, as pmap did.
                     All-reduce of gradients.

`data`, `fsdp`, `tensor`, `sequence` and `expert` are added up by `+`:
`fsdp+tensor+sequence` splits the embed axis of W over fsdp and sequence.
"""

from collections.abc import Mapping
import difflib
from typing import Final

from paxon.sharding import axes
from paxon.sharding import rules as rules_lib

DEFAULT: Final = "default"

_Entries = Mapping[str, rules_lib.MeshAxes]

# What each part adds to `data`; the mesh axes of one logical axis are joined.
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

# Whole sets, as changes of the default's rules.
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
  """Returns the rules of a set.

  Args:
    name: One of `NAMES`, or several parts with `+` between them.

  Raises:
    ValueError: There is no such set, or a set cannot be added to others.
  """
  if name in _WHOLE:
    return rules_lib.replace(rules_lib.DEFAULT_RULES, _WHOLE[name])
  parts = [part.strip() for part in name.split("+")]
  for part in parts:
    if part in _WHOLE:
      raise ValueError(
        f"rules {name!r}: {part!r} stands alone; what can be added up is"
        f" {', '.join(_PARTS)}."
      )
    if part not in _PARTS:
      close = difflib.get_close_matches(part, NAMES, n=1)
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
  """Mesh axes of both, one alone as a name."""
  names = dict.fromkeys(
    (*rules_lib.as_tuple(first), *rules_lib.as_tuple(second))
  )
  return next(iter(names)) if len(names) == 1 else tuple(names)
