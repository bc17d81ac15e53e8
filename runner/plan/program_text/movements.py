"""Data that each collective of a step moves, by module."""

from collections.abc import Iterable, Mapping
import dataclasses

from paxon.runner.plan.program_text import (
  collectives,
  dataflow,
  hlo,
  name_stack,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
  """One collective, or that part of it which moves one kind of data.

  Attributes:
    collective: The collective.
    data: Kind of the moved data.
    part: Path of the linen module that it serves; empty if the text does not
      say.
    payload_bytes: Of this data, of one execution.
    loop_depth: Number of nested loops that it runs in.
  """

  collective: collectives.Collective
  data: dataflow.Data
  part: str
  payload_bytes: int
  loop_depth: int

  @property
  def is_in_loop(self) -> bool:
    """Whether it runs inside a loop."""
    return self.loop_depth > 0

  @property
  def total_bytes(self) -> int:
    """Payload of all executions."""
    return self.collective.count * self.payload_bytes


def find(
  program: hlo.Program, communication: collectives.Communication
) -> tuple[Movement, ...] | None:
  """Returns the movements of all collectives; None if they are unknown.

  Args:
    program: The compiled training step of one device.
    communication: Its collectives.
  """
  flow = dataflow.Dataflow(program)
  if not flow.is_known:
    return None
  return tuple(
    movement
    for collective in communication.collectives
    for movement in _movements(collective, program, flow)
  )


def largest_part(movements: Iterable[Movement]) -> str:
  """Returns the part that most bytes are moved for, for a message."""
  sums: dict[str, int] = {}
  for movement in movements:
    part = movement.part or "an unnamed module"
    sums[part] = sums.get(part, 0) + movement.total_bytes
  return max(sums, key=sums.__getitem__)


def _movements(
  collective: collectives.Collective,
  program: hlo.Program,
  flow: dataflow.Dataflow,
) -> Iterable[Movement]:
  computation = program.computations[collective.computation]
  instruction = computation.instructions[collective.instruction]
  sizes = _sizes(instruction, computation)
  data = flow.classify_operands(computation.name, instruction.name)
  whole = max(sum(sizes), 1)
  by_data: Mapping[dataflow.Data, int] = {
    kind: sum(s for s, d in zip(sizes, data, strict=True) if d is kind)
    for kind in dict.fromkeys(data)
  }
  part = name_stack.part(collective.name)
  for kind, size in by_data.items():
    yield Movement(
      collective=collective,
      data=kind,
      part=part or flow.part(computation.name, instruction.name, kind),
      payload_bytes=round(collective.payload_bytes * size / whole),
      loop_depth=flow.loop_depth(computation.name),
    )


def _sizes(
  instruction: hlo.Instruction, computation: hlo.Computation
) -> list[int]:
  return [
    computation.instructions[name].type.num_bytes
    for name in instruction.operands
    if name in computation.instructions
  ]
