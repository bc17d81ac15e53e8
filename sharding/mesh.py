"""Device meshes, given by axis name for the fast and for the slow network.

`MeshSpec(ici={"fsdp": 64}, dcn={"data": 2})` is two slices of 64 devices: the
axes in `ici` lie inside a slice (or a host with NVLink), those in `dcn` between
slices. The same as text: `fsdp=64,dcn.data=2`. One size may be -1 and takes
what is left. Axes that are not given have size one, so every mesh has the same
six axes and rules never depend on which of them are in use.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
import math

import jax
from jax.experimental import mesh_utils
import numpy as np

from paxon.sharding import axes

_DCN_PREFIX = "dcn."


@dataclasses.dataclass(frozen=True)
class MeshSpec:
  """Sizes of the mesh axes.

  Attributes:
    ici: Size of each axis inside a slice; -1 (once, over both) fills.
    dcn: Size of each axis across slices.
  """

  ici: Mapping[str, int] = dataclasses.field(default_factory=dict)
  dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    for field, sizes in (("ici", self.ici), ("dcn", self.dcn)):
      for axis, size in sizes.items():
        if axis not in axes.MESH_AXES:
          close = difflib.get_close_matches(axis, axes.MESH_AXES, n=1)
          hint = f"; did you mean {close[0]!r}?" if close else "."
          raise ValueError(
            f"MeshSpec.{field} has the unknown axis {axis!r}{hint} "
            f"Mesh axes are {', '.join(axes.MESH_AXES)}."
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
    """Reads `axis=size,...`; `dcn.axis=size` is across slices.

    Raises:
      ValueError: The text has another form; the message names the bad part.
    """
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
    """Returns the spec with every axis given and -1 replaced.

    Raises:
      ValueError: The sizes cannot cover exactly `num_devices`.
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
        f"{num_devices}; change a size, or let one axis be -1."
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
  """Lays devices out so that ICI axes stay inside a slice.

  Args:
    spec: The sizes.
    devices: All devices of the job; by default `jax.devices()`.

  Returns:
    A mesh with the axes `paxon.sharding.axes.MESH_AXES`, all of type Auto.

  Raises:
    ValueError: The sizes do not fit the number of devices or of slices.
  """
  devices = list(jax.devices() if devices is None else devices)
  full = spec.resolve(len(devices))
  ici = [full.ici[axis] for axis in axes.MESH_AXES]
  dcn = [full.dcn[axis] for axis in axes.MESH_AXES]
  if math.prod(dcn) > 1:
    array = _hybrid(ici, dcn, devices)
  else:
    array = mesh_utils.create_device_mesh(ici, devices)
  return jax.sharding.Mesh(
    array,
    axes.MESH_AXES,
    # Explicit is JAX's default and would change what einsum means.
    axis_types=(jax.sharding.AxisType.Auto,) * len(axes.MESH_AXES),
  )


def _hybrid(
  ici: list[int], dcn: list[int], devices: list[jax.Device]
) -> np.ndarray:
  """Devices grouped by slice or, where there are no slices, by process."""
  slices = {getattr(d, "slice_index", None) for d in devices}
  by_process = len(slices) == 1
  groups = (
    len({d.process_index for d in devices}) if by_process else len(slices)
  )
  if groups == 1:
    # One host stands in for several slices (fake devices in tests).
    blocks = np.asarray(devices, dtype=object).reshape(*dcn, *ici)
    rank = len(ici)
    order = [i + n * rank for i in range(rank) for n in range(2)]
    sizes = [d * i for d, i in zip(dcn, ici, strict=True)]
    return blocks.transpose(order).reshape(sizes)
  return mesh_utils.create_hybrid_device_mesh(
    ici, dcn, devices, process_is_granule=by_process
  )
