"""Gathers of weights: what they gather, and whether anything runs meanwhile."""

from collections.abc import Callable, Hashable

from paxon.runner.plan.program_text import (
  collectives,
  hlo,
  name_stack,
  traffic,
  trip_counts,
)

_MOVES = frozenset(
  (
    "bitcast",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "reshape",
    "slice-done",
    "slice-start",
    "transpose",
  )
)
# The arithmetic on indices, and what they choose.
_READ = frozenset(
  (
    "add",
    "clamp",
    "compare",
    "dynamic-slice",
    "maximum",
    "minimum",
    "multiply",
    "select",
    "subtract",
  )
)
_IS_SYNC = '"is_sync":true'

Source = Hashable


class Finder:
  """Finds what is gathered in a program."""

  def __init__(self, program: hlo.Program) -> None:
    """Reads a program.

    Args:
      program: The compiled training step of one device.
    """
    self._program = program
    self._loops = {
      name: (computation, instruction)
      for computation in program.computations.values()
      for instruction in computation.instructions.values()
      if instruction.opcode == "while"
      for name in instruction.called("body")
    }
    self._callers = {
      name: (computation, instruction)
      for computation in program.computations.values()
      for instruction in computation.instructions.values()
      if instruction.opcode in ("fusion", "async-start")
      for name in instruction.called("calls")
    }

  def sources(self, gather: collectives.Collective) -> tuple[Source, ...]:
    """Returns what each operand of a gather is a copy of.

    Gathers with equal sources gather the same values in the same pass, forward
    or backward, of a loop's body.

    Args:
      gather: An all-gather of the program.
    """
    computation = self._program.computations[gather.computation]
    instruction = computation.instructions[gather.instruction]
    is_backward = name_stack.is_backward(gather.name)
    return tuple(
      (gather.axes, is_backward, self._source(computation, name))
      for name in instruction.operands
      if name in computation.instructions
    )

  def repetitions(self, gather: collectives.Collective) -> int:
    """Returns how many trips of its loop gather the same values.

    Args:
      gather: An all-gather of the program.

    Returns:
      The trips of the loop in whose body it is, if the body leaves all that it
      gathers as it is; else 1.
    """
    body = self._program.computations[gather.computation]
    if body.name not in self._loops or body.root.opcode != "tuple":
      return 1
    for name in body.instructions[gather.instruction].operands:
      if not self._is_unchanged(self._source(body, name), body):
        return 1
    caller, loop = self._loops[body.name]
    return trip_counts.of(loop, caller, self._program) or 1

  def _is_unchanged(self, source: Source, body: hlo.Computation) -> bool:
    """Whether a source is an element of the loop's tuple that is passed on."""
    match source:
      case (body.name, str(name), int(index)):
        passed = body.instructions[body.root.operands[index]]
        return (
          body.instructions[name].opcode == "parameter"
          and passed.opcode == "get-tuple-element"
          and passed.operands[0] == name
          and int(passed.attribute("index") or 0) == index
        )
    return False

  def _source(
    self,
    computation: hlo.Computation,
    name: str,
    argument: Callable[[int], Source] | None = None,
  ) -> Source:
    """What a value is a copy of; equal only where the values are.

    Inside a fusion, `argument` gives the same of its operands.
    """
    instruction = computation.instructions[name]
    opcode, operands = instruction.opcode, instruction.operands

    def of(operand: str) -> Source:
      return self._source(computation, operand, argument)

    if opcode in _MOVES:
      return of(operands[0])
    if opcode == "constant":
      return operands
    if opcode in _READ:
      sizes = instruction.attribute("dynamic_slice_sizes")
      return opcode, sizes, *map(of, operands)
    if opcode == "get-tuple-element":
      inner = computation.instructions[operands[0]]
      index = int(instruction.attribute("index") or 0)
      if inner.opcode == "tuple":
        return of(inner.operands[index])
      # The same element may be taken out of a loop's tuple several times.
      return computation.name, operands[0], index
    if opcode == "fusion":
      called = self._program.computations[instruction.called("calls")[0]]
      return self._source(called, called.root.name, lambda i: of(operands[i]))
    if opcode == "parameter" and argument is not None:
      return argument(int(operands[0]))
    if opcode == "parameter" and computation.name in self._callers:
      caller, call = self._callers[computation.name]
      return self._source(caller, call.operands[int(operands[0])])
    return computation.name, name


def is_synchronous(
  program: hlo.Program, collective: collectives.Collective
) -> bool:
  """Returns whether a device waits for a collective.

  Args:
    program: The compiled program.
    collective: One of its collectives.
  """
  computation = program.computations[collective.computation]
  start = computation.instructions[collective.instruction]
  if not collective.is_asynchronous or _IS_SYNC in start.attributes:
    return True
  if not start.opcode.endswith("-start"):
    # On TPUs, matmuls carry it along.
    return False
  is_after = False
  for instruction in computation.instructions.values():
    if instruction.opcode.endswith("-done") and start.name in (
      instruction.operands
    ):
      return True
    if is_after and not _is_waiting(instruction):
      return False
    is_after |= instruction is start
  return False


def _is_waiting(instruction: hlo.Instruction) -> bool:
  """Whether an instruction is no work that hides a collective."""
  kind = instruction.opcode.removesuffix("-start")
  return kind in collectives.KINDS or traffic.is_free(instruction)
