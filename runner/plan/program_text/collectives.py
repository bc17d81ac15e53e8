"""The communication of a compiled program, with loops multiplied out.

What counts as what (`payload` is per device and execution):

  all-gather           result              wire  payload * (g-1)/g
  reduce-scatter       operand             wire  payload * (g-1)/g
  all-reduce           operand             wire  payload * 2(g-1)/g
  all-to-all           operand             wire  payload * (g-1)/g
  collective-permute   operand             wire  payload
  send                 operand             wire  payload

in groups of g devices. Three things are not what they look like:

* On TPUs a reduce-scatter is a fusion that holds an all-reduce and roots in a
  slice of it; it is counted as a reduce-scatter.
* An asynchronous collective on TPUs stands in several fusions with one channel
  id, which may lie in inner loops of a layer; it is counted once per pass of
  the layer. On v7x a collective is an asynchronous call to another core.
* Traffic between TPU slices is no collective but a `send` with megascale
  attributes; its kind is what the attribute says, over the axes of `dcn`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re

import numpy as np

from paxon.runner.plan.program_text import (
  costs,
  hlo,
  kernels,
  matmuls,
  replica_groups,
  traffic,
  trip_counts,
  values,
)

_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective instruction.

  Attributes:
    kind: One of `traffic.COLLECTIVES`; what traffic between slices stands for.
    axes: Mesh axes along which its groups lie.
    whole_axes: Whether a group covers these axes.
    group_size: Devices in a group.
    count: Executions in one run of the program.
    payload_bytes: Of one execution, per device.
    dtype_bytes: `payload_bytes` by JAX's name of the elements' dtype.
    wire_bytes: Sent by one device, in one execution.
    members: Positions in the mesh of the first group.
    between_slices: Whether it is a transfer between TPU slices.
    is_asynchronous: Whether the compiler split it into a start and a done.
    gathers: For an all-reduce, whether it is a gather (padded shards).
    name: JAX's name stack.
    computation: Name of the computation that it stands in.
    instruction: Its own name.
  """

  kind: str
  axes: tuple[str, ...]
  whole_axes: bool
  group_size: int
  count: int
  payload_bytes: int
  dtype_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  wire_bytes: float
  members: tuple[int, ...]
  between_slices: bool = False
  is_asynchronous: bool = False
  gathers: bool = False
  name: str = ""
  computation: str = ""
  instruction: str = ""


@dataclasses.dataclass(frozen=True)
class Communication:
  """All collectives of a program.

  Attributes:
    collectives: In the order of the text.
    kernels: Executions of each kernel, by its name (see `kernels.name`).
    notes: Unknown facts, one sentence each.
  """

  collectives: tuple[Collective, ...]
  kernels: Mapping[str, int]
  notes: tuple[str, ...]


def find(
  program: hlo.Program, *, mesh: Mapping[str, int], dcn: Sequence[str] = ()
) -> Communication:
  """Finds all collectives of a program.

  Args:
    program: The compiled program of one device.
    mesh: Size of each mesh axis, in the order of the mesh.
    dcn: The mesh axes between slices.
  """
  finder = _Finder(program, mesh, tuple(dcn))
  finder.walk(program.entry, (), 1)
  return Communication(
    tuple(finder.found), finder.kernels, tuple(dict.fromkeys(finder.notes))
  )


# The calls and loop bodies around a computation: a number, and whether a loop.
_Scope = tuple[tuple[int, bool], ...]


@dataclasses.dataclass
class _Channel:
  """An asynchronous collective whose parts lie in several fusions.

  Attributes:
    index: Position among all that is found.
    scopes: Of each part.
    parts: Names of their computations and instructions.
  """

  index: int
  scopes: list[_Scope]
  parts: set[tuple[str, str]]


