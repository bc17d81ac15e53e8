"""Activations saved for the backward pass, by remat name."""

from collections.abc import Iterator

from paxon.runner.plan.memory import buffers as buffers_lib
from paxon.runner.plan.memory import graph as graphs

LAYER_INPUTS = "layer inputs"
UNNAMED = "unnamed"

_Value = graphs.Value


def saved(graph: graphs.Graph, mesh: dict[str, int]) -> dict[str, int]:
  """Returns bytes of one device by remat name, largest first.

  Args:
    graph: Of a training step, whose sharding is settled.
    mesh: Sizes of the mesh axes.
  """
  for level in _levels(graph):
    # With microbatches, both passes are inside of their loop.
    if any(node.is_backward for node in level.nodes):
      sums = _of_level(level, mesh)
      return dict(sorted(sums.items(), key=lambda item: -item[1]))
  return {}


def gradients(graph: graphs.Graph, mesh: dict[str, int]) -> int:
  """Returns bytes of one device that the backward pass gives the optimizer."""
  buffers = buffers_lib.Buffers(graph, mesh)
  computed = {
    value
    for node in graph.nodes
    if _has_backward(node)
    for value in node.outputs
    if value is not None
  }
  found: set[_Value] = set()
  for node in graph.nodes:
    if not _has_backward(node):
      found |= buffers.read_by(node) & computed
  return sum(buffers.size(v) for v in found)


def _has_backward(node: graphs.Node) -> bool:
  return node.is_backward or any(
    _has_backward(inner) for body in node.bodies for inner in body.nodes
  )


def _levels(graph: graphs.Graph) -> Iterator[graphs.Graph]:
  """The graph, and the bodies of its loops: one may be of microbatches."""
  yield graph
  for node in graph.nodes:
    for body in node.bodies:
      yield from _levels(body)


def _of_level(graph: graphs.Graph, mesh: dict[str, int]) -> dict[str, int]:
  buffers = buffers_lib.Buffers(graph, mesh)
  given = set(graph.inputs)
  held: set[_Value] = set()
  names: dict[_Value, str] = {}
  for node in graph.nodes:
    for value in node.outputs:
      if value is not None and value.name is not None:
        names[buffers.root(value)] = value.name
    if not node.is_backward:
      continue
    for value in buffers.read_by(node):
      is_forward = value.node is not None and not value.node.is_backward
      if is_forward and value not in given:
        held.add(value)
  sums: dict[str, int] = {}
  for value in held:
    # The host holds what has no bytes here.
    if size := buffers.size(value):
      name = names.get(value) or _name(value)
      sums[name] = sums.get(name, 0) + size
  return sums


def _name(value: _Value) -> str:
  """The name of what a loop stacks, or of a block's input."""
  node = value.node
  assert node is not None
  if node.op != "scan":
    return LAYER_INPUTS if value.is_block_input else UNNAMED
  (body,) = node.bodies
  inner = body.outputs[node.outputs.index(value)]
  assert inner is not None
  first = graphs.root(inner)
  num_consts, num_carry = node.params["num_consts"], node.params["num_carry"]
  if first in body.inputs[num_consts : num_consts + num_carry]:
    return LAYER_INPUTS
  for inside in body.nodes:
    for out in inside.outputs:
      if out is not None and out.name and graphs.root(out) is first:
        return out.name
  return UNNAMED
