"""Gathers of weights: which of them gather the same values again."""

from collections.abc import Hashable

from paxon.runner.plan.program_text import (
  collectives,
  hlo,
  name_stack,
  trip_counts,
  values,
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
Source = Hashable


class Finder:
  """Finds what is gathered in a program."""

  def __init__(self, program: hlo.Program) -> None:
    """Reads a program.

    Args:
      program: The compiled training step of one device.
    """
    self._program = program
    self._values = values.Values(program)

  def sources(self, gather: collectives.Collective) -> tuple[Source, ...]:
    """Returns the value of which each operand of a gather is a copy.

    Gathers with equal sources gather the same values in the same pass, forward
    or backward, of a loop's body.

    Args:
      gather: An all-gather of the program.
    """
    is_backward = name_stack.is_backward(gather.name)
    return tuple(
      (gather.axes, is_backward, self._source(operand))
      for operand in self._operands(gather)
    )

  def repetitions(self, gather: collectives.Collective) -> int:
    """Returns how many trips of its loop gather the same values.

    Args:
      gather: An all-gather of the program.

    Returns:
      The trips of the loop in whose body it is, if the body leaves all that it
      gathers as it is; else 1.
    """
    name = gather.computation
    root = self._program.computations[name].root
    callers = self._program.callers.get(name, ())
    if len(callers) != 1 or callers[0][1].opcode != "while":
      return 1
    for operand in self._operands(gather):
      place, _, index = source = self._values.origin(operand)
      passed_on = self._values.origin((name, root.name, index))
      if place != name or index < 0 or passed_on != source:
        return 1
    caller, loop = callers[0]
    return trip_counts.find_trip_count(loop, caller, self._program) or 1

  def _operands(self, gather: collectives.Collective) -> list[values.Value]:
    """The operands of a gather, constants left out."""
    computation = self._program.computations[gather.computation]
    return [
      (computation.name, name, -1)
      for name in computation.instructions[gather.instruction].operands
      if name in computation.instructions
    ]

  def _source(self, value: values.Value) -> Source:
    """Returns a value's origin; equal origins mean equal values."""
    origin = self._values.origin(value)
    instruction = self._values.at(origin)
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
      return operands
    if opcode in _READ:
      sizes = instruction.attribute("dynamic_slice_sizes")
      read = (self._source((origin[0], name, -1)) for name in operands)
      return opcode, sizes, *read
    return origin
