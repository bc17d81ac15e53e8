"""Bytes that an instruction moves to and from the device's main memory.

An instruction reads its operands and writes its result; what is inside a fusion
stays in registers. Three things are smaller than their types say:

* Of an array that is sliced or gathered, what comes out is read, also where
  this happens inside a fusion: a loop's body takes its layer from an array of
  all layers.
* What is updated in place is written at the size of the update.
* Memory spaces other than 0 are on the chip, or the host's (5): no traffic.

Padding of layouts is not counted, nor what caches keep.
"""

from collections.abc import Mapping
import math
import re

from paxon.runner.plan.program_text import hlo, kernels

# No code runs for these, or that of the computations they call.
_FREE = frozenset(
  (
    "add-dependency",
    "after-all",
    "bitcast",
    "call",
    "call-start",
    "conditional",
    "constant",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
  )
)
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "reduce-scatter",
)
_SLICES = ("slice", "dynamic-slice", "gather")
_PASSED_ON = ("bitcast", "reshape")


def host_bytes(type_: hlo.Type) -> int:
  """Returns the bytes that an asynchronous copy moves to or from the host.

  Args:
    type_: Of the instruction that starts it. It has the array in the memory of
      the device, and the one on the host or a larger one that it is a part of.

  Returns:
    Bytes of the array on the device; 0 if no array is on the host.
  """
  leaves = type_.leaves
  if all(leaf.memory_space != hlo.HOST_SPACE for leaf in leaves):
    return 0
  # Without the indices of a slice and the context of the copy.
  return max(
    (
      leaf.num_bytes
      for leaf in leaves
      if leaf.memory_space != hlo.HOST_SPACE and leaf.shape
    ),
    default=0,
  )


def is_free(instruction: hlo.Instruction) -> bool:
  """Returns whether an instruction moves nothing and computes nothing."""
  opcode = instruction.opcode
  if opcode == "custom-call":
    return kernels.is_free(instruction)
  return opcode in _FREE or opcode.endswith(("-done", "-update"))


