"""Sharding rules: mesh axes of each logical axis.

A rule set is an ordered tuple of `(logical axis, mesh axes)`. For each array,
mesh axes are assigned in the order of the rules, each at most once; a logical
axis whose mesh axes are all in use is not split. A logical axis without a rule
is an error, so that a misspelled axis is not silently replicated.
"""

from collections.abc import Mapping, Sequence

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
