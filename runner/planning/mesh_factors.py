"""Enumeration of the meshes of a number of devices."""

from collections.abc import Iterable, Iterator, Sequence
import math
from typing import Final

from paxon.runner.plan import target as targets
from paxon.sharding import axes
from paxon.sharding import mesh as mesh_lib

# Activations are exchanged in each layer along these axes, so they stay within
# a host, or along a side of a slice.
_MAX_SIZES: Final = {axes.TENSOR: 16, axes.SEQUENCE: 16}


def meshes(
  current: mesh_lib.MeshSpec,
  *,
  target: targets.Target,
  varied: Sequence[str] = (axes.DATA, axes.FSDP, axes.TENSOR),
  kept_axes: Sequence[str] = axes.MESH_AXES,
) -> Iterator[mesh_lib.MeshSpec]:
  """Yields every way to factor the devices over some mesh axes.

  Args:
    current: The mesh in use; sizes of its other axes are kept.
    target: The devices. Between slices lie `data`, `fsdp`, or both.
    varied: Axes that the search may use.
    kept_axes: Other axes whose size is kept; the rest are dropped.
  """
  full = current.resolve(target.num_devices)
  kept = {
    a: n
    for a, n in full.ici.items()
    if a in kept_axes and a not in varied and n > 1
  }
  inside = target.num_devices // target.slices
  if inside % math.prod(kept.values()):
    return
  inside //= math.prod(kept.values())
  for between in _factorizations(target.slices, 2):
    dcn = _in_use(zip((axes.DATA, axes.FSDP), between, strict=True))
    for sizes in _factorizations(inside, len(varied)):
      ici = _in_use(zip(varied, sizes, strict=True))
      if all(n <= _MAX_SIZES.get(a, n) for a, n in ici.items()):
        yield mesh_lib.MeshSpec(ici=kept | ici, dcn=dcn)


def _in_use(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
  return {axis: size for axis, size in pairs if size > 1}


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields every ordered product of `count` factors that gives `number`."""
  if count == 1:
    yield (number,)
    return
  for first in range(1, number + 1):
    if number % first == 0:
      for rest in _factorizations(number // first, count - 1):
        yield (first, *rest)
