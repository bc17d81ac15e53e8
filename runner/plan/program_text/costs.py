"""FLOPs and bytes of each instruction of a compiled program.

FLOPs are those of matmuls (`dot`, `convolution`, known kernels); bytes are
those that cross the border of an instruction to and from the device's main
memory. Loops run by their trips, of a conditional the dearest branch.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import re

from paxon.runner.plan.program_text import (
  hlo,
  kernels,
  matmuls,
  name_stack,
  traffic,
  trip_counts,
)

MATMUL = "matmul"
ATTENTION = "attention"
CONVOLUTION = "convolution"
KERNEL = "kernel"
COLLECTIVE = "collective"
COPY = "copy"
ELEMENTWISE = "elementwise"
LOOP = "loop"
CALL = "call"
NONE = "none"

_TRANSFERS = (*traffic.COLLECTIVES, "recv", "send")
_MOVES = frozenset(
  (
    "bitcast",
    "broadcast",
    "concatenate",
    "constant",
    "convert",
    "copy",
    "copy-start",
    "dynamic-slice",
    "dynamic-update-slice",
    "gather",
    "get-tuple-element",
    "pad",
    "parameter",
    "reshape",
    "reverse",
    "slice",
    "slice-start",
    "transpose",
    "tuple",
  )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Cost of one execution of an instruction on one device.

  Attributes:
    flops: Of its matmuls, those inside a fusion included; the bodies of loops
      and calls are not.
    dtype: JAX's name of the widest operand of its matmuls; empty without.
    hbm_bytes: Read from and written to the device's main memory.
    kind: `matmul`, `convolution`, `attention`, `kernel`, `collective`,
      `copy`, `elementwise`, `loop`, `call`, or `none` without a cost.
    name: JAX's name stack.
    kernel: Name of the kernel that it runs (see `kernels.name`), also of one
      inside a fusion that slices its operands; empty without.
    is_approximate: Whether something was not known (a kernel without a
      formula).
  """

  flops: int
  dtype: str
  hbm_bytes: int
  kind: str
  name: str
  kernel: str = ""
  is_approximate: bool = False


