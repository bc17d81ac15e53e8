"""Trip counts of loops in a compiled program.

The compilers for CPU and CUDA say it. The one for TPU does not: there it is
inferred from the condition, which compares an element of the loop's tuple with
a bound, from that element's first value, and from what the body adds to it.
"""

import dataclasses
import re

from paxon.runner.plan.program_text import hlo, values

_KNOWN = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


@dataclasses.dataclass(frozen=True)
class _Affine:
  """A constant, or an element of the loop's tuple plus a constant."""

  index: int | None
  offset: int


def find_trip_count(
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
  reader = _Reader(program)
  (condition,), (body,) = loop.get_called("condition"), loop.get_called("body")
  comparison = reader.comparison(condition)
  if comparison is None:
    return None
  left, right, direction = comparison
  if left.index is None:
    left, right = right, left
    direction = direction.translate(str.maketrans("LG", "GL"))
  if left.index is None:
    return None
  start = reader.initial(loop, caller, left.index)
  step = reader.step(body, left.index)
  if right.index is None:
    bound: int | None = right.offset
  else:
    # A bound that is carried along must not change.
    changes = reader.step(body, right.index)
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
    self._values = values.Values(program)

  def comparison(self, condition: str) -> tuple[_Affine, _Affine, str] | None:
    """The two sides of a condition, and its direction."""
    root = self._computations[condition].root
    place, name, _ = self._values.origin((condition, root.name, -1))
    compare = self._computations[place].instructions[name]
    if compare.opcode != "compare":
      return None
    left, right = (self._value((place, o, -1)) for o in compare.operands)
    direction = compare.attribute("direction")
    if left is None or right is None or direction is None:
      return None
    return left, right, direction

  def initial(
    self, loop: hlo.Instruction, caller: hlo.Computation, index: int
  ) -> int | None:
    """Returns an element of the tuple before the first trip."""
    value = self._value((caller.name, loop.operands[0], index))
    return value.offset if value is not None and value.index is None else None

  def step(self, body: str, index: int) -> int | None:
    """Returns the body's increment of an element; None for other updates."""
    root = self._computations[body].root
    value = self._value((body, root.name, index))
    return value.offset if value is not None and value.index == index else None

  def _value(self, value: values.Value) -> _Affine | None:
    place, _, index = origin = self._values.origin(value)
    instruction = self._values.at(origin)
    operands = instruction.operands
    if instruction.opcode == "constant":
      text = operands[0] if operands else ""
      is_integer = re.fullmatch(r"-?\d+", text)
      return _Affine(None, int(text)) if is_integer else None
    if instruction.opcode == "parameter":
      return _Affine(index, 0) if index >= 0 else None
    if instruction.opcode in ("add", "subtract"):
      left, right = (self._value((place, o, -1)) for o in operands)
      return _combine(left, right, -1 if instruction.opcode[0] == "s" else 1)
    return None


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
