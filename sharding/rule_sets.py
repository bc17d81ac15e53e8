"""Rule sets by name, for the knob `rules` of experiments.

The table "Rule sets" in `sharding/README.md` lists their splits and the
communication of each step. Combine `data`, `fsdp`, `tensor`, `sequence` and
`expert` with `+`: `fsdp+tensor+sequence` splits the embed axis of weights over
fsdp and sequence.
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
  "sequence": {
    axes.EMBED: axes.SEQUENCE,
    axes.LENGTH: axes.SEQUENCE,
    axes.ACTIVATION_LENGTH: axes.SEQUENCE,
  },
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
  "megatron_sequence": {
    axes.ACTIVATION_LENGTH: (axes.SEQUENCE, axes.TENSOR),
  },
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


def find_rules(name: str) -> rules_lib.Rules:
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
        entries[logical] = _join(entries[logical], mesh_axis)
  return rules_lib.replace(rules_lib.DEFAULT_RULES, entries)


def _join(
  first: rules_lib.MeshAxes, second: rules_lib.MeshAxes
) -> rules_lib.MeshAxes:
  """Returns the union of mesh axes, as a name if there is only one."""
  names = dict.fromkeys(
    (*rules_lib.as_tuple(first), *rules_lib.as_tuple(second))
  )
  return next(iter(names)) if len(names) == 1 else tuple(names)