def num_bytes(
  instruction: hlo.Instruction,
  computation: hlo.Computation,
  program: hlo.Program,
) -> int:
  """Returns bytes read and written by one execution.

  Args:
    instruction: Any; the bodies of loops and calls are not part of it.
    computation: The one that it is in.
    program: The program.
  """
  if is_free(instruction):
    return 0
  opcode = instruction.opcode
  if opcode in hlo.FUSIONS:
    (inner,) = instruction.get_called("calls")
    return _Fusion(program, program.computations[inner], instruction).total()
  operands = [
    computation.instructions[name].type
    for name in instruction.operands
    if name in computation.instructions
  ]
  if opcode.removesuffix("-start") in _SLICES:
    return _count_slice(instruction, operands)
  if opcode == "dynamic-update-slice":
    return _count_bytes(operands[1]) + _at(instruction.type, operands[1])
  if opcode == "scatter":
    updates = operands[-(len(operands) - 1) // 2 :]
    moved = sum(_count_bytes(update) for update in updates)
    return _count_bytes(operands[len(operands) // 2]) + 3 * moved
  if opcode == "copy-start":
    to, origin = instruction.type.elements[:2]
    return _count_bytes(origin) + _count_bytes(to)
  if opcode == "recv":
    return _count_bytes(instruction.type.elements[0])
  if opcode == "send":
    return _count_bytes(operands[0])
  written = _count_bytes(_result(instruction))
  if opcode == "custom-call":
    written = max(written - kernels.workspace(instruction), 0)
  return written + sum(map(_count_bytes, operands))


def _count_bytes(type_: hlo.Type) -> int:
  """Bytes in main memory."""
  return sum(leaf.num_bytes for leaf in type_.leaves if not leaf.memory_space)


def _at(place: hlo.Type, part: hlo.Type) -> int:
  """Bytes of a part of the value at a place."""
  return 0 if place.memory_space else part.num_bytes


def _result(instruction: hlo.Instruction) -> hlo.Type:
  """The result: most starts list their operands first."""
  found = instruction.type
  is_start = instruction.opcode.endswith("-start")
  if is_start and "all-reduce" not in instruction.opcode and found.elements:
    return found.elements[1]
  return found


def _count_slice(instruction: hlo.Instruction, operands: list[hlo.Type]) -> int:
  result = _result(instruction)
  indices = sum(map(_count_bytes, operands[1:]))
  return _at(operands[0], result) + _count_bytes(result) + indices


class _Fusion:
  """Bytes that a fusion reads and writes.

  Goes from the results back to the parameters, with how many elements of each
  value are needed.
  """

  def __init__(
    self,
    program: hlo.Program,
    inner: hlo.Computation,
    fusion: hlo.Instruction | None = None,
  ) -> None:
    self._program = program
    self._inner = inner
    aliased = fusion.attribute("output_to_operand_aliasing") if fusion else None
    self._aliased = set(re.findall(r"\{(\d*)\}: ", aliased or ""))
    self._needed: dict[str, int] = {}
    self._written = 0

  def total(self) -> int:
    reads = self.reads()
    types = {
      int(i.operands[0]): i.type
      for i in self._inner.instructions.values()
      if i.opcode == "parameter"
    }
    read = sum(
      -(-size * types[number].bits // 8)
      for number, size in reads.items()
      if not types[number].memory_space
    )
    return read + self._written

  def reads(self) -> Mapping[int, int]:
    """Returns how many elements of each parameter are read."""
    root = self._inner.root
    if root.opcode == "tuple":
      for index, name in enumerate(root.operands):
        self._output(self._inner.instructions[name], str(index))
    else:
      self._output(root, "")
    found: dict[int, int] = {}
    for instruction in reversed(list(self._inner.instructions.values())):
      needed = self._needed.get(instruction.name, 0)
      if instruction.opcode == "parameter":
        found[int(instruction.operands[0])] = min(needed, instruction.type.size)
      elif needed:
        self._pass_back(instruction, needed)
    return found

  def _output(self, output: hlo.Instruction, index: str) -> None:
    """Counts what is written of one result."""
    source = self._behind(output)
    if source.opcode == "parameter":
      return
    if source.opcode.removesuffix("-start") in COLLECTIVES and (
      index in self._aliased
    ):
      # One of the later parts of an asynchronous collective.
      return
    if self._is_in_place(source):
      self._update(source, output.type)
    elif not self._is_workspace(output):
      self._written += _count_bytes(output.type)
      if output.opcode == "custom-call":
        self._written -= kernels.workspace(output)
      self._need(output.name, output.type.size)

  def _is_workspace(self, output: hlo.Instruction) -> bool:
    """Whether a result is the scratch memory of a kernel inside."""
    if output.opcode != "get-tuple-element":
      return False
    source = self._inner.instructions[output.operands[0]]
    if source.opcode != "custom-call" or not kernels.workspace(source):
      return False
    return output.attribute("index") == str(len(source.type.elements) - 1)

  def _is_in_place(self, instruction: hlo.Instruction) -> bool:
    if instruction.opcode not in ("dynamic-update-slice", "scatter"):
      return False
    target = self._behind(self._inner.instructions[instruction.operands[0]])
    return target.opcode == "parameter" or self._is_in_place(target)

  def _update(self, update: hlo.Instruction, place: hlo.Type) -> None:
    """Counts updates in place, of a parameter or of a value updated so."""
    operands = [self._inner.instructions[name] for name in update.operands]
    is_scatter = update.opcode == "scatter"
    for operand in operands[1:]:
      self._need(operand.name, operand.type.size)
    part = _at(place, operands[-1 if is_scatter else 1].type)
    # The operand of a scatter is read as well.
    self._written += 2 * part if is_scatter else part
    target = self._behind(operands[0])
    if target.opcode != "parameter":
      self._update(target, place)

  def _behind(self, instruction: hlo.Instruction) -> hlo.Instruction:
    while instruction.opcode in _PASSED_ON:
      instruction = self._inner.instructions[instruction.operands[0]]
    return instruction

  def _need(self, name: str, size: int) -> None:
    self._needed[name] = self._needed.get(name, 0) + size

  def _pass_back(self, user: hlo.Instruction, needed: int) -> None:
    """Needs of the operands what the user's result needs."""
    size = max(user.type.size, 1)
    share = 1.0 if user.type.elements else min(needed / size, 1.0)
    sizes: Mapping[int, int] = {}
    if user.opcode == "fusion":
      (name,) = user.get_called("calls")
      sizes = _Fusion(self._program, self._program.computations[name]).reads()
    for index, name in enumerate(user.operands):
      operand = self._inner.instructions.get(name)
      if operand is None:
        continue
      whole = sizes.get(index, operand.type.size)
      part = math.ceil(share * whole)
      if user.opcode in _SLICES and index == 0:
        part = min(needed, size)
      elif user.opcode == "dynamic-update-slice" and index == 0:
        update = self._inner.instructions[user.operands[1]]
        part = max(part - update.type.size, 0)
      elif user.opcode in ("broadcast", "pad"):
        part = min(whole, needed)
      elif user.opcode in ("dot", "convolution"):
        part = whole
      self._need(name, part)
