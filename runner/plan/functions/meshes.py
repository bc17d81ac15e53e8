"""Meshes of arbitrary axes, for functions that are planned."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, Final, TypeAlias

import jax
from jax.experimental import mesh_utils
import numpy as np

from paxon.runner import user_error
from paxon.runner.plan import target as targets

_DCN: Final = "dcn."

Given: TypeAlias = (
  Mapping[str, int] | jax.sharding.Mesh | jax.sharding.AbstractMesh | None
)


@dataclasses.dataclass(frozen=True)
class MeshShape:
  """A mesh without devices.

  Attributes:
    names: Names of the axes.
    ici: Size of each axis within a slice or host.
    dcn: Size of each axis between slices or hosts.
    types: Type of each axis.
    order: Ids of the devices in the order of the mesh, if they are those of the
      target; None for JAX's order.
  """

  names: tuple[str, ...]
  ici: tuple[int, ...]
  dcn: tuple[int, ...]
  types: tuple[jax.sharding.AxisType, ...]
  order: tuple[int, ...] | None = None

  @property
  def sizes(self) -> tuple[int, ...]:
    """Size of each axis."""
    return tuple(i * d for i, d in zip(self.ici, self.dcn, strict=True))

  @property
  def between(self) -> list[str]:
    """Axes between slices or hosts."""
    return [n for n, d in zip(self.names, self.dcn, strict=True) if d > 1]

  def make_abstract(self) -> jax.sharding.AbstractMesh:
    """Returns the mesh for tracing."""
    return jax.sharding.AbstractMesh(
      self.sizes, self.names, axis_types=self.types
    )

  def make(self, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Returns the mesh of a target's devices.

    Args:
      devices: All devices of the target.
    """
    return jax.sharding.Mesh(
      self.make_array(devices), self.names, axis_types=self.types
    )

  def make_array(self, devices: Sequence[Any]) -> np.ndarray:
    """Returns devices, or objects with their attributes, in this shape."""
    if self.order is not None:
      by_id = {device.id: device for device in devices}
      array = np.array([by_id[i] for i in self.order], dtype=object)
      return array.reshape(self.sizes)
    if not self.between:
      return mesh_utils.create_device_mesh(self.sizes, devices)
    has_slices = len({getattr(d, "slice_index", 0) for d in devices}) > 1
    return mesh_utils.create_hybrid_device_mesh(
      self.ici, self.dcn, devices, process_is_granule=not has_slices
    )


def parse(given: Given, target: targets.Target) -> MeshShape:
  """Returns the shape of a mesh.

  Args:
    given: Sizes by axis, such as `{"fsdp": 64, "dcn.data": 2}`, of which one
      may be -1 to use all remaining devices, or a mesh of JAX; None for a
      target of one device.
    target: Its devices.

  Raises:
    UserError: The mesh has a different number of devices.
  """
  if given is None and target.num_devices > 1:
    raise user_error.UserError(
      f"mesh: {target} has {target.num_devices} devices; give the size of each"
      f" axis, such as mesh={{'data': {target.num_devices}}}, or arguments with"
      " NamedShardings."
    )
  given = given or {"devices": 1}
  if isinstance(given, Mapping):
    shape = _parse_sizes(given, target)
  else:
    sizes = tuple(given.axis_sizes)
    shape = MeshShape(
      names=tuple(given.axis_names),
      ici=sizes,
      dcn=(1,) * len(sizes),
      types=tuple(given.axis_types),
      order=_find_order(given, target),
    )
  if math.prod(shape.sizes) != target.num_devices:
    text = ", ".join(
      f"{n}={s}" for n, s in zip(shape.names, shape.sizes, strict=True)
    )
    raise user_error.UserError(
      f"mesh: {text} has {math.prod(shape.sizes)} devices, but {target} has"
      f" {target.num_devices}; give sizes for all of"
      f" them, such as mesh={{'data': {target.num_devices}}}."
    )
  return shape


def get_context(
  given: Given, target: targets.Target
) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
  """Returns the mesh in whose context a function is traced.

  Args:
    given: As `parse` takes it.
    target: Its devices.
  """
  if isinstance(given, jax.sharding.Mesh):
    return given
  return parse(given, target).make_abstract()


def _parse_sizes(given: Mapping[str, int], target: targets.Target) -> MeshShape:
  for axis, size in given.items():
    if not axis.removeprefix(_DCN):
      raise user_error.UserError(
        f"mesh: {axis!r} must be the name of an axis, such as 'data' or"
        " 'dcn.data'."
      )
    is_size = isinstance(size, int | np.integer)
    if not is_size or (size < 1 and size != -1):
      raise user_error.UserError(
        f"mesh: the size of {axis!r} must be a positive integer, or -1 for all"
        f" remaining devices, got {size!r}."
      )
  fills = [axis for axis, size in given.items() if size == -1]
  if len(fills) > 1:
    raise user_error.UserError(
      f"mesh: only one size may be -1, but {' and '.join(fills)} are."
    )
  known = math.prod(n for n in given.values() if n != -1)
  if fills and target.num_devices % known:
    raise user_error.UserError(
      f"mesh: {fills[0]}=-1 has no size, because the other sizes, {known}"
      f" devices together, do not divide the {target.num_devices} devices of"
      f" {target}."
    )
  rest = target.num_devices // known
  sizes = {a: rest if n == -1 else int(n) for a, n in given.items()}
  names = tuple(dict.fromkeys(a.removeprefix(_DCN) for a in sizes))
  return MeshShape(
    names=names,
    ici=tuple(sizes.get(name, 1) for name in names),
    dcn=tuple(sizes.get(_DCN + name, 1) for name in names),
    types=(jax.sharding.AxisType.Auto,) * len(names),
  )


def _find_order(
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, target: targets.Target
) -> tuple[int, ...] | None:
  """Returns the ids of a mesh's devices if they are the target's."""
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return None
  devices = list(mesh.devices.flat)
  platforms = {"cuda": "gpu"}
  name = target.hardware.platform.value
  if devices[0].platform not in (name, platforms.get(name)):
    return None
  return tuple(device.id for device in devices)