class _Finder:
  """Walks a program from its entry."""

  def __init__(
    self, program: hlo.Program, mesh: Mapping[str, int], dcn: tuple[str, ...]
  ) -> None:
    self._program = program
    self._values = values.Values(program)
    self._mesh = mesh
    self._dcn = dcn
    self._channels: dict[tuple[str, str], list[_Channel]] = {}
    self._num_scopes = 0
    self._started = {
      name
      for computation in program.computations.values()
      for instruction in computation.instructions.values()
      if instruction.opcode.endswith("-start")
      for name in instruction.runs
    }
    self._branches = costs.read(program).branches
    self.found: list[Collective] = []
    self.kernels: dict[str, int] = {}
    self.notes: list[str] = []

  def walk(
    self,
    computation: hlo.Computation,
    scope: _Scope,
    times: int,
    *,
    is_part: bool = False,
  ) -> None:
    """Finds the collectives of a computation that runs `times` times.

    Args:
      computation: An entry, the body of a loop or call, or that of a fusion.
      scope: Calls and loops around it.
      times: How often it runs.
      is_part: Whether it is that of a fusion, which may hold one part of an
        asynchronous collective.
    """
    for instruction in computation.instructions.values():
      opcode = instruction.opcode
      if opcode.removesuffix("-start") in traffic.COLLECTIVES:
        if not is_part or self._is_new(instruction, computation, scope, times):
          self.found.append(self._collective(instruction, computation, times))
      elif opcode == "send" and _MEGASCALE.search(instruction.attributes):
        self.found.append(self._between_slices(instruction, computation, times))
      elif opcode == "fusion" and self._is_scatter(instruction, computation):
        (inner,) = instruction.runs
        self._scatter(self._program.computations[inner], times)
      elif opcode == "while":
        self._loop(instruction, computation, scope, times)
      elif opcode == "conditional":
        branch = self._branches[computation.name, instruction.name]
        inner = self._program.computations[branch]
        self.walk(inner, self._new_scope(scope), times)
      else:
        self._add_kernel(instruction, times)
        self._call(instruction, scope, times)

  def _add_kernel(self, instruction: hlo.Instruction, times: int) -> None:
    name = kernels.name(instruction)
    if name is not None:
      self.kernels[name] = self.kernels.get(name, 0) + times

  def _call(
    self, instruction: hlo.Instruction, scope: _Scope, times: int
  ) -> None:
    # The parts of one asynchronous collective share what calls them.
    is_part = instruction.opcode in hlo.FUSIONS
    for name in instruction.runs:
      inner = self._program.computations[name]
      inner_scope = scope if is_part else self._new_scope(scope)
      self.walk(inner, inner_scope, times, is_part=is_part)

  def _new_scope(self, scope: _Scope, *, is_loop: bool = False) -> _Scope:
    self._num_scopes += 1
    return (*scope, (self._num_scopes, is_loop))

  def _loop(
    self,
    loop: hlo.Instruction,
    computation: hlo.Computation,
    scope: _Scope,
    times: int,
  ) -> None:
    trips = trip_counts.find_trip_count(loop, computation, self._program)
    (name,) = loop.get_called("body")
    body = self._program.computations[name]
    times *= 1 if trips is None else trips
    before = len(self.found)
    self.walk(body, self._new_scope(scope, is_loop=True), times)
    if trips is None and len(self.found) > before:
      self.notes.append(
        f"The trips of the loop {loop.name} are not known; its collectives are"
        " counted once."
      )

  def _is_new(
    self,
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    scope: _Scope,
    times: int,
  ) -> bool:
    """Whether no part of the same collective was met.

    Parts of a collective of a layer may lie in inner loops of that layer; it
    runs as often as the part that runs least.
    """
    channel = instruction.attribute("channel_id")
    if channel is None:
      return True
    met = self._channels.setdefault((instruction.opcode, channel), [])
    part = computation.name, instruction.name
    for one in met:
      # Called a second time, a computation communicates a second time.
      if part not in one.parts and any(
        _is_same_pass(scope, other) for other in one.scopes
      ):
        one.parts.add(part)
        one.scopes.append(scope)
        old = self.found[one.index]
        self.found[one.index] = dataclasses.replace(
          old, count=min(old.count, times)
        )
        return False
    met.append(_Channel(len(self.found), [scope], {part}))
    return True

  def _collective(
    self,
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    times: int,
    *,
    scatters: bool = False,
  ) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    is_start = instruction.opcode != kind
    if kind == "collective-permute":
      members, axes, whole = self._find_ring(instruction)
    else:
      groups = replica_groups.find_groups(
        instruction.attributes, num_devices=math.prod(self._mesh.values())
      )
      members = groups[0]
      axes, whole = replica_groups.mesh_axes(members, self._mesh)
    group = len(members)
    parts = group if kind == "reduce-scatter" else 1
    dtypes = _bytes_by_dtype(_result(instruction, kind), parts)
    payload = sum(dtypes.values())
    gathers = kind == "all-reduce" and self._is_padded(instruction, computation)
    if scatters:
      kind = "reduce-scatter"
    return Collective(
      kind=kind,
      axes=axes,
      whole_axes=whole,
      group_size=group,
      count=times,
      payload_bytes=payload,
      dtype_bytes=dtypes,
      wire_bytes=payload * _wire_factor(kind, group),
      members=tuple(int(member) for member in members),
      is_asynchronous=is_start
      or computation.name in self._started
      or _is_split(instruction, computation),
      gathers=gathers and not scatters,
      name=instruction.op_name,
      computation=computation.name,
      instruction=instruction.name,
    )

  def _find_ring(
    self, instruction: hlo.Instruction
  ) -> tuple[np.ndarray, tuple[str, ...], bool]:
    """The ring that the first source of a permutation is in."""
    text = instruction.attribute("source_target_pairs") or ""
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]
    following = dict(pairs)
    # Some devices may keep what they have.
    moving = (a for a, b in pairs if a != b)
    ring = [next(moving, pairs[0][0])]
    while following.get(ring[-1], ring[0]) not in ring:
      ring.append(following[ring[-1]])
    members = np.array(ring)
    return members, *replica_groups.mesh_axes(members, self._mesh)

  def _between_slices(
    self,
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    times: int,
  ) -> Collective:
    match = _MEGASCALE.search(instruction.attributes)
    assert match is not None
    dtypes = _bytes_by_dtype(instruction.type.elements[0])
    payload = sum(dtypes.values())
    return Collective(
      kind=match[1].lower().replace("_", "-"),
      axes=self._dcn,
      whole_axes=True,
      group_size=math.prod(self._mesh[axis] for axis in self._dcn),
      count=times,
      payload_bytes=payload,
      dtype_bytes=dtypes,
      wire_bytes=float(payload),
      members=(),
      between_slices=True,
      is_asynchronous=True,
      name=instruction.op_name,
      computation=computation.name,
      instruction=instruction.name,
    )

  def _is_scatter(
    self, fusion: hlo.Instruction, computation: hlo.Computation
  ) -> bool:
    """Whether all results are slices of the values reduced inside."""
    results = self._values.find(computation.name, fusion.name)
    return all(self._is_slice(v, fusion.runs[0]) for v in results)

  def _is_slice(self, value: values.Value, inner: str) -> bool:
    origin = self._values.origin(value)
    instruction = self._values.at(origin)
    if origin[0] != inner or instruction.opcode != "dynamic-slice":
      return False
    source = self._values.origin((inner, instruction.operands[0], -1))
    return source[0] == inner and self._values.at(source).opcode == "all-reduce"

  def _scatter(self, computation: hlo.Computation, times: int) -> None:
    self.found += [
      self._collective(instruction, computation, times, scatters=True)
      for instruction in computation.instructions.values()
      if instruction.opcode == "all-reduce"
    ]

  def _is_padded(
    self, instruction: hlo.Instruction, computation: hlo.Computation
  ) -> bool:
    """Whether what is reduced is one part in a frame of zeros."""
    operand = instruction.operands[0]
    if operand not in computation.instructions:
      return False
    origin = self._values.origin((computation.name, operand, -1))
    return self._values.at(origin).opcode == "dynamic-update-slice"


