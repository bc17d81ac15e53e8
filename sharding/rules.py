"""Sharding rules: mesh axes of each logical axis.

A rule set is an ordered tuple of `(logical axis, mesh axes)`. For each array,
mesh axes are assigned in the order of the rules, each at most once; a logical
axis whose mesh axes are all in use is not split. A logical axis without a rule
is an error, so that a misspelled axis is not silently replicated.

Sizes need not be multiples of their shards. Arrays between programs must
divide; values inside a program need not, because XLA pads them to equal shards
and masks what it added. So a variable is stored without padding: a mesh axis
that does not divide its dimension splits another dimension (`fit_stored`).
Inside programs, dimensions that split the work of matmuls (the vocabulary,
heads, the width of feed-forward layers) get their mesh axes back
(`fit_computed`).
"""

from collections.abc import Mapping, Sequence
import math
from typing import Final

from jax.sharding import PartitionSpec

from paxon.sharding import axes

MeshAxes = str | tuple[str, ...] | None
Rules = tuple[tuple[str, MeshAxes], ...]

# Batches over `data` and `fsdp`, weights over `fsdp` (ZeRO-3) and `tensor`
# (Megatron), sequences over `sequence`. Unused mesh axes have size one, so this
# rule set works for data, FSDP, tensor and mixed parallelism.
DEFAULT_RULES: Rules = (
  (axes.BATCH, (axes.DATA, axes.FSDP, axes.EXPERT)),
  (axes.STAGES, axes.STAGE),
  (axes.EXPERTS, axes.EXPERT),
  (axes.VOCAB, axes.TENSOR),
  (axes.MLP, axes.TENSOR),
  (axes.HEADS, axes.TENSOR),
  (axes.KV_HEADS, axes.TENSOR),
  (axes.EMBED, axes.FSDP),
  (axes.LENGTH, axes.SEQUENCE),
  (axes.ACTIVATION_LENGTH, axes.SEQUENCE),
  (axes.KV_LENGTH, None),
  (axes.HEAD_DIM, None),
  (axes.RANK, None),
  (axes.LAYERS, None),
  (axes.ACTIVATION_EXPERTS, axes.EXPERT),
  (axes.ACTIVATION_VOCAB, axes.TENSOR),
  (axes.ACTIVATION_MLP, axes.TENSOR),
  (axes.ACTIVATION_HEADS, axes.TENSOR),
  (axes.ACTIVATION_KV_HEADS, axes.TENSOR),
  (axes.ACTIVATION_HEAD_DIM, None),
  (axes.ACTIVATION_EMBED, None),
)

# Share of padding in a dimension with which half of the devices would do.
IDLE_HALF: Final = 0.5

# A split of these decides on which devices a layer runs.
_FIXED: Final = frozenset(
  (
    axes.BATCH,
    axes.LENGTH,
    axes.ACTIVATION_LENGTH,
    axes.KV_LENGTH,
    axes.EXPERTS,
    axes.ACTIVATION_EXPERTS,
    axes.LAYERS,
    axes.STAGES,
  )
)


def as_tuple(entry: MeshAxes) -> tuple[str, ...]:
  """Returns the mesh axes of a rule or partition entry as a tuple."""
  return (entry,) if isinstance(entry, str) else tuple(entry or ())


def replace(rules: Rules, entries: Mapping[str, MeshAxes]) -> Rules:
  """Returns the rules, in the same order, with some mesh axes replaced.

  Raises:
    ValueError: A logical axis has no rule.
  """
  known = {logical for logical, _ in rules}
  for name in entries:
    if name not in known:
      raise _unknown(name, (name,), known)
  return tuple(
    (logical, entries.get(logical, mesh_axes)) for logical, mesh_axes in rules
  )


def keep_lengths(rules: Rules) -> Rules:
  """Returns the rules without splits of sequences, as for decoding."""
  known = {logical for logical, _ in rules}
  names = {axes.LENGTH, axes.ACTIVATION_LENGTH}
  return replace(rules, dict.fromkeys(known & names))