Key = tuple[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Costs of a program on one device; keys are (computation, instruction).

  Attributes:
    operations: Costs of instructions that are executed by themselves; those
      inside fusions are part of the fusion.
    runs: Runs of each computation, but those of fusions. A loop whose trips are
      not known counts once, a branch that is not the dearest not at all.
    branches: The branch with the most FLOPs, or bytes, of each conditional.
    hbm_bytes: Read and written at the borders of instructions, in all runs.
    counts: FLOPs of matmuls by path of the linen module and dtype of the
      operands, in all runs. Those of Fourier transforms, which TPUs multiply
      with matrices, are missing, as in the count of the jaxpr.
    kernels: FLOPs by the name of the kernel, of those that have any.
    unknown: Kernels without a formula; their FLOPs are missing.
    notes: Unknown facts, one sentence each.
  """

  operations: Mapping[Key, Cost] = dataclasses.field(default_factory=dict)
  runs: Mapping[str, int] = dataclasses.field(default_factory=dict)
  branches: Mapping[Key, str] = dataclasses.field(default_factory=dict)
  hbm_bytes: int = 0
  counts: Mapping[tuple[str, str], int]
  kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
  unknown: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()

  @property
  def flops(self) -> int:
    """FLOPs of all matmuls."""
    return sum(self.counts.values())

  def count_by_part(self, dtype: str | None = None) -> dict[str, int]:
    """Returns FLOPs by part of the model.

    Args:
      dtype: Of the matmuls to count; None counts all.
    """
    sums: dict[str, int] = {}
    for (part, found), count in self.counts.items():
      if dtype in (None, found):
        sums[part] = sums.get(part, 0) + count
    return sums

  def count_by_dtypes(self, *dtypes: str) -> int:
    """Returns FLOPs of matmuls with operands of these dtypes."""
    return sum(n for (_, dtype), n in self.counts.items() if dtype in dtypes)


def find_branches(
  instruction: hlo.Instruction, program: hlo.Program
) -> tuple[str, ...]:
  """Returns the branch that a layer expects to be taken, or else all.

  Args:
    instruction: A conditional.
    program: Its program.
  """

  def is_usual(name: str) -> bool:
    instructions = program.computations[name].instructions
    return any(name_stack.is_usual(i.op_name) for i in instructions.values())

  usual = tuple(filter(is_usual, instruction.runs))
  return usual if len(usual) == 1 else tuple(instruction.runs)


def read(program: hlo.Program) -> Costs:
  """Returns the costs of a program.

  Args:
    program: The compiled program of one device.
  """
  runs = _Runs(program)
  hbm_bytes = 0
  counts: dict[tuple[str, str], int] = {}
  by_kernel: dict[str, int] = {}
  unknown = set()
  for (computation, name), cost in runs.costs.items():
    times = runs.found.get(computation, 0)
    if not times:
      continue
    hbm_bytes += times * cost.hbm_bytes
    if cost.is_approximate:
      unknown.add(cost.kernel or name)
    if cost.flops and not name_stack.is_fourier(cost.name):
      key = name_stack.part(cost.name), cost.dtype
      counts[key] = counts.get(key, 0) + times * cost.flops
      if cost.kernel:
        flops = by_kernel.get(cost.kernel, 0) + times * cost.flops
        by_kernel[cost.kernel] = flops
  return Costs(
    operations=runs.costs,
    runs=runs.found,
    branches=runs.branches,
    hbm_bytes=hbm_bytes,
    counts=counts,
    kernels=by_kernel,
    unknown=tuple(sorted(unknown)),
    notes=tuple(dict.fromkeys(runs.notes)),
  )


class _Runs:
  """How often computations run, from the entry down, and what that costs."""

  def __init__(self, program: hlo.Program) -> None:
    self._program = program
    self._weights: dict[str, tuple[int, int]] = {}
    self.costs: dict[Key, Cost] = {}
    self.found: dict[str, int] = {}
    self.branches: dict[Key, str] = {}
    self.notes: list[str] = []
    self._add(program.entry, 1)

  def _add(self, computation: hlo.Computation, times: int) -> None:
    self.found[computation.name] = self.found.get(computation.name, 0) + times
    for instruction in computation.instructions.values():
      self._cost(instruction, computation)
      for name, trips in self._run(instruction, computation):
        self._add(self._program.computations[name], times * trips)

  def _cost(
    self, instruction: hlo.Instruction, computation: hlo.Computation
  ) -> Cost:
    key = computation.name, instruction.name
    if key not in self.costs:
      self.costs[key] = _cost(instruction, computation, self._program)
    return self.costs[key]

  def _run(
    self, instruction: hlo.Instruction, computation: hlo.Computation
  ) -> list[tuple[str, int]]:
    # The computations of fusions do not run by themselves.
    is_fusion = instruction.opcode in hlo.FUSIONS
    names = () if is_fusion else instruction.runs
    if instruction.is_unknown_call:
      self.notes.append(
        f"The instruction {instruction.name} calls {', '.join(names)} with the"
        f" unknown opcode {instruction.opcode}; counted as one call."
      )
    if instruction.opcode == "while":
      condition, body = names
      trips = trip_counts.find_trip_count(
        instruction, computation, self._program
      )
      trips = 1 if trips is None else trips
      return [(condition, trips + 1), (body, trips)]
    if instruction.opcode == "conditional":
      weights = [self._weight(name) for name in names]
      dearest = names[max(range(len(names)), key=weights.__getitem__)]
      expected = find_branches(instruction, self._program)
      if len(expected) == 1:
        (dearest,) = expected
      self.branches[computation.name, instruction.name] = dearest
      is_product = any(flops for flops, _ in weights)
      if len(set(weights)) > 1 and is_product and len(expected) > 1:
        part = name_stack.part(instruction.op_name) or instruction.name
        self.notes.append(
          f"The branches of a conditional in {part} cost differently; the"
          " dearest is counted."
        )
      return [(dearest, 1)]
    return [(name, 1) for name in names]

  def _weight(self, name: str) -> tuple[int, int]:
    """FLOPs and bytes of one run of a computation."""
    if name not in self._weights:
      computation = self._program.computations[name]
      flops = hbm_bytes = 0
      for instruction in computation.instructions.values():
        cost = self._cost(instruction, computation)
        flops += cost.flops
        hbm_bytes += cost.hbm_bytes
        for inner, times in self._run(instruction, computation):
          more = self._weight(inner)
          flops += times * more[0]
          hbm_bytes += times * more[1]
      self._weights[name] = flops, hbm_bytes
    return self._weights[name]


def _cost(
  instruction: hlo.Instruction,
  computation: hlo.Computation,
  program: hlo.Program,
) -> Cost:
  opcode = instruction.opcode
  if traffic.is_free(instruction):
    kind = LOOP if opcode == "while" else NONE
    kind = CALL if instruction.runs and kind is NONE else kind
    return Cost(flops=0, dtype="", hbm_bytes=0, kind=kind, name="")
  inside = [(instruction, computation)]
  if opcode in hlo.FUSIONS:
    inside = list(_inside(instruction, program))
  # A fusion of a loop may hold a kernel that reads or writes one slice.
  calls = [placed for placed in inside if _flops_of_call(*placed) != 0]
  found = list(_matmuls(inside))
  names = map(kernels.name, (instruction, *(call for call, _ in calls)))
  return Cost(
    flops=sum(matmul.flops for matmul in found),
    dtype=max(found, key=lambda matmul: matmul.flops).dtype if found else "",
    hbm_bytes=traffic.num_bytes(instruction, computation, program),
    kind=_kind(instruction, inside, found),
    # A fusion may be named for what it ends with.
    name=_name_of_matmul(inside) or instruction.op_name,
    kernel=next(filter(None, names), ""),
    is_approximate=any(_flops_of_call(*placed) is None for placed in calls),
  )


_Placed = tuple[hlo.Instruction, hlo.Computation]


def _inside(
  instruction: hlo.Instruction, program: hlo.Program
) -> Iterator[_Placed]:
  """Instructions in a fusion, and in fusions inside it."""
  for name in instruction.get_called("calls"):
    computation = program.computations[name]
    for inner in computation.instructions.values():
      if inner.opcode == "fusion":
        yield from _inside(inner, program)
      yield inner, computation


def _matmuls(placed: list[_Placed]) -> Iterator[matmuls.Matmul]:
  for instruction, computation in placed:
    matmul = matmuls.find_matmul(instruction, computation)
    flops = _flops_of_call(instruction, computation)
    if flops:
      factors = kernels.factors(_operands(instruction, computation))
      dtype = matmuls.dtype_name(max(factors, key=lambda t: t.bits).dtype)
      matmul = matmuls.Matmul(flops, dtype, is_batched=False)
    if matmul is not None:
      yield matmul


def _flops_of_call(
  instruction: hlo.Instruction, computation: hlo.Computation
) -> int | None:
  """FLOPs of a kernel, None without a formula; 0 of all that is no kernel."""
  if instruction.opcode != "custom-call":
    return 0
  return kernels.flops(instruction, _operands(instruction, computation))


def _operands(
  call: hlo.Instruction, computation: hlo.Computation
) -> list[hlo.Type]:
  return [computation.instructions[name].type for name in call.operands]


def _name_of_matmul(inside: list[_Placed]) -> str:
  for instruction, computation in inside:
    is_matmul = instruction.opcode in ("dot", "convolution")
    if is_matmul or _flops_of_call(instruction, computation) != 0:
      return instruction.op_name
  return ""


def _kind(
  instruction: hlo.Instruction,
  placed: list[_Placed],
  found: list[matmuls.Matmul],
) -> str:
  if instruction.opcode == "custom-call":
    return _kind_of_call(instruction)
  for inner, computation in placed:
    if _flops_of_call(inner, computation) != 0:
      return _kind_of_call(inner)
  inside = [inner for inner, _ in placed]
  if found:
    is_batched = any(matmul.is_batched for matmul in found)
    is_attention = any(
      _is_attention(inner.op_name, is_batched=is_batched)
      for inner in inside
      if inner.opcode in ("dot", "convolution")
    )
    return ATTENTION if is_attention else MATMUL
  opcodes = {inner.opcode for inner in inside}
  if any(o.removesuffix("-start") in _TRANSFERS for o in opcodes):
    return COLLECTIVE
  return COPY if opcodes <= _MOVES else ELEMENTWISE


def _kind_of_call(call: hlo.Instruction) -> str:
  target = kernels.target(call)
  if kernels.is_attention(target) or kernels.is_splash(call):
    return ATTENTION
  if target.startswith("__cudnn$conv"):
    return CONVOLUTION
  is_matmul = target.startswith("__cublas")
  is_matmul = is_matmul or name_stack.is_grouped(call.op_name)
  return MATMUL if is_matmul else KERNEL


def _is_attention(stack: str, *, is_batched: bool) -> bool:
  """Whether a matmul is of queries with keys, or of weights with values.

  Gradients of projections may have batch dimensions too, so that an equation
  says more than the name of the module. One sequence and one head have none.
  """
  equations = re.findall(r"[\w.,]+->\w+", stack)
  if equations:
    return {"T", "S"} <= set(equations[-1])
  return is_batched and "attention" in name_stack.part(stack).lower()
