"""Placement of mesh devices in the fast network."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from paxon.runner.plan import hardware

# Slices of these kinds close into rings if every dimension is a multiple of
# this, and not at all otherwise: their cubes of 4x4x4 are joined by switches.
_CUBE = 4
# Those of the others close along a dimension of this size.
_FULL = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """Positions of a mesh.

  Attributes:
    domains: For each position, which fast network it is in: the host of a GPU,
      the slice of a TPU.
    coordinates: For each position, of its chip in the slice; empty where a
      switch joins all devices.
    shape: Chips along each dimension of a slice.
    wraps: Which dimensions close into rings.
  """

  domains: tuple[int, ...]
  coordinates: tuple[tuple[int, ...], ...] = ()
  shape: tuple[int, ...] = ()
  wraps: tuple[bool, ...] = ()


def of(
  kind: hardware.Hardware, devices: Sequence[Any], domains: Sequence[int]
) -> Placement:
  """Returns the placement of devices.

  Args:
    kind: The hardware.
    devices: `jax.Device`s in the order of the mesh, whole slices or hosts.
    domains: What `topology.domains` returns.
  """
  if kind.platform is not hardware.Platform.TPU:
    return Placement(domains=tuple(domains))
  coordinates = tuple(tuple(device.coords) for device in devices)
  shape = tuple(max(along) + 1 for along in zip(*coordinates, strict=True))
  return Placement(
    domains=tuple(domains),
    coordinates=coordinates,
    shape=shape,
    wraps=wraps(kind, shape),
  )


def wraps(kind: hardware.Hardware, shape: Sequence[int]) -> tuple[bool, ...]:
  """Returns which dimensions of a slice close into rings.

  Args:
    kind: A kind of TPU.
    shape: Chips along each dimension.
  """
  if kind.links == 6:  # Three dimensions.
    is_torus = not any(size % _CUBE for size in shape)
    return (is_torus,) * len(shape)
  return tuple(size == _FULL for size in shape)
