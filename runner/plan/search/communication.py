"""Communication of a mesh per step, by arithmetic on shapes.

Enough to put meshes in order before any is compiled. For each variable, of
which a device holds the part that its axes leave it:

  axes that split it and the batch (fsdp)   gathered in the forward and in the
                                            backward pass, gradients scattered
  axes that split the batch alone (data)    gradients reduced
  axes that split its product (tensor)      activations reduced: once a pass
                                            for each kernel that ends in `embed`

A microbatch does all of this but the last anew. Of g devices each sends
(g - 1) / g of what it gathers or scatters, and twice that of what it reduces.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import math

from paxon.runner.plan import hardware
from paxon.sharding import axes as axis_names
from paxon.sharding import mesh as mesh_lib
from paxon.sharding import rules as rules_lib
from paxon.sharding import variables

# Forward and backward.
_PASSES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
  """Bytes that one device sends in a step.

  Attributes:
    fast: Inside a host or a slice.
    network: Between them.
  """

  fast: float = 0.0
  network: float = 0.0

  @property
  def total(self) -> float:
    """Over both."""
    return self.fast + self.network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A mesh on hardware, and how it splits arrays.

  Attributes:
    mesh: With every size given.
    kind: The hardware.
    rules: From logical axes to mesh axes.
  """

  mesh: mesh_lib.MeshSpec
  kind: hardware.Hardware
  rules: rules_lib.Rules

  def size(self, axis: str) -> int:
    """Devices along a mesh axis."""
    return self.mesh.ici[axis] * self.mesh.dcn[axis]

  def split(self, names: Sequence[str | None]) -> list[tuple[str, ...]]:
    """Returns the mesh axes in use that split each dimension."""
    spec = rules_lib.to_partition_spec(names, rules=self.rules)
    entries = [(e,) if isinstance(e, str) else e or () for e in spec]
    return [tuple(n for n in e if self.size(n) > 1) for e in entries]

  def parts(self, names: Sequence[str | None]) -> int:
    """Returns into how many parts an array with these axes is split."""
    return math.prod(self.size(n) for split in self.split(names) for n in split)

  def is_network(self, axis: str) -> bool:
    """Whether neighbours along a mesh axis are on different hosts or slices."""
    if self.mesh.dcn[axis] > 1:
      return True
    if self.kind.platform is not hardware.Platform.CUDA:
      return False
    # Devices are laid out along the last axis first.
    order = axis_names.MESH_AXES
    inner = order[order.index(axis) + 1 :]
    reach = math.prod(self.size(n) for n in inner) * self.size(axis)
    return reach > self.kind.devices_per_host


def traffic(
  specs: Iterable[variables.VariableSpec],
  layout: Layout,
  *,
  batch_shape: Sequence[int],
  itemsize: int,
  num_microbatches: int = 1,
  recomputed: float = 0.0,
  narrow: Collection[str] = (),
) -> Traffic:
  """Returns what one device sends in a step.

  Args:
    specs: Of the variables.
    layout: Mesh, hardware and rules.
    batch_shape: Rows and their length.
    itemsize: Bytes of an element as it is computed with.
    num_microbatches: Parts of a batch.
    recomputed: How much of a forward pass is done again, from 0 to 1.
    narrow: Paths of variables, without their collection, that are quantized
      before they are gathered: one byte an element. Gradients are not.
  """
  sent = {True: 0.0, False: 0.0}
  rows = _rows_of(layout, batch_shape)
  sharing = {n for s in layout.split(_ROWS) for n in s}
  for spec in specs:
    if spec.update is not variables.UpdateRule.OPTIMIZER:
      continue
    split = layout.split(spec.axes)
    gathered, kept = _by_use(layout, spec.axes, split)
    whole = itemsize * math.prod(spec.shape)
    whole /= math.prod(layout.size(n) for n in kept)
    part = whole
    is_narrow = spec.name.partition("/")[2] in narrow
    passes = _PASSES / itemsize if is_narrow else _PASSES
    for axis in gathered:
      n = layout.size(axis)
      # Gathers, and the scatter of gradients.
      moved = (passes + (axis in sharing)) * _others(n) * part
      sent[layout.is_network(axis)] += num_microbatches * moved
      part /= n
    for axis in sorted(sharing - set(gathered) - set(kept)):
      moved = 2 * _others(layout.size(axis)) * part
      sent[layout.is_network(axis)] += num_microbatches * moved
    for axis in _reduced_over(spec, split, kept):
      times = (_PASSES + recomputed) * 2 * _others(layout.size(axis))
      layers = math.prod(spec.shape[: len(spec.stacked)])
      width = spec.shape[spec.axes.index(axis_names.EMBED)]
      sent[layout.is_network(axis)] += times * layers * rows * width * itemsize
  return Traffic(fast=sent[False], network=sent[True])


_ROWS = (axis_names.BATCH, axis_names.LENGTH)


def _rows_of(layout: Layout, batch_shape: Sequence[int]) -> float:
  """Tokens of a batch on one device."""
  return math.prod(batch_shape) / layout.parts(_ROWS[: len(batch_shape)])


def _by_use(
  layout: Layout,
  names: Sequence[str | None],
  split: Sequence[tuple[str, ...]],
) -> tuple[list[str], list[str]]:
  """Mesh axes along which a variable is gathered to be used, and the others.

  It stays split where the activation that it is multiplied to is split alike.
  """
  gathered: list[str] = []
  kept: list[str] = []
  wanted: Mapping[str, rules_lib.MeshAxes] = dict(reversed(layout.rules))
  for name, mesh_axes in zip(names, split, strict=True):
    entry = wanted.get(f"activation_{name}")
    activation = (entry,) if isinstance(entry, str) else entry or ()
    for axis in mesh_axes:
      (kept if axis in activation else gathered).append(axis)
  return gathered, kept


def _reduced_over(
  spec: variables.VariableSpec,
  split: Sequence[tuple[str, ...]],
  kept: Sequence[str],
) -> list[str]:
  """Mesh axes over which the product with a kernel is a sum of parts."""
  if axis_names.EMBED not in spec.axes:
    return []
  before = split[: spec.axes.index(axis_names.EMBED)]
  return [n for mesh_axes in before for n in mesh_axes if n in kept]


def _others(size: int) -> float:
  return (size - 1) / size
