"""Classification of collectives: weights, activations, gradients.

Seen from what values depend on. Weights do not depend on the batch. Activations
do, and are used in matmuls of the same loop. Gradients depend on the batch as
well, but go to the optimizer, not into another matmul of the loop.

Tuples are followed element by element, through loops, calls and fusions;
otherwise all that a loop carries would be one value.
"""

from collections.abc import Iterable, Iterator, Mapping
import enum

from paxon.runner.plan.program_text import hlo, kernels, name_stack

# Name of the step's second argument, with which the names of its arrays begin.
_BATCH = "batch"
# How far, and how widely, to look for the name of what has none.
_NEAR, _WIDE = 12, 64
_ELEMENTWISE_TUPLES = ("all-reduce", "all-reduce-start", "opt-barrier")

# A value: computation, instruction, and element of a tuple or -1.
_Node = tuple[str, str, int]
_Edges = dict[_Node, list[_Node]]


class Data(enum.Enum):
  """What a value is."""

  WEIGHTS = "weights"
  ACTIVATIONS = "activations"
  # And statistics, such as norms and losses.
  GRADIENTS = "gradients"


class Dataflow:
  """What depends on what in a program.

  Attributes:
    is_known: Whether the text says which parameters are the batch.
  """

  def __init__(self, program: hlo.Program) -> None:
    """Reads a program.

    Args:
      program: The compiled training step of one device.
    """
    self._program = program
    self._sources = _Sources(program)
    batch = [
      (program.entry.name, instruction.name, -1)
      for instruction in program.entry.instructions.values()
      if instruction.opcode == "parameter"
      and instruction.op_name.startswith(_BATCH)
    ]
    self.is_known = bool(batch)
    self._of_batch = _reached(batch, self._sources.users)
    self._used = _reached(
      self._sources.operands_of_matmuls, self._sources.inside_loops
    )

  def of_operands(self, computation: str, instruction: str) -> list[Data]:
    """Returns what each operand of a collective is.

    Args:
      computation: Name of the computation that it is in.
      instruction: Its name.
    """
    body = self._program.computations[computation]
    return [
      self._of(self._sources.values(body, name))
      for name in body.instructions[instruction].operands
      if name in body.instructions
    ]

  def loop_depth(self, computation: str) -> int:
    """Returns the number of nested loops that a computation runs in.

    Args:
      computation: Its name.
    """
    return self._sources.loop_depths[computation]

  def part(self, computation: str, instruction: str, data: Data) -> str:
    """Returns the part of the model that the nearest operation belongs to.

    Compilers leave collectives that they made themselves without a name.

    Args:
      computation: Name of the computation that it is in.
      instruction: Its name.
      data: What it moves: gradients are named by what made them, all else by
        what uses it.

    Returns:
      The path of the linen module; empty if no operation near has one.
    """
    body = self._program.computations[computation]
    edges = self._sources.users
    if data is Data.GRADIENTS:
      edges = self._sources.inside_loops
    near = self._sources.values(body, instruction)
    for _ in range(_NEAR):
      near = [node for start in near for node in edges.get(start, ())][:_WIDE]
      for name, found, _ in near:
        stack = self._program.computations[name].instructions[found].op_name
        if part := name_stack.part(stack):
          return part
    return ""

  def _of(self, nodes: list[_Node]) -> Data:
    if not any(node in self._of_batch for node in nodes):
      return Data.WEIGHTS
    is_used = any(node in self._used for node in nodes)
    return Data.ACTIVATIONS if is_used else Data.GRADIENTS


