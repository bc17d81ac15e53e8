"""Trip counts of loops in a compiled program.

The compilers for CPU and CUDA say it. The one for TPU does not: there it is
inferred from the condition, which compares an element of the loop's tuple with
a bound, from that element's first value, and from what the body adds to it.
"""

from collections.abc import Mapping
import dataclasses
import re

from paxon.runner.plan.program_text import hlo

_KNOWN = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")


@dataclasses.dataclass(frozen=True)
class _Affine:
  """A constant, or an element of the loop's tuple plus a constant."""

  index: int | None
  offset: int


def of(
  loop: hlo.Instruction, caller: hlo.Computation, program: hlo.Program
) -> int | None:
  """Returns the number of trips of a `while`, or None if it is not known.

  Args:
    loop: The instruction.
    caller: The computation that it is in.
    program: The program.
  """
  known = _KNOWN.search(loop.attributes)
  if known:
    return int(known[1])
  (condition,) = loop.called("condition")
  (body,) = loop.called("body")
  reader = _Reader(program)
  comparison = reader.comparison(program.computations[condition])
  if comparison is None:
    return None
  left, right, direction = comparison
  if left.index is None:
    left, right = right, left
    direction = direction.translate(str.maketrans("LG", "GL"))
  if left.index is None:
    return None
  start = reader.initial(loop, caller, left.index)
  step = reader.step(program.computations[body], left.index)
  if right.index is None:
    bound: int | None = right.offset
  else:
    # A bound that is carried along must not change.
    changes = reader.step(program.computations[body], right.index)
    bound = reader.initial(loop, caller, right.index)
    bound = None if bound is None or changes != 0 else bound + right.offset
  if start is None or bound is None or not step:
    return None
  return _trips(start + left.offset, bound, step, direction)


def _trips(start: int, bound: int, step: int, direction: str) -> int | None:
  if direction in ("LE", "GE"):
    bound += 1 if direction == "LE" else -1
  elif direction not in ("LT", "GT", "NE"):
    return None
  distance = bound - start
  is_reached = distance * step >= 0
  if direction == "NE" and (not is_reached or distance % step):
    return None
  if direction[0] != "N" and (step > 0) != (direction[0] == "L"):
    return None
  return -(-distance // step) if is_reached else 0


class _Reader:
  """Evaluates the little arithmetic that loops are counted with."""

  def __init__(self, program: hlo.Program) -> None:
    self._computations = program.computations

  def comparison(
    self, condition: hlo.Computation
  ) -> tuple[_Affine, _Affine, str] | None:
    root, computation = condition.root, condition
    environment: Mapping[int, _Affine | None] | None = None
    while root.opcode == "fusion":
      environment = self._arguments(root, computation, environment)
      computation = self._computations[root.called("calls")[0]]
      root = computation.root
    if root.opcode != "compare":
      return None
    sides = [
      self._value(name, computation, environment) for name in root.operands
    ]
    direction = root.attribute("direction")
    if sides[0] is None or sides[1] is None or direction is None:
      return None
    return sides[0], sides[1], direction

  def initial(
    self, loop: hlo.Instruction, caller: hlo.Computation, index: int
  ) -> int | None:
    value = self._element(loop.operands[0], index, caller, None)
    return value.offset if value is not None and value.index is None else None

  def step(self, body: hlo.Computation, index: int) -> int | None:
    """What the body adds to an element; None if it does something else."""
    value = self._element(body.root.name, index, body, None)
    return value.offset if value is not None and value.index == index else None

  def _value(
    self,
    name: str,
    computation: hlo.Computation,
    environment: Mapping[int, _Affine | None] | None,
  ) -> _Affine | None:
    instruction = computation.instructions[name]
    operands = instruction.operands
    if instruction.opcode == "constant":
      text = operands[0] if operands else ""
      is_integer = re.fullmatch(r"-?\d+", text)
      return _Affine(None, int(text)) if is_integer else None
    if instruction.opcode == "parameter":
      return environment.get(int(operands[0])) if environment else None
    if instruction.opcode == "get-tuple-element":
      index = int(instruction.attribute("index") or 0)
      return self._element(operands[0], index, computation, environment)
    if instruction.opcode in _SAME:
      return self._value(operands[0], computation, environment)
    if instruction.opcode == "fusion":
      inner = self._computations[instruction.called("calls")[0]]
      arguments = self._arguments(instruction, computation, environment)
      return self._value(inner.root.name, inner, arguments)
    if instruction.opcode in ("add", "subtract"):
      left, right = (
        self._value(operand, computation, environment) for operand in operands
      )
      return _combine(left, right, -1 if instruction.opcode[0] == "s" else 1)
    return None

  def _element(
    self,
    name: str,
    index: int,
    computation: hlo.Computation,
    environment: Mapping[int, _Affine | None] | None,
  ) -> _Affine | None:
    """The value of one element of a tuple."""
    instruction = computation.instructions[name]
    if instruction.opcode == "tuple":
      return self._value(instruction.operands[index], computation, environment)
    if instruction.opcode == "parameter" and environment is None:
      return _Affine(index, 0)
    if instruction.opcode == "fusion":
      inner = self._computations[instruction.called("calls")[0]]
      arguments = self._arguments(instruction, computation, environment)
      return self._element(inner.root.name, index, inner, arguments)
    return None

  def _arguments(
    self,
    fusion: hlo.Instruction,
    computation: hlo.Computation,
    environment: Mapping[int, _Affine | None] | None,
  ) -> dict[int, _Affine | None]:
    return {
      number: self._value(name, computation, environment)
      for number, name in enumerate(fusion.operands)
    }


def _combine(
  left: _Affine | None, right: _Affine | None, sign: int
) -> _Affine | None:
  if left is None or right is None:
    return None
  if right.index is None:
    return _Affine(left.index, left.offset + sign * right.offset)
  if left.index is None and sign > 0:
    return _Affine(right.index, left.offset + right.offset)
  return None
