"""The order in which operations are executed.

Compilers for accelerators schedule from the end of the program to hide
communication: what the next iteration waits for comes first, each value as
late as it can; what only the results of the loop need, such as gradients of
weights, waits until the end of the body. Elementwise results of the loop are
written at once, which frees what they are made of. Outside of loops, what a
loop waits for comes first in the same way.
"""

from collections.abc import Iterable, Sequence

from paxon.runner.plan.memory import buffers as buffers_lib
from paxon.runner.plan.memory import graph as graphs

_Node, _Value = graphs.Node, graphs.Value


def critical_first(graph: graphs.Graph, num_carry: int) -> graphs.Graph:
  """Returns a graph whose nodes are in the order of execution.

  Args:
    graph: A program, or the body of a loop.
    num_carry: How many outputs of a body the next iteration gets.
  """
  loops = [node for node in graph.nodes if node.bodies]
  if loops:
    first = [value for node in loops for value in node.outputs]
    # Sums, such as metrics, are taken as soon as they can.
    sums = [node for node in graph.nodes if node.op in buffers_lib.REDUCTIONS]
    then = [value for node in sums for value in node.outputs]
  else:
    first, then = graph.outputs[:num_carry], graph.outputs[num_carry:]
  nodes = _ordered(first, then)
  if loops:
    placed = set(nodes)
    nodes += [node for node in graph.nodes if node not in placed]
  return graphs.Graph(graph.inputs, graph.outputs, nodes)


def _ordered(
  first: Sequence[_Value | None], then: Sequence[_Value | None]
) -> list[_Node]:
  """Returns what `first` needs, with what else `then` needs in between."""
  waited = _needed(first, done=set())
  place = {node: float(i) for i, node in enumerate(waited)}
  late: list[_Node] = []
  for value in then:
    more = _needed([value], done={*place, *late})
    waits = any(
      buffers_lib.is_whole(node) or _depends(node, late) for node in more
    )
    if waits:
      late += more
      continue
    for node in more:
      # Behind what it is made of, and before what comes next.
      place[node] = max(_places(node, place), default=-1.0) + 2.0**-20
  early = sorted(place, key=lambda node: place[node])
  return early + late


def _places(node: _Node, place: dict[_Node, float]) -> Iterable[float]:
  for value in node.inputs:
    if value is not None and value.node in place:
      yield place[value.node]


def _depends(node: _Node, others: list[_Node]) -> bool:
  return any(v is not None and v.node in others for v in node.inputs)


def _needed(
  values: Iterable[_Value | None], *, done: set[_Node]
) -> list[_Node]:
  """Returns the nodes that values need, each behind what it needs itself."""
  order: list[_Node] = []
  for value in values:
    todo = [] if value is None or value.node is None else [(value.node, False)]
    while todo:
      node, is_ready = todo.pop()
      if node in done:
        continue
      if is_ready:
        done.add(node)
        order.append(node)
        continue
      todo.append((node, True))
      todo += [
        (v.node, False)
        for v in reversed(node.inputs)
        if v is not None and v.node is not None and v.node not in done
      ]
  return order