def _is_same_pass(left: _Scope, right: _Scope) -> bool:
  """Whether one scope holds the other, or both are in one trip of a loop."""
  shared = 0
  for one, other in zip(left, right, strict=False):
    if one != other:
      break
    shared += 1
  is_in_loop = any(is_loop for _, is_loop in left[:shared])
  return shared == min(len(left), len(right)) or is_in_loop


def _is_split(
  instruction: hlo.Instruction, computation: hlo.Computation
) -> bool:
  """Whether a TPU's collective without a start and a done has both."""
  return "async_collective_name" in instruction.attributes or any(
    other.opcode == "custom-call"
    and kernels.target(other) == "AsyncCollectiveStart"
    for other in computation.instructions.values()
  )


def _result(instruction: hlo.Instruction, kind: str) -> hlo.Type:
  """The type of the result: a start also lists its operands, and more."""
  found = instruction.type
  is_start = instruction.opcode.endswith("-start")
  # `all-reduce-start` alone has the type of its result.
  if is_start and kind != "all-reduce" and len(found.elements) > 1:
    return found.elements[1]
  return found


def _bytes_by_dtype(found: hlo.Type, parts: int = 1) -> dict[str, int]:
  """Bytes of the arrays of a type, times `parts`."""
  if not found.elements:
    return {matmuls.dtype_name(found.dtype): parts * found.num_bytes}
  sums: dict[str, int] = {}
  for element in found.elements:
    for dtype, size in _bytes_by_dtype(element, parts).items():
      sums[dtype] = sums.get(dtype, 0) + size
  return sums


def _wire_factor(kind: str, group: int) -> float:
  if kind == "collective-permute":
    return 1.0
  part = (group - 1) / group
  return 2 * part if kind == "all-reduce" else part
