"""The sharding lint: errors and warnings of a layout, computed without devices.

The checks use only names and sizes, so the layout of any model on any mesh can
be checked on one CPU.

With an error the program fails to compile or to run. A warning reports memory
or work that is replicated although the mesh has an axis for it.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import enum
import math
from typing import Any

import jax

from paxon.sharding import axes as axis_names
from paxon.sharding import rules as sharding_rules
from paxon.sharding import variables

# A replicated tensor below this size is not worth a collective.
LARGE_BYTES = 64 * 2**20

# The configuration field that sets the size of an axis, if it is unique.
_FIELDS = {
  axis_names.HEADS: "num_heads",
  axis_names.KV_HEADS: "num_kv_heads",
  axis_names.EXPERTS: "num_experts",
  axis_names.EMBED: "embed_dim",
  axis_names.MLP: "mlp_dim",
  axis_names.VOCAB: "vocab_size",
  axis_names.LAYERS: "num_layers",
  axis_names.BATCH: "global_batch_size",
  axis_names.LENGTH: "length",
}


class Rule(enum.Enum):
  """The kind of a finding."""

  DOES_NOT_DIVIDE = "does not divide"
  PADDED = "padded"
  AXIS_USED_TWICE = "axis used twice"
  LEFT_REPLICATED = "left replicated"
  STORED_WHOLE = "stored whole"
  WORK_NOT_SHARED = "work not shared"
  UNKNOWN_AXIS = "unknown axis"


@dataclasses.dataclass(frozen=True)
class Finding:
  """An error or warning of a layout.

  Attributes:
    rule: Kind of the finding.
    is_error: Whether the program cannot run.
    message: One sentence with path, sizes, and the change to make.
    padding: Share of the work of an axis that is padding.
  """

  rule: Rule
  is_error: bool
  message: str
  padding: float = 0.0


def check(
  specs: Any,
  *,
  batch: Mapping[str, Sequence[int]],
  mesh: Mapping[str, int],
  rules: sharding_rules.Rules = sharding_rules.DEFAULT_RULES,
  large_bytes: int = LARGE_BYTES,
  partitioner: variables.Partitioner | None = None,
) -> list[Finding]:
  """Checks a layout; returns errors, then warnings.

  Args:
    specs: Pytree of `VariableSpec`, usually those of a model.
    batch: Shapes of the arrays of a global batch, [batch, length, ...].
    mesh: Size of each mesh axis.
    rules: Mesh axes of each logical axis.
    large_bytes: Smallest size of a replicated variable that gets a warning.
    partitioner: As of a layout; its variables are not checked.
  """
  findings = _check_rules(rules, mesh)
  if findings:
    return findings
  arrays = [
    (f"batch/{name}", tuple(shape), _batch_axes(len(shape)), 0)
    for name, shape in batch.items()
  ]
  leaves: list[variables.VariableSpec] = jax.tree.leaves(specs)
  ruled = [s for s in leaves if not partitioner or partitioner(s, mesh) is None]
  arrays += [(s.name, s.shape, s.axes, s.dtype.itemsize) for s in ruled]
  checker = _Checker(mesh, rules)
  findings = [
    *_group(p for array in arrays for p in checker.indivisible(*array)),
    *_group(p for array in arrays for p in checker.used_twice(*array[:3])),
    *_group(p for s in ruled for p in checker.find_replicated(s, large_bytes)),
    *checker.idle_axes({axis for spec in leaves for axis in spec.axes}),
  ]
  return sorted(findings, key=lambda finding: not finding.is_error)


# A finding, and the key by which equal findings are grouped.
_Problem = tuple[tuple[Any, ...], Finding]


def _group(problems: Iterable[_Problem]) -> list[Finding]:
  groups: dict[tuple[Any, ...], list[Finding]] = {}
  for key, finding in problems:
    groups.setdefault(key, []).append(finding)
  return [
    dataclasses.replace(first, message=first.message + _others(len(more)))
    for first, *more in groups.values()
  ]


def _others(number: int) -> str:
  if not number:
    return ""
  return f" (and {number} more variable{'s' if number > 1 else ''} like it)"


def _check_rules(
  rules: sharding_rules.Rules, mesh: Mapping[str, int]
) -> list[Finding]:
  findings = []
  for logical, entry in rules:
    names = sharding_rules.as_tuple(entry)
    for name in dict.fromkeys(names):
      if name not in mesh:
        message = (
          f"the rule of {logical!r} names the mesh axis {name!r}, but the mesh"
          f" has {', '.join(mesh)}; correct the rule"
        )
        findings.append(Finding(Rule.UNKNOWN_AXIS, True, message))
      if names.count(name) > 1:
        message = (
          f"the rule of {logical!r} names the mesh axis {name!r}"
          f" {names.count(name)} times; name it once"
        )
        findings.append(Finding(Rule.AXIS_USED_TWICE, True, message))
  return findings


class _Checker:
  """Checks arrays, given as name, shape and logical axes."""

  def __init__(
    self, mesh: Mapping[str, int], rules: sharding_rules.Rules
  ) -> None:
    self._mesh = mesh
    self._rules = rules

  def indivisible(
    self,
    name: str,
    shape: Sequence[int],
    axes: Sequence[str | None],
    itemsize: int,
  ) -> Iterable[_Problem]:
    """Yields the dimensions that do not divide in a program."""
    num_bytes = math.prod(shape) * itemsize
    computed = sharding_rules.fit_computed(
      shape, axes, rules=self._rules, mesh=self._mesh
    )
    for axis, size, entry in zip(axes, shape, computed, strict=True):
      names = self._in_use(sharding_rules.as_tuple(entry))
      parts = math.prod(self._mesh[n] for n in names)
      if size % parts == 0:
        continue
      key, over = (axis, size, names), self._describe(names)
      whole = sharding_rules.round_up(size, parts)
      share = sharding_rules.find_padding(axis, size, parts)
      if share is not None:
        message = (
          f"{name}: axis {axis!r} of size {size} is computed as {whole},"
          f" because it does not divide by {over}: {100 * share:.2g} % of its"
          f" work is padding, and its {num_bytes / 2**20:.3g} MiB move between"
          f" the devices of {' and '.join(names)} before it is used, as its"
          f" gradient does after it; {_field(axis)}={whole} avoids both"
        )
        yield key, Finding(Rule.PADDED, False, message, share)
        continue
      message = (
        f"{name}: axis {axis!r} of size {size} does not divide by {over}; make"
        f" {_field(axis)} a multiple of {parts}, such as {whole}, or the mesh"
        f" smaller along {' and '.join(names)}, so that it divides {size}"
      )
      yield key, Finding(Rule.DOES_NOT_DIVIDE, True, message)

  def used_twice(
    self, name: str, shape: Sequence[int], axes: Sequence[str | None]
  ) -> Iterable[_Problem]:
    split = self._split(axes)
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
      for mesh_axis in self._find_wanted_axes(axis):
        others = [k for k, names in enumerate(split) if mesh_axis in names]
        if not others or others == [i]:
          continue
        (other,) = others
        message = (
          f"{name}: the mesh axis {mesh_axis!r} is asked for twice, by"
          f" {axes[other]!r} of size {shape[other]}, which gets it, and by"
          f" {axis!r} of size {size}, which is not split by it; give one of"
          " them another rule"
        )
        key = (axis, axes[other], mesh_axis)
        yield key, Finding(Rule.AXIS_USED_TWICE, False, message)

  def find_replicated(
    self, spec: variables.VariableSpec, large_bytes: int
  ) -> Iterable[_Problem]:
    size = math.prod(spec.shape) * spec.dtype.itemsize
    stored = sharding_rules.fit_stored(
      spec.shape, spec.axes, rules=self._rules, mesh=self._mesh
    )
    used = {n for entry in stored for n in sharding_rules.as_tuple(entry)}
    wanted = {n for names in self._split(spec.axes) for n in names}
    parts = math.prod(self._mesh[n] for n in used)
    key = (spec.shape, spec.axes)
    lost = [n for n in self._mesh if n in wanted - used]
    if lost and size // parts >= large_bytes:
      message = (
        f"{spec.name}: none of its sizes {spec.shape} divides by"
        f" {self._describe(lost)}, so {size / parts / 2**30:.3g} GiB of it are"
        " on every device; use a mesh of which a larger part is 'data', or"
        " other sizes"
      )
      yield key, Finding(Rule.STORED_WHOLE, False, message)
      return
    sharing = [
      f"{axis}={n}"
      for axis, n in self._mesh.items()
      if n > 1 and axis != axis_names.DATA
    ]
    if size < large_bytes or parts > 1 or not sharing:
      return
    message = (
      f"{spec.name}: {size / 2**30:.3g} GiB of shape {spec.shape} are on every"
      f" device, though the mesh has {', '.join(sharing)}; its axes are"
      f" {spec.axes}: name them, or give one a rule with a mesh axis in use"
    )
    yield key, Finding(Rule.LEFT_REPLICATED, False, message)

  def idle_axes(self, named: set[str | None]) -> Iterable[Finding]:
    """Yields a warning for each mesh axis that splits no activations."""
    entries = [(k, sharding_rules.as_tuple(v)) for k, v in self._rules]
    # A mesh axis of stages splits work only if the model has stages: then it
    # also stores the layers, or splits their weights (see `with_stages`).
    stored = {
      name for logical, names in entries for name in names if logical in named
    }
    working = {
      name
      for logical, names in entries
      for name in names
      if logical in _WORK and (logical != axis_names.STAGES or name in stored)
    }
    for axis, size in self._mesh.items():
      if size > 1 and axis not in working:
        message = (
          f"the mesh axis {axis}={size} splits neither the batch nor any other"
          f" axis of activations, so each of its {size} devices does the same"
          f" work; add {axis!r} to the rule of {axis_names.BATCH!r}, or take"
          " it out of the mesh"
        )
        yield Finding(Rule.WORK_NOT_SHARED, False, message)

  def _split(self, axes: Sequence[str | None]) -> list[tuple[str, ...]]:
    """Returns the mesh axes larger than one that split each dimension."""
    spec = sharding_rules.to_partition_spec(axes, rules=self._rules)
    return [self._in_use(sharding_rules.as_tuple(entry)) for entry in spec]

  def _describe(self, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={self._mesh[name]}" for name in names)

  def _find_wanted_axes(self, axis: str | None) -> tuple[str, ...]:
    """Returns the mesh axes larger than one in the first rule of an axis."""
    for logical, entry in self._rules:
      if logical == axis:
        return self._in_use(sharding_rules.as_tuple(entry))
    return ()

  def _in_use(self, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if self._mesh[name] > 1)


# Logical axes that split the work of a step.
_WORK = frozenset(
  name
  for name in axis_names.LOGICAL_AXES
  if name.startswith("activation_")
  or name in (axis_names.BATCH, axis_names.LENGTH, axis_names.STAGES)
)


def _field(axis: str | None) -> str:
  return _FIELDS.get(axis or "", f"the size of {axis!r}")


def _batch_axes(ndim: int) -> tuple[str | None, ...]:
  names = (axis_names.BATCH, axis_names.LENGTH)[:ndim]
  return names + (None,) * (ndim - len(names))