def to_partition_spec(
  logical_axes: Sequence[str | None], *, rules: Rules
) -> PartitionSpec:
  """Returns the mesh axes of each dimension of one array; None is not split.

  Without a rule for `activation_length`, it is split as `length` is.

  Raises:
    ValueError: A logical axis has no rule.
  """
  known = {logical for logical, _ in rules}
  if axes.ACTIVATION_LENGTH not in known:
    logical_axes = [
      axes.LENGTH if name == axes.ACTIVATION_LENGTH else name
      for name in logical_axes
    ]
  for name in logical_axes:
    if name is not None and name not in known:
      raise _unknown(name, logical_axes, known)
  entries: list[MeshAxes] = [None] * len(logical_axes)
  taken: set[str] = set()
  for logical, mesh_axes in rules:
    wanted = as_tuple(mesh_axes)
    for i, name in enumerate(logical_axes):
      if name == logical and entries[i] is None:
        free = tuple(axis for axis in wanted if axis not in taken)
        taken.update(free)
        entries[i] = free[0] if len(free) == 1 else (free or None)
  return PartitionSpec(*entries)


def round_up(size: int, parts: int) -> int:
  """Returns the size of a dimension with its padding."""
  return -(-size // parts) * parts


def find_padding(axis: str | None, size: int, parts: int) -> float | None:
  """Returns the share of padding in the work of a dimension.

  It is None if the mesh axes must not split the dimension: it cannot be padded,
  or with half of them the work of a device would be the same. Few key/value
  heads are usual, and repeating them costs as much.
  """
  share = 1 - size / round_up(size, parts)
  is_kv = axis in (axes.KV_HEADS, axes.ACTIVATION_KV_HEADS)
  if share and not may_be_uneven(axis):
    return None
  return share if share < IDLE_HALF or is_kv else None


def may_be_uneven(axis: str | None) -> bool:
  """Returns whether a dimension may have a size that its shards do not divide.

  Layers, stages, experts and tokens must be whole on each device.
  """
  return axis not in _FIXED


def fit_stored(
  shape: Sequence[int],
  logical_axes: Sequence[str | None],
  *,
  rules: Rules,
  mesh: Mapping[str, int],
) -> PartitionSpec:
  """Returns a partition of a stored array that divides all its dimensions.

  It is that of the rules where they divide. Mesh axes that do not divide their
  dimension split the largest one that they divide, or none.
  """
  return _fit(shape, logical_axes, rules=rules, mesh=mesh, is_stored=True)


def fit_computed(
  shape: Sequence[int],
  logical_axes: Sequence[str | None],
  *,
  rules: Rules,
  mesh: Mapping[str, int],
) -> PartitionSpec:
  """Returns the partition of a variable inside a program.

  A dimension keeps the mesh axes that split its activations, whether they
  divide it or not.
  """
  return _fit(shape, logical_axes, rules=rules, mesh=mesh, is_stored=False)


def _fit(
  shape: Sequence[int],
  logical_axes: Sequence[str | None],
  *,
  rules: Rules,
  mesh: Mapping[str, int],
  is_stored: bool,
) -> PartitionSpec:
  spec = to_partition_spec(logical_axes, rules=rules)
  entries = [list(as_tuple(entry)) for entry in spec]
  parts = [math.prod(mesh[name] for name in names) for names in entries]
  if all(size % n == 0 for size, n in zip(shape, parts, strict=True)):
    return spec
  working = dict(rules)
  moved: list[str] = []
  for i, (axis, size) in enumerate(zip(logical_axes, shape, strict=True)):
    if not may_be_uneven(axis):
      continue
    working_axes = as_tuple(working.get(f"activation_{axis}"))
    kept: list[str] = []
    for name in entries[i]:
      is_whole = size % math.prod(mesh[k] for k in (*kept, name)) == 0
      if is_whole or (name in working_axes and not is_stored):
        kept.append(name)
      else:
        moved.append(name)
    entries[i] = kept
  for name in moved:
    parts = [math.prod(mesh[k] for k in (*names, name)) for names in entries]
    fitting = [
      i
      for i, (axis, size) in enumerate(zip(logical_axes, shape, strict=True))
      if may_be_uneven(axis) and size % parts[i] == 0
    ]
    if fitting:
      entries[max(fitting, key=lambda i: shape[i] // parts[i])].append(name)
  return PartitionSpec(
    *(
      names[0] if len(names) == 1 else tuple(names) or None for names in entries
    )
  )


def _unknown(
  name: str, logical_axes: Sequence[str | None], known: set[str]
) -> ValueError:
  # Imported here: every layer imports this module.
  from paxon.sharding import suggestions

  return ValueError(
    f"No sharding rule names the logical axis {name!r} of"
    f" {tuple(logical_axes)}; add a rule for it"
    f"{suggestions.suggest(name, known)}"
  )
