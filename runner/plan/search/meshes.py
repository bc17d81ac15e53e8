"""The meshes that a number of devices allows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import math
from typing import Final

from paxon.sharding import axes, lint
from paxon.sharding import mesh as mesh_lib
from paxon.sharding import rules as rules_lib

# Over these axes devices are shared out anew; others stay as they are.
EXPLORED: Final = (axes.DATA, axes.FSDP, axes.TENSOR)

# Activations are sent around in each layer, so the axis stays where links are
# fast: inside a host, or along a side or two of a slice.
MAX_TENSOR: Final = 16


def factorizations(
  current: mesh_lib.MeshSpec,
  *,
  num_devices: int,
  num_slices: int = 1,
  max_tensor: int = MAX_TENSOR,
) -> Iterator[mesh_lib.MeshSpec]:
  """Yields every way to share devices out over data, fsdp and tensor.

  Args:
    current: The mesh in use; sizes of its other axes are kept.
    num_devices: Of all slices.
    num_slices: Between slices lie `data`, `fsdp`, or both.
    max_tensor: The largest `tensor` axis.
  """
  full = current.resolve(num_devices)
  kept = {
    axis: size
    for axis, size in full.ici.items()
    if axis not in EXPLORED and size > 1
  }
  inside = num_devices // num_slices // math.prod(kept.values())
  for between in _products(num_slices, 2):
    dcn = _in_use(zip((axes.DATA, axes.FSDP), between, strict=True))
    for sizes in _products(inside, len(EXPLORED)):
      if sizes[-1] <= max_tensor:
        ici = kept | _in_use(zip(EXPLORED, sizes, strict=True))
        yield mesh_lib.MeshSpec(ici=ici, dcn=dcn)


def sizes(spec: mesh_lib.MeshSpec, num_devices: int) -> dict[str, int]:
  """Returns the size of each mesh axis, both networks together."""
  full = spec.resolve(num_devices)
  return {axis: full.ici[axis] * full.dcn[axis] for axis in axes.MESH_AXES}


def is_sound(
  mesh: dict[str, int],
  *,
  specs: object,
  batch: Mapping[str, Sequence[int]],
  rules: rules_lib.Rules,
) -> bool:
  """Whether the sharding lint finds no error.

  Args:
    mesh: Size of each mesh axis.
    specs: Of the model's variables.
    batch: Shapes of a global batch.
    rules: From logical axes to mesh axes.
  """
  found = lint.check(specs, batch=batch, mesh=mesh, rules=rules)
  return not any(finding.is_error for finding in found)


def shares_work(mesh: Mapping[str, int], *, rules: rules_lib.Rules) -> bool:
  """Whether every axis over which devices are shared out splits some work.

  An axis that splits none sends nothing either, so by what meshes send it would
  come first. Axes that stay as they are do not count: no other mesh is better.

  Args:
    mesh: Size of each mesh axis.
    rules: From logical axes to mesh axes.
  """
  explored = {axis: n if axis in EXPLORED else 1 for axis, n in mesh.items()}
  found = lint.check((), batch={}, mesh=explored, rules=rules)
  return not any(f.rule is lint.Rule.WORK_NOT_SHARED for f in found)


def batch_shards(mesh: dict[str, int], rules: rules_lib.Rules) -> int:
  """Returns into how many parts the rows of a batch are split."""
  (entry,) = rules_lib.to_partition_spec((axes.BATCH,), rules=rules)
  names = (entry,) if isinstance(entry, str) else entry or ()
  return math.prod(mesh[name] for name in names)


def _in_use(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
  return {axis: size for axis, size in pairs if size > 1}


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields every ordered product of `count` factors that gives `number`."""
  if count == 1:
    yield (number,)
    return
  for first in range(1, number + 1):
    if number % first == 0:
      for rest in _products(number // first, count - 1):
        yield (first, *rest)
