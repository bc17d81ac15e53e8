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
_HOST: Final = 5
_GATHERS: Final = ("all-gather", "all-gather-start", "all-gather-done")
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
  is_carried = False
  found: list[hlo.Instruction] = []
  for value in largest:
    computation, instruction = places[value.instruction]
    source = _find_in_loop(value, computation, instruction, program)
    is_carried = is_carried or source is not None
    found.append(source or instruction)
  # Of several values in one buffer, the first with a module names it.
  named = [i for i in found if name_stack.part(i.op_name)] or found
  first = named[0]
  part = name_stack.part(first.op_name)
  if is_carried and _STACKS in first.op_name:
    # The loop writes the stack; what is in it comes from a module inside.
    sources = _find_sources(first, places, program)
    parts = [part, *(name_stack.part(i.op_name) for i in sources)]
    part = max(parts, key=lambda path: path.count("/"))
  return part, _find_reason(first, places, is_carried=is_carried)


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
  value: buffer_assignment.Value,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
  program: hlo.Program,
) -> hlo.Instruction | None:
  """Returns the instruction that updates a loop's value; None without loop."""
  body = None
  if instruction.opcode == "while":
    body = program.computations[instruction.get_called("body")[0]]
  elif instruction.opcode == "parameter" and value.index:
    callers = program.callers.get(computation.name, ())
    if any(caller.opcode == "while" for _, caller in callers):
      body = computation
  if body is None or body.root.opcode != "tuple" or len(value.index) != 1:
    return None
  return body.instructions.get(body.root.operands[value.index[0]])


def _find_reason(
  instruction: hlo.Instruction, places: _Places, *, is_carried: bool
) -> str:
  """Returns why the result of an instruction exists."""
  stack = instruction.op_name
  operands = [places[n][1] for n in instruction.operands if n in places]
  if instruction.opcode in _GATHERS:
    return "gathered"
  if any(
    leaf.memory_space == _HOST for o in operands for leaf in o.type.leaves
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
