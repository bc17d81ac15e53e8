"""Walks the schedule of a compiled program and adds up time.

The instructions of a scheduled program run one after the other:

  clock += max(FLOPs / matmul rate, bytes / memory rate)

A collective takes the time that `network` gives: one that is synchronous stops
the clock, one with a start and a done queues on its links and is waited for at
the done. So what is hidden behind other work, and what is not, follows from
the schedule; there is no factor for overlap. Asynchronous copies run while
memory is otherwise idle; those to or from the memory of the host queue on its
link and are waited for as collectives are. Loops are walked, a second time if
the first leaves work to the next, and multiplied by their trips.
"""

from collections.abc import Iterator, Mapping
import copy
import dataclasses
import math
import re
from typing import Final

from paxon.runner.plan import network, result
from paxon.runner.plan.estimate import efficiency
from paxon.runner.plan.program_text import (
  costs,
  hlo,
  kernels,
  traffic,
  trip_counts,
)

# Keys of the sums; mesh axes are the others.
COMPUTE: Final = "compute of products"
MEMORY: Final = "memory"
OVERHEAD: Final = "overhead"

_RENDEZVOUS: Final = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
# Kinds of costs that are no kernels.
_FREE: Final = (costs.NONE, costs.CALL, costs.LOOP)


class NotPredictedError(ValueError):
  """A program whose time is not known; the text is why."""


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Times of one run of a program, in seconds.

  Attributes:
    compute: In instructions that products bound.
    memory: In instructions that the memory bounds.
    overhead: Between kernels.
    exposed: Waiting for collectives, by mesh axes with commas between.
  """

  compute: float
  memory: float
  overhead: float
  exposed: Mapping[str, float]

  @property
  def total(self) -> float:
    """All of it."""
    parts = (self.compute, self.memory, self.overhead, *self.exposed.values())
    return math.fsum(parts)

  def stretch(self, multiple: float) -> "Timeline":
    """Returns the timeline with all times multiplied."""
    return Timeline(
      self.compute * multiple,
      self.memory * multiple,
      self.overhead * multiple,
      {axes: seconds * multiple for axes, seconds in self.exposed.items()},
    )


Key = tuple[str, str]


def simulate(
  program: hlo.Program,
  *,
  operations: Mapping[Key, costs.Cost],
  transfers: Mapping[Key, network.Transfer],
  rates: efficiency.Rates,
  attention_share: float = 1.0,
) -> Timeline:
  """Simulates one run of a program.

  Args:
    program: The compiled program of one device.
    operations: Costs by computation and instruction.
    transfers: Its collectives by computation and instruction, those inside
      fusions by their own names.
    rates: Of the device.
    attention_share: Share of their FLOPs that attention kernels compute,
      because they skip masked blocks; for kernels whose text does not say it.

  Returns:
    Its time.

  Raises:
    NotPredictedError: Something about it is not known.
  """
  walker = _Walker(program, operations, transfers, rates, attention_share)
  state = _State()
  walker.walk(program.entry, state)
  sums = dict(state.sums)
  compute, memory, overhead = (
    sums.pop(name, 0.0) for name in (COMPUTE, MEMORY, OVERHEAD)
  )
  return Timeline(
    compute, memory, overhead, dict(sorted(sums.items(), key=lambda x: -x[1]))
  )


class _State:
  """The clock, and what is under way."""

  def __init__(self) -> None:
    self.sums: dict[str, float] = {}
    self.clock = 0.0
    # When each queue is free.
    self.free: dict[str, float] = {}
    # When each transfer ends, by the instruction that started it.
    self.ends: dict[str, tuple[float, str]] = {}
    # Seconds of memory traffic of copies under way, the oldest first.
    self.copies: dict[str, float] = {}

  def spend(self, what: str, seconds: float, *, memory: float = 0.0) -> None:
    """Moves the clock; for `memory` of it the memory is busy."""
    self.sums[what] = self.sums.get(what, 0.0) + seconds
    self.clock += seconds
    self._drain(max(seconds - memory, 0.0))

  def start(
    self, name: str, transfer: network.Transfer, *, at: float | None = None
  ) -> None:
    """Queues a transfer, of data that are there now or since `at`."""
    assert transfer.seconds is not None
    ready = self.clock if at is None else at
    end = max(ready, self.free.get(transfer.queue, 0.0)) + transfer.seconds
    self.free[transfer.queue] = end
    self.ends[name] = end, transfer.axes

  def wait(self, name: str) -> None:
    end, axes = self.ends.pop(name, (0.0, ""))
    if end > self.clock:
      self.spend(axes, end - self.clock)

  def wait_for_copy(self, name: str) -> None:
    if name in self.copies:
      names = list(self.copies)
      # They follow each other, so all before it end first.
      before = names[: names.index(name) + 1]
      self.spend(MEMORY, math.fsum(self.copies[n] for n in before))
      for each in before:
        self.copies.pop(each, None)

  def is_busy(self) -> bool:
    """Whether anything is left over for the next instruction."""
    return bool(self.copies) or any(t > self.clock for t in self.free.values())

  def repeat(self, before: "_State", times: int) -> None:
    """Adds what has happened since `before` so many times more."""
    added = times * (self.clock - before.clock)
    for what, seconds in self.sums.items():
      self.sums[what] += times * (seconds - before.sums.get(what, 0.0))
    self.clock += added
    for queue, end in self.free.items():
      if end != before.free.get(queue):
        self.free[queue] = end + added
    for name, (end, axes) in self.ends.items():
      if (end, axes) != before.ends.get(name):
        self.ends[name] = end + added, axes

  def _drain(self, seconds: float) -> None:
    for name in list(self.copies):
      done = min(seconds, self.copies[name])
      self.copies[name] -= done
      seconds -= done
      if self.copies[name] > 0:
        return
      del self.copies[name]


class _Walker:
  """Walks computations and changes a state."""

  def __init__(
    self,
    program: hlo.Program,
    operations: Mapping[Key, costs.Cost],
    transfers: Mapping[Key, network.Transfer],
    rates: efficiency.Rates,
    attention_share: float,
  ) -> None:
    self._program = program
    self._attention_share = attention_share
    self._operations = operations
    self._transfers = transfers
    self._rates = rates
    for transfer in transfers.values():
      if transfer.seconds is None:
        raise NotPredictedError(
          f"the bandwidth of the network along {transfer.axes} is not known"
        )

  def walk(self, computation: hlo.Computation, state: _State) -> None:
    """Runs a computation once."""
    parts = self._parts(computation)
    for instruction in computation.instructions.values():
      opcode = instruction.opcode
      if opcode == "while":
        self._loop(instruction, computation, state)
      elif opcode == "conditional":
        self._choose(instruction, state)
      elif opcode == "call":
        for name in instruction.runs:
          self.walk(self._program.computations[name], state)
      elif opcode in ("send", "recv", "send-done", "recv-done"):
        self._between_slices(instruction, computation, state)
      elif opcode.endswith(("-done", "-update")):
        self._finish(instruction, state)
      else:
        self._run(instruction, computation, state, parts)

  def _loop(
    self, loop: hlo.Instruction, caller: hlo.Computation, state: _State
  ) -> None:
    trips = trip_counts.find_trip_count(loop, caller, self._program)
    if trips is None:
      raise NotPredictedError(
        f"the trips of the loop {loop.name} are not known"
      )
    (name,) = loop.get_called("body")
    body = self._program.computations[name]
    for trip in range(min(trips, 2)):
      before = copy.deepcopy(state)
      self.walk(body, state)
      # The first trip is like all others if nothing is under way before and
      # after it; otherwise the second is.
      if trip or not (before.is_busy() or state.is_busy()):
        state.repeat(before, trips - trip - 1)
        return

  def _choose(self, instruction: hlo.Instruction, state: _State) -> None:
    """Takes the expected branch, or else the dearest."""
    ends = []
    for name in costs.find_branches(instruction, self._program):
      branch = copy.deepcopy(state)
      self.walk(self._program.computations[name], branch)
      ends.append(branch)
    dearest = max(ends, key=lambda branch: branch.clock, default=state)
    vars(state).update(vars(dearest))

  def _between_slices(
    self,
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    state: _State,
  ) -> None:
    """A send starts a transfer, and the receiver of the same name waits."""
    opcode = instruction.opcode
    if opcode.endswith("-done"):
      instruction = computation.instructions[instruction.operands[0]]
    match = _RENDEZVOUS.search(instruction.attributes)
    transfer = self._transfers.get((computation.name, instruction.name))
    if match is None or (opcode == "send" and transfer is None):
      raise NotPredictedError(f"{instruction.name} has no known destination")
    if opcode == "send":
      assert transfer is not None
      state.start(match[1], transfer)
    elif opcode == "recv-done":
      state.wait(match[1])

  def _finish(self, instruction: hlo.Instruction, state: _State) -> None:
    if instruction.opcode.endswith("-update"):
      return
    started = instruction.operands[0]
    state.wait(started)
    state.wait_for_copy(started)

  def _run(
    self,
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    state: _State,
    parts: Mapping[str, str],
  ) -> None:
    """Runs what is one kernel, one collective, or one part of one."""
    name, begin = instruction.name, state.clock
    moved = traffic.host_bytes(instruction.type)
    if moved and instruction.opcode.endswith("-start"):
      self._overhead(state)
      state.start(name, self._copy_to_host(moved))
      return
    transfer = self._transfer(instruction, computation)
    if transfer is None or parts.get(name, name) != name:
      # The first of several fusions with a collective has started it.
      self._compute(instruction, computation, state)
      state.wait(name)
      return
    last = next((n for n, first in parts.items() if first == name), name)
    if instruction.opcode == "fusion":
      self._compute(instruction, computation, state)
    else:
      self._overhead(state)
    if last != name or instruction.opcode.endswith("-start"):
      state.start(last, transfer)
    else:
      # A fusion processes incoming data while they arrive.
      state.start(name, transfer, at=begin)
      state.wait(name)

  def _copy_to_host(self, num_bytes: int) -> network.Transfer:
    """Returns the time of a copy between the device and its host."""
    if self._rates.host is None:
      raise NotPredictedError(
        "the bandwidth to the memory of the host is not known"
      )
    return network.Transfer(
      seconds=num_bytes / self._rates.host,
      axes=result.HOST,
      queue=result.HOST,
      is_network=False,
    )

  def _compute(
    self,
    instruction: hlo.Instruction,
    computation: hlo.Computation,
    state: _State,
  ) -> None:
    cost = self._operations.get((computation.name, instruction.name))
    if cost is None:
      raise NotPredictedError(
        f"what {instruction.name} ({instruction.opcode}) costs is not known"
      )
    if cost.is_approximate:
      raise NotPredictedError(
        f"there is no formula for the kernel {instruction.name}"
      )
    if cost.kind in _FREE:
      return
    memory = cost.hbm_bytes / self._rates.memory
    if instruction.opcode.endswith("-start") and not cost.flops:
      state.copies[instruction.name] = memory
      return
    compute = self._products(cost, instruction)
    what = COMPUTE if compute > memory else MEMORY
    state.spend(what, max(compute, memory), memory=memory)
    self._overhead(state)

  def _products(self, cost: costs.Cost, instruction: hlo.Instruction) -> float:
    if not cost.flops:
      return 0.0
    is_kernel = cost.kind == costs.ATTENTION and (
      instruction.opcode == "custom-call"
    )
    rate = self._rates.flops(cost.dtype, is_attention=is_kernel)
    if rate is None:
      raise NotPredictedError(f"the rate of {cost.dtype} matmuls is not known")
    if not is_kernel:
      return cost.flops / rate
    # Costs count all pairs of positions.
    share = kernels.computed_share(instruction)
    if share is None:
      share = self._attention_share
    kernel = kernels.target(instruction)
    if kernels.is_attention(kernel):
      rate *= self._rates.attention_factor(
        kernels.head_dim(instruction), has_bias=kernels.has_bias(kernel)
      )
    return cost.flops * share / rate

  def _overhead(self, state: _State) -> None:
    if self._rates.kernel_overhead:
      state.spend(OVERHEAD, self._rates.kernel_overhead)

  def _transfer(
    self, instruction: hlo.Instruction, computation: hlo.Computation
  ) -> network.Transfer | None:
    own = self._transfers.get((computation.name, instruction.name))
    if own is not None:
      return own
    for inner, part in self._inside(instruction):
      found = self._transfers.get((inner, part.name))
      if found is not None:
        return found
    return None

  def _inside(
    self, instruction: hlo.Instruction
  ) -> Iterator[tuple[str, hlo.Instruction]]:
    """The collectives in a fusion, or that an asynchronous call starts."""
    if instruction.opcode in (*hlo.FUSIONS, "call-start"):
      for name in instruction.runs:
        for inner in self._program.computations[name].instructions.values():
          if inner.opcode in traffic.COLLECTIVES:
            yield name, inner
          elif inner.opcode == "fusion":
            yield from self._inside(inner)

  def _parts(self, computation: hlo.Computation) -> dict[str, str]:
    """The first of the fusions that hold one collective, by the later ones.

    The last of them comes first.
    """
    met: dict[str, list[str]] = {}
    for instruction in computation.instructions.values():
      for _, inner in self._inside(instruction):
        channel = inner.attribute("channel_id")
        if channel is not None:
          names = met.setdefault(f"{inner.opcode} {channel}", [])
          names.append(instruction.name)
    return {
      name: names[0] for names in met.values() for name in reversed(names[1:])
    }
