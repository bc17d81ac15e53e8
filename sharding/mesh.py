"""Device meshes with named axes over the fast and the slow network.

`MeshSpec(ici={"fsdp": 64}, dcn={"data": 2})`, or `fsdp=64,dcn.data=2` as text,
is two slices of 64 devices: axes in `ici` are within a slice (or a host with
NVLink), axes in `dcn` between slices. One size may be -1 to use all remaining
devices. Missing axes have size one: every mesh has the same six axes, and rules
do not depend on the axes in use.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any, Final

import jax
from jax.experimental import mesh_utils
import numpy as np

from paxon.sharding import axes, suggestions

# Text of a mesh that is chosen for the available devices.
AUTO: Final = "auto"

_DCN_PREFIX = "dcn."


class PlacementError(ValueError, NotImplementedError):
  """A mesh that a slice cannot hold; JAX raises a NotImplementedError."""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
  """Sizes of the mesh axes.

  Attributes:
    ici: Size of each axis within a slice. One size of `ici` and `dcn` may be
      -1 to use all remaining devices.
    dcn: Size of each axis between slices.
  """

  ici: Mapping[str, int] = dataclasses.field(default_factory=dict)
  dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    for field, sizes in (("ici", self.ici), ("dcn", self.dcn)):
      for axis, size in sizes.items():
        if axis not in axes.MESH_AXES:
          close = suggestions.suggest(axis, axes.MESH_AXES)
          raise ValueError(
            f"MeshSpec.{field} has the unknown axis {axis!r}{close}"
          )
        if size != -1 and size < 1:
          raise ValueError(
            f"MeshSpec.{field}[{axis!r}] must be positive, or -1 to fill, "
            f"got {size}."
          )
    fills = [s for s in (*self.ici.values(), *self.dcn.values()) if s == -1]
    if len(fills) > 1:
      raise ValueError(f"At most one mesh axis may be -1, got {self}.")

  @classmethod
  def parse(cls, text: str) -> "MeshSpec":
    """Parses `axis=size,...`, with `dcn.axis=size` for axes between slices.

    Raises:
      ValueError: The text is malformed.
    """
    if text.strip() == AUTO:
      raise ValueError(
        f"mesh {text!r} is no mesh yet: the command line chooses one for the"
        " devices that there are; give one, such as 'fsdp=-1'."
      )
    ici: dict[str, int] = {}
    dcn: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
      name, equals, size = (p.strip() for p in part.partition("="))
      if not equals or not size.lstrip("-").isdigit():
        raise ValueError(
          f"mesh {text!r}: {part!r} is not axis=size; write for example "
          "'fsdp=4,tensor=2' or 'fsdp=64,dcn.data=2'."
        )
      sizes = dcn if name.startswith(_DCN_PREFIX) else ici
      axis = name.removeprefix(_DCN_PREFIX)
      if axis in sizes:
        raise ValueError(f"mesh {text!r} gives {name!r} twice.")
      sizes[axis] = int(size)
    return cls(ici=ici, dcn=dcn)

  def __str__(self) -> str:
    parts = [f"{a}={self.ici[a]}" for a in axes.MESH_AXES if a in self.ici]
    parts += [
      f"{_DCN_PREFIX}{a}={self.dcn[a]}" for a in axes.MESH_AXES if a in self.dcn
    ]
    return ",".join(parts)

  def resolve(self, num_devices: int) -> "MeshSpec":
    """Returns the spec with all axes and with -1 replaced.

    Raises:
      ValueError: The product of the sizes cannot be `num_devices`.
    """
    sizes = {
      (net, axis): int(given.get(axis, 1))
      for net, given in (("ici", self.ici), ("dcn", self.dcn))
      for axis in axes.MESH_AXES
    }
    known = math.prod(size for size in sizes.values() if size != -1)
    filled = -1 in sizes.values()
    if num_devices % known or (not filled and known != num_devices):
      needs = f"a multiple of {known}" if filled else f"exactly {known}"
      raise ValueError(
        f"The mesh '{self}' needs {needs} devices, but there are "
        f"{num_devices}; change a size, or set one axis to -1."
      )
    sizes = {
      k: num_devices // known if s == -1 else s for k, s in sizes.items()
    }
    return MeshSpec(
      ici={axis: sizes["ici", axis] for axis in axes.MESH_AXES},
      dcn={axis: sizes["dcn", axis] for axis in axes.MESH_AXES},
    )


def make_mesh(
  spec: MeshSpec, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Returns a mesh with the axes `MESH_AXES` and ICI axes within a slice.

  `devices` are all devices of the job; by default `jax.devices()`.

  Raises:
    ValueError: The sizes do not match the number of devices, slices or
      processes.
  """
  array = device_array(spec, jax.devices() if devices is None else devices)
  return jax.sharding.Mesh(
    array,
    axes.MESH_AXES,
    # JAX's default, Explicit, would change the semantics of einsum.
    axis_types=(jax.sharding.AxisType.Auto,) * len(axes.MESH_AXES),
  )


