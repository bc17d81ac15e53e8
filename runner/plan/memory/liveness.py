"""The most that is in memory at once while a graph is executed.

Operations run in the order of the program. A value with memory of its own is
there from the operation that computes it to the last one that reads it, itself
or through what is fused. An elementwise result takes the place of an operand
that nothing reads later; a product's cannot.
"""

from collections.abc import Iterator
import dataclasses

from paxon.runner.plan.memory import buffers as buffers_lib
from paxon.runner.plan.memory import graph as graphs
from paxon.runner.plan.memory import schedule

_Node, _Value = graphs.Node, graphs.Value


@dataclasses.dataclass(frozen=True)
class Use:
  """Memory at one moment.

  Attributes:
    total: Bytes of one device, arguments excluded.
    at: The operation, and those around it, outermost first.
    parts: What is there, as (bytes, operation), from the outermost graph in.
  """

  total: int
  at: tuple[str, ...] = ()
  parts: tuple[tuple[int, str], ...] = ()


def peak(
  graph: graphs.Graph,
  mesh: dict[str, int],
  *,
  given: frozenset[_Value],
  num_carry: int = 0,
  is_hiding: bool = False,
) -> Use:
  """Returns the moment of the largest use.

  Args:
    graph: A program, or the body of a loop, whose sharding is settled.
    mesh: Sizes of the mesh axes.
    given: Inputs whose memory is counted by others.
    num_carry: How many outputs of a body the next iteration gets.
    is_hiding: Whether the order hides communication; otherwise it is the one
      that needs less.
  """
  critical = schedule.critical_first(graph, num_carry)
  use = _Simulation(critical, mesh, given, is_hiding).peak()
  if is_hiding:
    return use
  other = _Simulation(graph, mesh, given, is_hiding).peak()
  return min(use, other, key=lambda use: use.total)