class _Sources:
  """The values that each value is made of.

  Attributes:
    loop_depths: Number of nested loops around each computation.
    users: The other way round: from a value to what is made of it.
    inside_loops: From a value to what it is made of, but not from the result
      of an outermost loop to what its body made.
    operands_of_matmuls: Values that go into a matmul or a kernel.
  """

  def __init__(self, program: hlo.Program) -> None:
    self._computations = program.computations
    self._callers = _callers(program)
    self.loop_depths = _loop_depths(program)
    self.users: _Edges = {}
    self.inside_loops: _Edges = {}
    self.operands_of_matmuls: list[_Node] = []
    for computation in program.computations.values():
      is_outermost = not self.loop_depths[computation.name]
      for instruction in computation.instructions.values():
        if _is_matmul(instruction):
          for name in instruction.operands:
            self.operands_of_matmuls += self.values(computation, name)
        for node in self.values(computation, instruction.name):
          made_of = list(self._of(node, computation, instruction))
          for source in made_of:
            self.users.setdefault(source, []).append(node)
          if instruction.opcode == "while" and is_outermost:
            made_of = made_of[:1]
          self.inside_loops[node] = made_of

  def values(self, computation: hlo.Computation, name: str) -> list[_Node]:
    """Returns the node of an instruction, or those of its tuple's elements."""
    instruction = computation.instructions.get(name)
    if instruction is None:
      return []
    num_elements = len(instruction.type.elements)
    if not num_elements:
      return [(computation.name, name, -1)]
    return [(computation.name, name, k) for k in range(num_elements)]

  def _of(
    self,
    node: _Node,
    computation: hlo.Computation,
    instruction: hlo.Instruction,
  ) -> Iterable[_Node]:
    """What a node is made of; of a loop first what it begins with."""
    opcode, index = instruction.opcode, node[2]
    operands = instruction.operands
    if opcode == "get-tuple-element":
      wanted = int(instruction.attribute("index") or 0)
      return self._element(computation, operands[0], wanted)
    if opcode == "tuple":
      return self.values(computation, operands[index]) if operands else []
    if opcode == "parameter":
      return self._arguments(computation, int(operands[0]), index)
    if opcode == "while":
      body = self._computations[instruction.called("body")[0]]
      return [
        *self._element(computation, operands[0], index),
        *self._element(body, body.root.name, index),
      ]
    if instruction.runs:
      return self._results(instruction, index)
    if opcode in _ELEMENTWISE_TUPLES and index >= 0:
      # A barrier has one operand, a tuple; a reduction one for each element.
      if len(operands) == 1:
        return self._element(computation, operands[0], index)
      return self.values(computation, operands[index])
    if opcode.endswith("-done"):
      return self._done(computation, operands[0], index)
    return [
      node for name in operands for node in self.values(computation, name)
    ]

  def _element(
    self, computation: hlo.Computation, name: str, index: int
  ) -> list[_Node]:
    nodes = self.values(computation, name)
    return nodes[index : index + 1] if len(nodes) > 1 and index >= 0 else nodes

  def _arguments(
    self, computation: hlo.Computation, number: int, index: int
  ) -> Iterator[_Node]:
    for caller, instruction in self._callers.get(computation.name, ()):
      operands = instruction.operands
      if instruction.opcode == "while":
        body = self._computations[instruction.called("body")[0]]
        yield from self._element(caller, operands[0], index)
        yield from self._element(body, body.root.name, index)
      elif instruction.opcode == "conditional":
        position = 1 + instruction.runs.index(computation.name)
        yield from self._element(caller, operands[position], index)
      elif number < len(operands):
        yield from self._element(caller, operands[number], index)

  def _results(
    self, instruction: hlo.Instruction, index: int
  ) -> Iterator[_Node]:
    is_async = instruction.opcode.endswith("-start")
    for name in instruction.runs:
      inner = self._computations[name]
      nodes = self.values(inner, inner.root.name)
      is_one = len(nodes) > 1 and index >= 0 and not is_async
      yield from nodes[index : index + 1] if is_one else nodes

  def _done(
    self, computation: hlo.Computation, start: str, index: int
  ) -> list[_Node]:
    operands = computation.instructions[start].operands
    is_collective = computation.instructions[start].opcode.endswith("-start")
    if is_collective and len(operands) > 1 and index >= 0:
      return self.values(computation, operands[index])
    return self.values(computation, start)


def _callers(
  program: hlo.Program,
) -> Mapping[str, list[tuple[hlo.Computation, hlo.Instruction]]]:
  """Where each computation is called, functions of reductions left out."""
  found: dict[str, list[tuple[hlo.Computation, hlo.Instruction]]] = {}
  for computation in program.computations.values():
    for instruction in computation.instructions.values():
      for name in instruction.runs:
        found.setdefault(name, []).append((computation, instruction))
  return found


def _loop_depths(program: hlo.Program) -> Mapping[str, int]:
  """Number of nested loops around each computation, the most of all calls."""
  depths = dict.fromkeys(program.computations, 0)
  waiting = list(program.computations.values())
  while waiting:
    computation = waiting.pop()
    for instruction in computation.instructions.values():
      depth = depths[computation.name] + (instruction.opcode == "while")
      for name in instruction.runs:
        if depth > depths[name]:
          depths[name] = depth
          waiting.append(program.computations[name])
  return depths


def _is_matmul(instruction: hlo.Instruction) -> bool:
  if instruction.opcode == "custom-call":
    return kernels.multiplies(instruction)
  return instruction.opcode in ("dot", "convolution")


def _reached(start: Iterable[_Node], edges: _Edges) -> set[_Node]:
  """All that can be reached, the start included."""
  found = set(start)
  waiting = list(found)
  while waiting:
    for node in edges.get(waiting.pop(), ()):
      if node not in found:
        found.add(node)
        waiting.append(node)
  return found
