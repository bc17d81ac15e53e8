"""Classification of collectives: weights, activations, gradients.

Kinds follow from the dependencies of values. Weights do not depend on a batch.
Activations do, and are used in matmuls of the same loop. Gradients depend on
the batch as well, but go to the optimizer, not into another matmul of the loop.
"""

from collections.abc import Iterable, Iterator, Mapping
import enum

from paxon.runner.plan.program_text import hlo, kernels, name_stack, values

# Name of the step's second argument, with which the names of its arrays begin.
_BATCH = "batch"
# Depth and fan-out limits when naming an unnamed instruction.
_NEAR, _WIDE = 12, 64

_Edges = dict[values.Value, list[values.Value]]


class Data(enum.Enum):
  """Kinds of values in a training step."""

  WEIGHTS = "weights"
  ACTIVATIONS = "activations"
  # And statistics, such as norms and losses.
  GRADIENTS = "gradients"


class Dataflow:
  """Def-use graph of a program.

  Attributes:
    is_known: Whether the text says which parameters are the batch.
  """

  def __init__(self, program: hlo.Program) -> None:
    """Reads a program.

    Args:
      program: The compiled training step of one device.
    """
    self._program = program
    self._values = values.Values(program)
    self._depths = _loop_depths(program)
    # From a value to what is made of it.
    self._users: _Edges = {}
    # From a value to what it is made of, but not from the result of an
    # outermost loop to what its body made.
    self._inside_loops: _Edges = {}
    self._read(program)
    batch = [
      (program.entry.name, instruction.name, -1)
      for instruction in program.entry.instructions.values()
      if instruction.opcode == "parameter"
      and instruction.op_name.startswith(_BATCH)
    ]
    self.is_known = bool(batch)
    self._of_batch = _find_reachable(batch, self._users)
    self._used = _find_reachable(self._factors(program), self._inside_loops)

  def _read(self, program: hlo.Program) -> None:
    for computation in program.computations.values():
      is_outermost = not self._depths[computation.name]
      for instruction in computation.instructions.values():
        for value in self._values.find(computation.name, instruction.name):
          made_of = list(self._values.sources(value))
          for source in made_of:
            self._users.setdefault(source, []).append(value)
          if instruction.opcode == "while" and is_outermost:
            made_of = made_of[:1]
          self._inside_loops[value] = made_of

  def _factors(self, program: hlo.Program) -> Iterator[values.Value]:
    """Values that go into a matmul or a kernel."""
    for computation in program.computations.values():
      for instruction in computation.instructions.values():
        if _is_matmul(instruction):
          for name in instruction.operands:
            yield from self._values.find(computation.name, name)

  def classify_operands(self, computation: str, instruction: str) -> list[Data]:
    """Returns the kind of each operand of a collective.

    Args:
      computation: Name of the computation that it is in.
      instruction: Its name.
    """
    body = self._program.computations[computation]
    return [
      self._classify(self._values.find(computation, name))
      for name in body.instructions[instruction].operands
      if name in body.instructions
    ]

  def loop_depth(self, computation: str) -> int:
    """Returns the number of nested loops that a computation runs in.

    Args:
      computation: Its name.
    """
    return self._depths[computation]

  def part(self, computation: str, instruction: str, data: Data) -> str:
    """Returns the part of the model that the nearest operation belongs to.

    Compilers leave collectives that they made themselves without a name.

    Args:
      computation: Name of the computation that it is in.
      instruction: Its name.
      data: Kind of the data: gradients are named by their origin, all else by
        its use.

    Returns:
      The path of the linen module; empty if no operation near has one.
    """
    edges = self._users
    if data is Data.GRADIENTS:
      edges = self._inside_loops
    near = self._values.find(computation, instruction)
    for _ in range(_NEAR):
      near = [node for start in near for node in edges.get(start, ())][:_WIDE]
      for value in near:
        if part := name_stack.part(self._values.at(value).op_name):
          return part
    return ""

  def _classify(self, nodes: list[values.Value]) -> Data:
    if not any(node in self._of_batch for node in nodes):
      return Data.WEIGHTS
    is_used = any(node in self._used for node in nodes)
    return Data.ACTIVATIONS if is_used else Data.GRADIENTS


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


def _find_reachable(
  start: Iterable[values.Value], edges: _Edges
) -> set[values.Value]:
  """All that can be reached, the start included."""
  found = set(start)
  waiting = list(found)
  while waiting:
    for node in edges.get(waiting.pop(), ()):
      if node not in found:
        found.add(node)
        waiting.append(node)
  return found