class _Simulation:
  """Intervals of the buffers of one graph; two ticks to an operation."""

  def __init__(
    self,
    graph: graphs.Graph,
    mesh: dict[str, int],
    given: frozenset[_Value],
    is_hiding: bool,
  ) -> None:
    self._graph = graph
    self._mesh = mesh
    self._given = given
    self._is_hiding = is_hiding
    self._buffers = buffers_lib.Buffers(graph, mesh)
    self._first: dict[_Value, int] = {}
    self._last: dict[_Value, int] = {}
    self._copies: dict[_Value, list[int]] = {}
    self._extra: dict[int, Use] = {}
    self._partial: list[tuple[int, int, int]] = []

  def peak(self) -> Use:
    end = len(self._graph.nodes)
    self._find_reads()
    self._find_births(end)
    return self._sweep(end)

  def _find_reads(self) -> None:
    graph, buffers = self._graph, self._buffers
    wanted = {buffers.root(v) for v in graph.outputs if v is not None}
    for t, node in enumerate(graph.nodes):
      computes = buffers_lib.is_whole(node) or any(
        v is not None and (v in buffers.owners or v in wanted)
        for v in node.outputs
      )
      if not computes:
        continue
      for value in buffers.read_by(node):
        self._last[value] = t
      for value in node.inputs if node.op == "dot_general" else ():
        copied = None if value is None else buffers.root(value)
        if copied in buffers.gathers:
          self._copies.setdefault(copied, [t, t])[1] = t

  def _find_births(self, end: int) -> None:
    graph, buffers = self._graph, self._buffers
    for value in graph.inputs:
      if value in self._last and value not in self._given:
        # A slice of a stack is copied where it is an operand of a product.
        first = self._first_use(value)
        if first is not None:
          self._first[value] = 2 * first
    for t, node in enumerate(graph.nodes):
      for value in node.outputs:
        if value is None or value not in buffers.owners:
          continue
        self._first[value] = 2 * t + self._in_place(node, value, t)
        self._last.setdefault(value, t)
        if self._is_ready(node, value):
          self._first[value] = 0
      if node.bodies:
        self._loop(node, t)
      elif node in buffers.partial:
        self._partial.append((2 * t, 2 * end, buffers.partial[node]))
    for value in self._kept():
      if value in self._first:
        self._last[value] = end

  def _is_ready(self, node: _Node, value: _Value) -> bool:
    """Whether a value begins with zeros, which wait for nothing."""
    if node.op == "scan":
      return node.outputs.index(value) >= node.params["num_carry"]
    return node.op == "broadcast_in_dim" and not self._buffers.read_by(node)

  def _kept(self) -> Iterator[_Value]:
    for value in self._graph.outputs:
      if (
        value is not None and self._buffers.root(value) in self._buffers.owners
      ):
        yield self._buffers.root(value)

  def _first_use(self, value: _Value) -> int | None:
    for t, node in enumerate(self._graph.nodes):
      if buffers_lib.is_whole(node) and any(
        v is not None and self._buffers.root(v) is value for v in node.inputs
      ):
        return t
    return None

  def _in_place(self, node: _Node, value: _Value, t: int) -> int:
    """One if the result takes the place of an operand, else zero."""
    if buffers_lib.is_whole(node) or node.op == buffers_lib.LAYOUT_COPY:
      return 0
    size = self._buffers.size(value)
    for source in self._buffers.read_by(node):
      is_counted = source in self._first
      if (
        is_counted
        and self._last.get(source) == t
        and self._buffers.size(source) == size
      ):
        return 1
    return 0

  def _loop(self, node: _Node, t: int) -> None:
    """Adds what the body of a loop needs beside its inputs and results."""
    uses = []
    for body in node.bodies:
      num_consts, num_carry = _sizes(node, body)
      given = frozenset(body.inputs[: num_consts + num_carry])
      uses.append(
        peak(
          body,
          self._mesh,
          given=given,
          num_carry=num_carry,
          is_hiding=self._is_hiding,
        )
      )
      for i in range(num_carry):
        self._share_carry(node, node.inputs[num_consts + i], i, t)
    self._extra[t] = max(uses, key=lambda use: use.total)

  def _share_carry(
    self, node: _Node, initial: _Value | None, i: int, t: int
  ) -> None:
    out = node.outputs[i]
    if out is None:
      return
    if initial is not None:
      source = self._buffers.root(initial)
      if source in self._first and self._last.get(source) == t:
        self._first[out] = 2 * t + 1

  def _spans(self) -> list[tuple[int, int, int, _Value | None]]:
    """First and last tick, bytes, and what it is, of all memory."""
    spans: list[tuple[int, int, int, _Value | None]] = []
    for value, first in self._first.items():
      last = 2 * self._last.get(value, first // 2)
      size = self._buffers.size(value)
      spans.append((first, max(last, first), size, value))
    for value, (first, last) in self._copies.items():
      size = self._buffers.gathers[value]
      spans.append((2 * first, 2 * last, size, value))
    # Sums over devices are joined to one at the end.
    spans += [(*partial, None) for partial in self._partial]
    return spans

  def _sweep(self, end: int) -> Use:
    changes = [0] * (2 * end + 4)
    spans = self._spans()
    for first, last, size, _ in spans:
      changes[first] += size
      changes[last + 1] -= size
    best, at, now = 0, 0, 0
    for tick in range(2 * end + 2):
      now += changes[tick]
      use = now + self._inside(tick).total
      if use > best:
        best, at = use, tick
    inner = self._inside(at)
    is_end = at // 2 >= end
    op = "end" if is_end else _described(self._graph.nodes[at // 2])
    live = sorted(
      (
        (size, "sum" if v is None or v.node is None else v.node.op)
        for first, last, size, v in spans
        if first <= at <= last
      ),
      reverse=True,
    )
    return Use(best, (op, *inner.at), (*live, *inner.parts))

  def _inside(self, tick: int) -> Use:
    """What the loop that runs at a tick needs inside."""
    return self._extra.get(tick // 2, Use(0)) if tick % 2 == 0 else Use(0)


def _sizes(node: _Node, body: graphs.Graph) -> tuple[int, int]:
  """Numbers of constants and carries of a body."""
  if node.op == "scan":
    return node.params["num_consts"], node.params["num_carry"]
  if node.op == "while":
    consts = node.params["body_nconsts"]
    return consts, len(body.inputs) - consts
  return len(body.inputs), 0


def _described(node: _Node) -> str:
  shapes = [v.shape for v in node.outputs if v is not None]
  return f"{node.op}{list(shapes[0])}" if shapes else node.op
