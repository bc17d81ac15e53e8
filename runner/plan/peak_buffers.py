"""Names of the buffers that are in use at the peak of the memory.

The compiler knows when each buffer is in use, the compiled program which module
it belongs to, and where it comes from: a stack that a loop over layers writes,
weights that were gathered, a copy from the host.
"""

from collections.abc import Mapping
import re
from typing import Final

from paxon.runner.plan import result
from paxon.runner.plan.program_text import buffer_assignment, hlo, name_stack

# How many of them a plan lists, and the least share of the peak.
_MOST: Final = 10
_LEAST: Final = 0.001
_SHAPE: Final = re.compile(r"\w+\[[\d,]*\]")
_GATHERS: Final = ("all-gather", "all-gather-start", "all-gather-done")
# Instructions that are looked through at most.
_MAX_STEPS: Final = 16
# The same value, in another layout or by another name.
_ALIASES: Final = ("bitcast", "convert", "copy", "reshape", "transpose")
_STACKS: Final = "dynamic_update_slice"


def describe(
  buffers: buffer_assignment.Buffers, program: hlo.Program
) -> tuple[result.Buffers, ...]:
  """Returns the largest temporary buffers at the peak, equal ones together.

  Args:
    buffers: Of the compiled program.
    program: Its text.
  """
  places = {
    name: (computation, instruction)
    for computation in program.computations.values()
    for name, instruction in computation.instructions.items()
  }
  sums: dict[tuple[str, str, str], list[int]] = {}
  for values in buffers.at_peak:
    shape = _SHAPE.match(values[0].type)
    if shape is None:
      continue  # A tuple: pointers to other buffers.
    module, reason = _explain(values, places, program)
    sizes = sums.setdefault((shape[0], module, reason), [])
    sizes.append(values[0].num_bytes)
  ordered = sorted(sums.items(), key=lambda item: -sum(item[1]))
  return tuple(
    result.Buffers(
      type=kind,
      module=module,
      reason=reason,
      count=len(sizes),
      num_bytes=sum(sizes),
    )
    for (kind, module, reason), sizes in ordered[:_MOST]
    if sum(sizes) >= _LEAST * buffers.peak
  )


_Places = Mapping[str, tuple[hlo.Computation, hlo.Instruction]]


def _explain(
  values: tuple[buffer_assignment.Value, ...],
  places: _Places,
  program: hlo.Program,
) -> tuple[str, str]:
  """Returns the module of a buffer, and the reason why it exists."""
  known = [v for v in values if v.instruction in places]
  if not known:
    return "", "unknown"
  largest = [v for v in known if v.num_bytes == known[0].num_bytes]
  found = [_find_origin(value, places, program) for value in largest]
  # Of several values in one buffer, the first with a module names it.
  named = [each for each in found if name_stack.part(each[1])] or found
  instruction, stack, is_carried = named[0]
  part = name_stack.part(stack)
  if is_carried and _STACKS in stack:
    # The loop writes the stack; what is in it comes from a module inside.
    sources = _find_sources(instruction, places, program)
    parts = [part, *(name_stack.part(i.op_name) for i in sources)]
    part = max(parts, key=lambda path: path.count("/"))
  reason = _find_reason(instruction, stack, places, is_carried=is_carried)
  return part, reason


def _find_origin(
  value: buffer_assignment.Value, places: _Places, program: hlo.Program
) -> tuple[hlo.Instruction, str, bool]:
  """Returns the instruction that makes a value, with its name stack.

  Also returns whether a loop carries the value. Loops, tuples and changes of
  the layout are looked through.
  """
  computation, instruction = places[value.instruction]
  index, is_carried = value.index, False
  for _ in range(_MAX_STEPS):
    inside = _find_in_loop(index, computation, instruction, program)
    if inside is not None:
      name, index, is_carried = inside.name, (), True
    elif instruction.opcode == "get-tuple-element":
      name = instruction.operands[0]
      index = (int(instruction.attribute("index") or 0),)
    elif instruction.operands and not _find_stack(instruction, program):
      # The compiler's own copy, in another layout.
      name = instruction.operands[0]
    else:
      break
    if name not in places:
      break
    computation, instruction = places[name]
  return instruction, _find_stack(instruction, program), is_carried


def _find_stack(instruction: hlo.Instruction, program: hlo.Program) -> str:
  """Returns the name stack of an instruction, or one inside its fusion."""
  stacks = [instruction.op_name]
  for name in instruction.runs if instruction.opcode == "fusion" else ():
    inside = program.computations[name].instructions.values()
    stacks += sorted(
      (i.op_name for i in inside), key=lambda stack: _STACKS not in stack
    )
  return next(filter(None, stacks), "")


def _find_sources(
  instruction: hlo.Instruction, places: _Places, program: hlo.Program
) -> list[hlo.Instruction]:
  """Returns the instructions in a fusion, and those of its operands."""
  found = [
    each
    for name in instruction.runs
    for each in program.computations[name].instructions.values()
  ]
  for name in instruction.operands:
    while name in places:
      source = places[name][1]
      found.append(source)
      name = source.operands[0] if source.opcode in _ALIASES else ""
  return found


def _find_in_loop(
  index: tuple[int, ...],
  computation: hlo.Computation,
  instruction: hlo.Instruction,
  program: hlo.Program,
) -> hlo.Instruction | None:
  """Returns the instruction that updates a loop's value; None without loop."""
  body = None
  if instruction.opcode == "while":
    body = program.computations[instruction.get_called("body")[0]]
  elif instruction.opcode == "parameter" and index:
    callers = program.callers.get(computation.name, ())
    if any(caller.opcode == "while" for _, caller in callers):
      body = computation
  if body is None or body.root.opcode != "tuple" or len(index) != 1:
    return None
  return body.instructions.get(body.root.operands[index[0]])


def _find_reason(
  instruction: hlo.Instruction,
  stack: str,
  places: _Places,
  *,
  is_carried: bool,
) -> str:
  """Returns why the result of an instruction exists."""
  operands = [places[n][1] for n in instruction.operands if n in places]
  if instruction.opcode in _GATHERS:
    return "gathered"
  if any(
    leaf.memory_space == hlo.HOST_SPACE
    for o in operands
    for leaf in o.type.leaves
  ):
    return "copy of host memory"
  if instruction.opcode == "conditional":
    return "result of a conditional"
  is_backward = name_stack.is_backward(stack)
  if is_carried and _STACKS in stack:
    # The loop over layers stacks a value of each.
    if is_backward:
      return "gradients of all layers"
    return "saved for the backward pass"
  if is_carried:
    return "carried by a loop"
  if not stack:
    return "temporary"
  if name_stack.is_recomputed(stack):
    return "computed again in the backward pass"
  return f"temporary of the {'backward' if is_backward else 'forward'} pass"