def reshape(mesh: jax.sharding.Mesh, spec: MeshSpec) -> jax.sharding.Mesh:
  """Returns a mesh of the same devices in the same order, with other axes.

  The equal order lets one program move arrays between both meshes. All axes of
  `spec` are within a slice.

  Raises:
    ValueError: The sizes do not match the number of devices, or `spec.dcn` has
      a size above one.
  """
  full = spec.resolve(mesh.size)
  if math.prod(full.dcn.values()) > 1:
    raise ValueError(
      f"The mesh '{spec}' has {_between(full)}, but a second mesh of the same"
      " devices has no such axes; write the size without 'dcn.'."
    )
  sizes = [full.ici[axis] for axis in axes.MESH_AXES]
  return jax.sharding.Mesh(
    mesh.devices.reshape(sizes), axes.MESH_AXES, axis_types=mesh.axis_types
  )


def find_slice(device: Any) -> int | None:
  """Returns the slice of a device; None if its platform has no slices."""
  return getattr(device, "slice_index", None)


def device_array(spec: MeshSpec, devices: Sequence[Any]) -> np.ndarray:
  """Returns devices in the shape of a mesh, one dimension per axis.

  The groups of `dcn` are slices if devices have a `slice_index` (TPUs, and GPUs
  by host), else processes. A group may have several processes but not several
  slices. `devices` are all of the job, or objects with the same attributes.

  Raises:
    ValueError: As for `make_mesh`.
  """
  devices = list(devices)
  full = spec.resolve(len(devices))
  ici = [full.ici[axis] for axis in axes.MESH_AXES]
  dcn = [full.dcn[axis] for axis in axes.MESH_AXES]
  slices = {find_slice(device) for device in devices}
  if math.prod(dcn) == 1:
    if len(slices) > 1 and devices[0].platform == "tpu":
      raise ValueError(
        f"The mesh '{spec}' has no axis between slices, but the"
        f" {len(devices)} devices are in {len(slices)} slices; add one, such"
        f" as dcn.data={len(slices)}, and divide the others."
      )
    return _place(spec, devices, mesh_utils.create_device_mesh, ici, devices)
  if len(slices) == 1:
    return _group_by_process(spec, ici, dcn, devices)
  if len(slices) != math.prod(dcn):
    raise ValueError(
      f"The mesh '{spec}' has {_between(full)} between slices, which makes"
      f" {math.prod(dcn)}, but the {len(devices)} devices are in"
      f" {len(slices)} slices."
    )
  return _place(
    spec, devices, mesh_utils.create_hybrid_device_mesh, ici, dcn, devices
  )


def _place(
  spec: MeshSpec,
  devices: Sequence[Any],
  create: Callable[..., np.ndarray],
  *args: Any,
) -> np.ndarray:
  """Returns `create(*args)`, which lays mesh axes along the sides of a slice.

  Raises:
    PlacementError: A size is no product of sides.
  """
  try:
    return create(*args)
  except NotImplementedError as error:
    first = find_slice(devices[0])
    coordinates = [d.coords for d in devices if find_slice(d) == first]
    sides = [len(set(side)) for side in zip(*coordinates, strict=True)]
    subsets = itertools.product((False, True), repeat=len(sides))
    sizes = {math.prod(itertools.compress(sides, used)) for used in subsets}
    raise PlacementError(
      f"The mesh '{spec}' cannot be placed on a slice of"
      f" {'x'.join(map(str, sides))} chips: each mesh axis lies along whole"
      " sides of the slice, so its size must be one of"
      f" {', '.join(map(str, sorted(sizes)))}, and no side is used twice."
    ) from error


def _group_by_process(
  spec: MeshSpec, ici: list[int], dcn: list[int], devices: list[Any]
) -> np.ndarray:
  """Returns devices grouped by process, in the order of processes."""
  counts = collections.Counter(device.process_index for device in devices)
  groups = math.prod(dcn)
  if len(counts) == groups and len(set(counts.values())) == 1:
    return mesh_utils.create_hybrid_device_mesh(
      ici, dcn, devices, process_is_granule=True
    )
  if len(counts) > 1 and (
    len(counts) % groups or len(set(counts.values())) > 1
  ):
    raise ValueError(
      f"The mesh '{spec}' has {_between(spec)} between groups of processes,"
      f" which makes {groups}, but the {len(devices)} devices belong to"
      f" {len(counts)} processes, with"
      f" {' or '.join(map(str, sorted(set(counts.values()))))} each; their"
      " number must be a multiple of the groups."
    )
  # Groups of several processes, or fake devices of one process in tests.
  devices = sorted(devices, key=lambda d: (d.process_index, d.id))
  blocks = np.asarray(devices, dtype=object).reshape(*dcn, *ici)
  rank = len(ici)
  order = [i + n * rank for i in range(rank) for n in range(2)]
  sizes = [d * i for d, i in zip(dcn, ici, strict=True)]
  return blocks.transpose(order).reshape(sizes)


def _between(spec: MeshSpec) -> str:
  return ", ".join(f"dcn.{a}={n}" for a, n in spec.dcn.items() if n > 1)
