"""Links between devices: where a mesh is, and how fast its groups communicate.

The one definition for the roofline, the simulation and the ordering of meshes:

  seconds of a collective = bytes that one device sends / bandwidth(group)

The bytes are those of a ring over all g members of a group: (g-1)/g of the
payload for a gather, a scatter or an all-to-all, twice that for an all-reduce.
NCCL and XLA for TPUs move large arrays so. A hierarchical algorithm sends less
between hosts: (h-1)/h of the payload for h hosts, which is half for two hosts
and 11 % less for eight hosts of eight. All-reduces in the switch (NVLS, SHARP)
send up to half. Neither is modelled.

The bandwidth of a group, per member and in one direction:

* GPUs in one NVLink domain: NVLink; PCIe for cards without it. A domain is a
  host, or a rack of 18 hosts for GB200 and GB300 NVL72.
* GPUs in several domains: min(NVLink, k adapters), with k members in each.
  NCCL builds one ring for each adapter, so k members share k adapters. On
  h200:8x8 a group of 64 has min(450, 8 x 50) = 400 GB/s, and one of the eight
  groups with one member on each host has 50 GB/s. On gb200:36x4, two racks, a
  group of 144 has min(900, 72 x 50) = 900 GB/s.
  https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
* TPU chips in one slice: two links for each dimension that the group closes a
  ring along, one for each dimension that it is a line along. A group of every
  n-th chip shares these links with n - 1 others. This is the least time
  possible: each shard crosses (g-1) n links, and all links are in use.
  https://jax-ml.github.io/scaling-book/tpus
* TPU chips in several slices: min(the above, k DCN shares), with k members in
  each slice. The share of a chip is that of its host, divided by its chips.

A permutation uses one link, and occupies it on each chip that it passes, so h
hops take h times as long.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from paxon.runner.plan import hardware
from paxon.runner.plan import target as targets
from paxon.runner.plan.program_text import collectives
from paxon.sharding import mesh as meshes

# Slices of chips with six links are tori if all dimensions are multiples of
# this, and meshes of lines otherwise: optical switches join cubes of 4x4x4.
_CUBE = 4
# Slices of chips with four links close a ring along a dimension of this size.
_FULL = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
  """Bandwidths of one device, in bytes per second and direction.

  Attributes:
    fast: Of all links of the fast network (NVLink, ICI) together.
    count: Number of these links; 1 for a switch.
    network: Of the network between hosts or slices; `None` if not known.
  """

  fast: float
  count: int
  network: float | None


def links(kind: hardware.Hardware) -> Links | None:
  """Returns the datasheet bandwidths of a device, or None if not known."""
  if kind.link_bandwidth is None:
    return None
  return Links(
    fast=kind.link_bandwidth, count=kind.links, network=kind.network_bandwidth
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """Locations of the devices of a mesh, in the order of the mesh.

  Attributes:
    domains: Fast network of each device: the host or the NVLink rack of a GPU,
      the slice of a TPU.
    coordinates: Chip of each device in its slice; empty for GPUs.
    shape: Chips along each dimension of a slice.
    wraps: Which dimensions close into rings.
  """

  domains: tuple[int, ...]
  coordinates: tuple[tuple[int, ...], ...] = ()
  shape: tuple[int, ...] = ()
  wraps: tuple[bool, ...] = ()


def place(target: targets.Target, devices: Sequence[Any]) -> Placement:
  """Returns the placement of devices.

  Args:
    target: The target whose devices these are.
    devices: All `jax.Device`s in the order of the mesh.
  """
  kind = target.hardware
  if kind.platform is not hardware.Platform.TPU:
    # Ranks of the ids, because ids of a real job may have gaps.
    order = sorted(device.id for device in devices)
    rank = {number: i for i, number in enumerate(order)}
    # The hosts are spread evenly over as few racks as hold them.
    hosts = len(devices) // target.devices_per_host
    racks = math.ceil(hosts / kind.hosts_per_domain)
    size = math.ceil(hosts / racks) * target.devices_per_host
    return Placement(domains=tuple(rank[d.id] // size for d in devices))
  coordinates = tuple(tuple(device.coords) for device in devices)
  shape = tuple(max(along) + 1 for along in zip(*coordinates, strict=True))
  return Placement(
    domains=tuple(meshes.find_slice(d) or 0 for d in devices),
    coordinates=coordinates,
    shape=shape,
    wraps=wraps(kind, shape),
  )


def place_mesh(target: targets.Target, spec: meshes.MeshSpec) -> Placement:
  """Returns the placement of a mesh, without a compiler or devices.

  Args:
    target: Devices of the mesh.
    spec: The mesh.

  Raises:
    ValueError: The mesh does not fit the target.
  """
  devices = meshes.device_array(spec, _stand_ins(target))
  return place(target, list(devices.flat))


def find_problem(target: targets.Target, spec: meshes.MeshSpec) -> str | None:
  """Returns why a mesh cannot be laid out on a TPU slice, or None.

  JAX gives each mesh axis whole sides of the slice.

  Args:
    target: Devices of the mesh.
    spec: The mesh, which has as many devices.
  """
  if target.hardware.platform is not hardware.Platform.TPU:
    return None
  try:
    place_mesh(target, spec)
  except NotImplementedError:
    sides = _list_sides(target)
    sizes = {
      math.prod(chosen)
      for number in range(1, len(sides) + 1)
      for chosen in itertools.combinations(sides, number)
    }
    text = (
      f"a slice of {'x'.join(map(str, target.shape))} chips cannot hold this"
      " mesh, because each axis takes whole sides of the slice: sizes within a"
      f" slice are {', '.join(map(str, sorted(sizes)))}"
    )
    closest = _find_closest(target, spec.resolve(target.num_devices))
    return text if closest is None else f"{text}; try mesh={closest}"
  return None


def _list_sides(target: targets.Target) -> list[int]:
  """Returns the sides of a slice, in devices."""
  per_chip = target.hardware.devices_per_chip
  return [n for n in (*target.shape, per_chip) if n > 1]


def _find_closest(
  target: targets.Target, full: meshes.MeshSpec
) -> meshes.MeshSpec | None:
  """Returns the most similar mesh with the same axes that the slice holds."""
  used = [axis for axis, size in full.ici.items() if size > 1]
  found: dict[float, meshes.MeshSpec] = {}
  sides = _list_sides(target)
  for chosen in itertools.product(used, repeat=len(sides)):
    ici = dict.fromkeys(used, 1)
    for axis, side in zip(chosen, sides, strict=True):
      ici[axis] *= side
    distance = sum(
      abs(math.log2(size / full.ici[axis])) for axis, size in ici.items()
    )
    candidate = meshes.MeshSpec(
      ici={axis: size for axis, size in ici.items() if size > 1},
      dcn={axis: size for axis, size in full.dcn.items() if size > 1},
    )
    try:
      place_mesh(target, candidate)
    except (ValueError, NotImplementedError):
      continue
    found.setdefault(distance, candidate)
  return found[min(found)] if found else None


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


def group(mesh: Mapping[str, int], axes: Sequence[str]) -> tuple[int, ...]:
  """Returns the positions of the first group along some mesh axes.

  Args:
    mesh: Size of each axis, in the order of the mesh.
    axes: Axes along which the group lies.
  """
  positions = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
  chosen = tuple(slice(None) if axis in axes else 0 for axis in mesh)
  return tuple(int(position) for position in np.ravel(positions[chosen]))


def bandwidth(
  members: Sequence[int], placement: Placement, device: Links
) -> float | None:
  """Returns the bytes/s that each member of a group can send to the others.

  Args:
    members: Positions in the mesh.
    placement: Of the mesh.
    device: Bandwidths of a device.

  Returns:
    The bandwidth, or None if the group needs a network of unknown speed.
  """
  domains = [placement.domains[member] for member in members]
  inside = device.fast
  if placement.coordinates:
    inside = _slice_bandwidth(members, placement, device)
  if len(set(domains)) < 2:
    return inside
  if device.network is None:
    return None
  fewest = min(domains.count(domain) for domain in set(domains))
  return min(inside, fewest * device.network)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """The time of one collective.

  Attributes:
    seconds: From the first byte to the last; None if a rate is not known.
    axes: Mesh axes, separated by commas.
    queue: Name of the links it uses. Transfers of one queue run one after the
      other, transfers of different queues at the same time.
    is_network: Whether it leaves a host or slice.
  """

  seconds: float | None
  axes: str
  queue: str
  is_network: bool


def transfer(
  collective: collectives.Collective,
  placement: Placement,
  device: Links | None,
) -> Transfer:
  """Returns the time of one execution of a collective.

  Args:
    collective: The collective.
    placement: Of the mesh.
    device: Bandwidths of a device; None if not known.
  """
  members = collective.members
  domains = {placement.domains[member] for member in members}
  is_network = collective.between_slices or len(domains) > 1
  is_permute = collective.kind == "collective-permute"
  axes = ",".join(collective.axes) or "-"
  queue, hops = axes, 1
  if not placement.coordinates:
    queue = "link"
  elif is_network:
    queue = "network"
  elif is_permute:
    hops, direction = _hops(members, placement)
    queue = f"{axes} {direction}"
  rate: float | None = None
  if device is not None:
    if is_network and (is_permute or not members):
      rate = device.network
    elif is_permute and placement.coordinates and hops:
      rate = device.fast / device.count / hops
    else:
      rate = bandwidth(members, placement, device)
  return Transfer(
    seconds=None if rate is None else collective.wire_bytes / rate,
    axes=axes,
    queue=queue,
    is_network=is_network,
  )


def _slice_bandwidth(
  members: Sequence[int], placement: Placement, device: Links
) -> float:
  num_links = 0.0
  for dimension, size in enumerate(placement.shape):
    at = sorted({placement.coordinates[m][dimension] for m in members})
    if len(at) < 2:
      continue
    stride = min(b - a for a, b in itertools.pairwise(at))
    is_ring = placement.wraps[dimension] and stride * len(at) == size
    num_links += (2 if is_ring else 1) / stride
  # The two devices of a v7x chip are taken to be as fast as all of its links.
  return device.fast * (num_links / device.count if num_links else 1.0)


def _hops(members: Sequence[int], placement: Placement) -> tuple[int, str]:
  """The longest path of a permutation, and its direction on a ring."""
  hops, direction = 0, ""
  # The path from the last member back to the first uses the other direction.
  for source, to in itertools.pairwise(members):
    steps = _steps(source, to, placement)
    distance = sum(map(abs, steps))
    if distance > hops:
      hops, direction = distance, "-" if sum(steps) < 0 else "+"
  return hops, direction or "chip"


def _steps(source: int, to: int, placement: Placement) -> list[int]:
  """The shortest path between two chips, along each dimension."""
  steps = []
  for size, wraps_around, a, b in zip(
    placement.shape,
    placement.wraps,
    placement.coordinates[source],
    placement.coordinates[to],
    strict=True,
  ):
    step = b - a
    if wraps_around and abs(step) > size - abs(step):
      step -= size if step > 0 else -size
    steps.append(step)
  return steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StandIn:
  """The attributes of a device that the order of a mesh depends on."""

  id: int
  process_index: int
  platform: str
  device_kind: str
  slice_index: int | None = None
  coords: tuple[int, ...] = ()
  core_on_chip: int = 0


def _stand_ins(target: targets.Target) -> list[_StandIn]:
  kind = target.hardware
  per_host = target.devices_per_host
  gpus = (hardware.Platform.CUDA, hardware.Platform.ROCM)
  platform = "gpu" if kind.platform in gpus else kind.platform.value
  cells: list[tuple[int | None, tuple[int, ...], int]] = [
    (None, (), 0) for _ in range(target.num_devices)
  ]
  if kind.platform is hardware.Platform.TPU:
    shape = (*target.shape, 1)[:3]
    cells = [
      (index, tuple(reversed(cell)), core)
      for index in range(target.slices)
      for cell in itertools.product(*map(range, reversed(shape)))
      for core in range(kind.devices_per_chip)
    ]
  return [
    _StandIn(
      id=number,
      process_index=number // per_host,
      platform=platform,
      device_kind=next(iter(kind.device_kinds), kind.name),
      slice_index=index,
      coords=coords,
      core_on_chip=core,
    )
    for number, (index, coords, core) in enumerate(cells)
  ]
