"""Replica groups of collectives, in all HLO notations.

  {{0,1},{2,3}}                       listed; `{}` is everyone
  [2,4]<=[4,2]T(1,0)                  a transposed and reshaped iota
  mesh['a'=4,'b'=2] {'a'}             along named axes, with `device_ids=(...)`
                                      and parts of axes, `'a':(2)2`

The names in the last form are anonymous and belong to one sharding; which axes
of *our* mesh they are is seen from the members (`mesh_axes`).
"""

from collections.abc import Mapping
import itertools
import math
import re

import numpy as np

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
  r"^mesh\[(?P<axes>[^\]]*)\]"
  r"(?:, ?device_ids=\((?P<ids>\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
  r" ?\{(?P<names>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_NAME = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def find_groups(attributes: str, *, num_devices: int) -> np.ndarray:
  """Returns the groups of a collective.

  Args:
    attributes: The instruction's attributes.
    num_devices: Number of devices of the program.

  Returns:
    Positions in the mesh's flat list of devices, int [groups, members].

  Raises:
    ValueError: The spelling is not known.
  """
  match = re.search(r"(?:^|, )replica_groups=", attributes)
  text = attributes[match.end() :] if match else "{}"
  if mesh := _MESH.match(text):
    return _expand_mesh(mesh)
  if text.startswith("["):
    word = re.match(r"\S+?(?=, |$)", text)
    iota = _IOTA.match(word[0]) if word else None
    if iota:
      shape, dims, order = (_ints(part) for part in iota.groups())
      return _iota(dims, order).reshape(shape)
  elif text.startswith("{}"):
    return np.arange(num_devices)[None]
  elif text.startswith("{{"):
    rows = re.findall(r"\{([\d,]*)\}", text[1 : text.index("}}") + 1])
    return np.array([_ints(row) for row in rows])
  raise ValueError(f"Not known as replica groups: {text[:100]!r}.")


def mesh_axes(
  members: np.ndarray, mesh: Mapping[str, int]
) -> tuple[tuple[str, ...], bool]:
  """Returns the mesh axes along which a group lies.

  Args:
    members: Positions in the mesh's flat list of devices, int [members].
    mesh: Size of each mesh axis, in the order of the mesh.

  Returns:
    The axes, and whether the group covers them (a part of an axis does not).
  """
  coordinates = np.unravel_index(members, tuple(mesh.values()))
  axes = tuple(
    name
    for name, along in zip(mesh, coordinates, strict=True)
    if len(set(along.tolist())) > 1
  )
  return axes, math.prod(mesh[axis] for axis in axes) == len(members)


def _expand_mesh(match: re.Match[str]) -> np.ndarray:
  sizes = {name: int(size) for name, size in _AXIS.findall(match["axes"])}
  ids = match["ids"] or ""
  if ids.startswith("["):
    dims, _, order = ids.partition("]")
    devices = _iota(_ints(dims[1:]), _ints(order[2:-1]))
  elif ids:
    devices = np.array(_ints(ids))
  else:
    devices = np.arange(math.prod(sizes.values()))
  named = _NAME.findall(match["names"])
  # Each dimension is cut where a named part of it begins or ends.
  cuts = {name: {1, size} for name, size in sizes.items()}
  for name, before, size in named:
    if before:
      cuts[name] |= {int(before), int(before) * int(size)}
  pieces = [
    (name, begin, end // begin)
    for name in sizes
    for begin, end in itertools.pairwise(sorted(cuts[name]))
  ]
  wanted = []
  for name, before, size in named:
    begin = int(before) if before else 1
    end = begin * int(size) if before else sizes[name]
    wanted += [
      i
      for i, (axis, start, _) in enumerate(pieces)
      if axis == name and begin <= start < end
    ]
  rest = [i for i in range(len(pieces)) if i not in wanted]
  members = math.prod(pieces[i][2] for i in wanted)
  cube = devices.reshape([size for _, _, size in pieces])
  return cube.transpose(rest + wanted).reshape(-1, members)


def _iota(dims: list[int], order: list[int]) -> np.ndarray:
  values = np.arange(math.prod(dims)).reshape(dims)
  return (values.transpose(order) if order else values).reshape(-1)


def _ints(text: str | None) -> list[int]:
  return [int(n) for n in (text or "").split(",") if n]
