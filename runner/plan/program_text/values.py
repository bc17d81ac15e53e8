"""Values of a program, their operands and origins.

Tuples are followed element by element, through loops, calls and fusions;
otherwise all that a loop carries would be one value.
"""

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from paxon.runner.plan.program_text import hlo

# Computation, instruction, and element of a tuple or -1.
Value: TypeAlias = tuple[str, str, int]

# Their result is their first operand, in another place or form.
_MOVES: Final = frozenset(
  (
    "bitcast",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "get-tuple-element",
    "reshape",
    "slice-done",
    "slice-start",
    "transpose",
    "tuple",
  )
)
_ELEMENTWISE_TUPLES: Final = ("all-reduce", "all-reduce-start", "opt-barrier")


class Values:
  """The values of one program."""

  def __init__(self, program: hlo.Program) -> None:
    self._computations = program.computations
    self._callers = program.callers

  def at(self, value: Value) -> hlo.Instruction:
    """Returns the instruction of a value."""
    return self._computations[value[0]].instructions[value[1]]

  def find(self, computation: str, name: str) -> list[Value]:
    """Returns the value of an instruction, or its tuple's elements.

    Args:
      computation: Name of the computation that it is in.
      name: Its name; other names have no value.
    """
    instruction = self._computations[computation].instructions.get(name)
    if instruction is None:
      return []
    num_elements = len(instruction.type.elements)
    if not num_elements:
      return [(computation, name, -1)]
    return [(computation, name, k) for k in range(num_elements)]

  def origin(self, value: Value) -> Value:
    """Returns the origin of which a value is a copy.

    Goes into fusions and out of them; stops at what a loop carries.
    """
    while True:
      instruction = self.at(value)
      is_passed = instruction.opcode in (*_MOVES, *hlo.FUSIONS)
      if instruction.opcode == "parameter":
        callers = self._callers.get(value[0], ())
        is_passed = len(callers) == 1 and callers[0][1].opcode in hlo.FUSIONS
      source = next(iter(self.sources(value)), None) if is_passed else None
      if source is None:
        return value
      value = source

  def sources(self, value: Value) -> Iterable[Value]:
    """Returns the operands of a value; a loop's initial value comes first."""
    computation, _, index = value
    instruction = self.at(value)
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "get-tuple-element":
      wanted = int(instruction.attribute("index") or 0)
      return self._element(computation, operands[0], wanted)
    if opcode == "tuple":
      return self.find(computation, operands[index]) if operands else []
    if opcode == "parameter":
      return self._arguments(computation, int(operands[0]), index)
    if opcode == "while":
      return [
        *self._element(computation, operands[0], index),
        *self._result(instruction.get_called("body")[0], index),
      ]
    if instruction.runs:
      is_async = opcode.endswith("-start")
      at = -1 if is_async else index
      return [v for name in instruction.runs for v in self._result(name, at)]
    if opcode in _ELEMENTWISE_TUPLES and index >= 0:
      # A barrier has one operand, a tuple; a reduction one for each element.
      if len(operands) == 1:
        return self._element(computation, operands[0], index)
      return self.find(computation, operands[index])
    if opcode.endswith("-done"):
      start = self._computations[computation].instructions[operands[0]]
      if len(start.operands) > 1 and index >= 0:
        return self.find(computation, start.operands[index])
      return self.find(computation, operands[0])
    return [v for name in operands for v in self.find(computation, name)]

  def _element(self, computation: str, name: str, index: int) -> list[Value]:
    found = self.find(computation, name)
    return found[index : index + 1] if len(found) > 1 and index >= 0 else found

  def _result(self, computation: str, index: int) -> list[Value]:
    root = self._computations[computation].root
    return self._element(computation, root.name, index)

  def _arguments(
    self, computation: str, number: int, index: int
  ) -> Iterator[Value]:
    for caller, instruction in self._callers.get(computation, ()):
      operands = instruction.operands
      if instruction.opcode == "while":
        yield from self._element(caller.name, operands[0], index)
        yield from self._result(instruction.get_called("body")[0], index)
      elif instruction.opcode == "conditional":
        position = 1 + instruction.runs.index(computation)
        yield from self._element(caller.name, operands[position], index)
      elif number < len(operands):
        yield from self._element(caller.name, operands[number], index)
