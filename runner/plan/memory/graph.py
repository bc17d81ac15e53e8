"""A jaxpr as one flat graph per loop, for sharding and liveness.

Calls (`jit`, `remat`, custom derivatives) are inlined, because a compiler does
so; loops and branches keep a graph of their own. What nothing needs is left
out, inside of loops too.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.extend import core

# One tuple of mesh axes per dimension.
Spec = tuple[tuple[str, ...], ...]

# Values of these are the operand itself, in another shape or by another name.
ALIASES = frozenset(
  {
    "bitcast_convert_type",
    "copy",
    "copy_p",
    "expand_dims",
    "name",
    "optimization_barrier",
    "reduce_precision",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "stop_gradient",
    "transpose",
  }
)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
  """One array.

  Attributes:
    shape: Of the whole array, or of one device's part inside of `shard_map`.
    itemsize: Bytes of an element; zero in the memory of the host.
    is_floating: Whether it can be a part of a gradient.
    node: What computes it; `None` for what a graph is given.
    spec: Mesh axes that split each dimension.
    is_fixed: Whether a constraint or an argument settles `spec`.
    name: Its remat name.
    is_block_input: Whether a rematerialized block begins with it.
  """

  shape: tuple[int, ...]
  itemsize: int
  is_floating: bool
  node: "Node | None" = None
  spec: Spec = ()
  is_fixed: bool = False
  name: str | None = None
  is_block_input: bool = False

  def __post_init__(self) -> None:
    if not self.spec:
      self.spec = ((),) * len(self.shape)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
  """One operation.

  Attributes:
    op: The primitive's name.
    params: Its parameters.
    inputs: Operands; `None` for literals.
    outputs: Results; `None` for those that nothing needs.
    stack: Its name stack.
    bodies: The graph of a loop's body, or those of branches.
  """

  op: str
  params: Any
  inputs: "list[Value | None]"
  outputs: "list[Value | None]"
  stack: str
  bodies: "list[Graph]" = dataclasses.field(default_factory=list)

  @property
  def is_backward(self) -> bool:
    """Whether it belongs to the backward pass, recomputation included."""
    return "transpose(" in self.stack or "rematted" in self.stack


@dataclasses.dataclass(eq=False, slots=True)
class Graph:
  """Operations in order, between what is given and what is wanted."""

  inputs: "list[Value]"
  outputs: "list[Value | None]"
  nodes: "list[Node]"

  def values(self) -> Iterator[Value]:
    """All values, bodies excluded."""
    yield from self.inputs
    for node in self.nodes:
      yield from (v for v in node.outputs if v is not None)


def of(jaxpr: core.ClosedJaxpr) -> Graph:
  """Returns the graph of a program."""
  return _body(jaxpr, "", None)


def _body(
  jaxpr: core.ClosedJaxpr, stack: str, wanted: Sequence[bool] | None
) -> Graph:
  """Returns the graph of a jaxpr of which some outputs are wanted."""
  open_jaxpr = jaxpr.jaxpr
  inputs = [_value(v.aval) for v in open_jaxpr.invars]
  builder = _Builder()
  outputs = builder.inline(open_jaxpr, inputs, stack)
  if wanted is not None:
    outputs = [v if w else None for v, w in zip(outputs, wanted, strict=True)]
  return _pruned(Graph(inputs, outputs, builder.nodes))


class _Builder:
  """Collects the nodes of one graph."""

  def __init__(self) -> None:
    self.nodes: list[Node] = []
    self._converted: dict[tuple[Value, Any], Value] = {}

  def inline(
    self, jaxpr: core.Jaxpr, arguments: Sequence[Value | None], stack: str
  ) -> list[Value | None]:
    """Adds the operations of a jaxpr; returns its results."""
    known: dict[Any, Value | None] = dict(
      zip(jaxpr.invars, arguments, strict=True)
    )
    for v in jaxpr.constvars:
      known[v] = _value(v.aval)

    def read(atom: Any) -> Value | None:
      return None if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
      inner = f"{stack}/{eqn.source_info.name_stack}"
      results = self._equation(eqn, [read(v) for v in eqn.invars], inner)
      known.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]

  def _equation(
    self, eqn: Any, inputs: list[Value | None], stack: str
  ) -> list[Value | None]:
    op = eqn.primitive.name
    called = _called(eqn)
    if called is not None:
      if op in ("checkpoint", "remat2", "remat"):
        for value in inputs:
          if value is not None and "transpose(" in stack:
            value.is_block_input = True
      return self.inline(called, inputs, stack)
    if op == "convert_element_type" and inputs[0] is not None:
      # Equal conversions are one.
      key = inputs[0], eqn.params["new_dtype"]
      if key in self._converted:
        return [self._converted[key]]
    outputs: list[Value | None] = [_value(v.aval) for v in eqn.outvars]
    if op == "convert_element_type" and inputs[0] is not None:
      assert outputs[0] is not None
      self._converted[inputs[0], eqn.params["new_dtype"]] = outputs[0]
    node = Node(op, _params(eqn), inputs, outputs, stack)
    for value in outputs:
      assert value is not None
      value.node = node
      if op == "name":
        value.name = eqn.params["name"]
    self.nodes.append(node)
    return outputs


def _params(eqn: Any) -> dict[str, Any]:
  """The parameters of an equation, with the same names in every jax.

  jax 0.11 does not say how many of a scan's operands are constants and how many
  are carried, but the shapes do: what a body is given or gives one at a time
  has one dimension less inside.
  """
  params = dict(eqn.params)
  if eqn.primitive.name == "scan":
    body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    params["num_carry"] = sum(
      len(outer.aval.shape) == len(inner.aval.shape)
      for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )
    params["num_consts"] = -params["num_carry"] + sum(
      len(outer.aval.shape) == len(inner.aval.shape)
      for outer, inner in zip(eqn.invars, body.invars, strict=True)
    )
  return params


def _called(eqn: Any) -> core.Jaxpr | None:
  """The jaxpr that an equation calls once with its own operands."""
  if eqn.primitive.name in ("scan", "while", "cond", "pallas_call"):
    return None
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    found = eqn.params.get(key)
    if isinstance(found, core.ClosedJaxpr):
      found = found.jaxpr
    if isinstance(found, core.Jaxpr) and len(found.invars) == len(eqn.invars):
      return found
  return None


def _value(aval: Any) -> Value:
  dtype = getattr(aval, "dtype", None)
  size = getattr(dtype, "itemsize", 0) or 0
  # What remat policies offload.
  if getattr(aval, "memory_space", None) is jax.memory.Space.Host:
    size = 0
  floating = dtype is not None and jax.dtypes.issubdtype(
    dtype, jax.numpy.floating
  )
  return Value(tuple(getattr(aval, "shape", ())), size, floating)


def _pruned(graph: Graph) -> Graph:
  """Drops what no output needs, and builds the bodies of what stays."""
  needed = {v for v in graph.outputs if v is not None}
  kept = []
  for node in reversed(graph.nodes):
    if not needed.intersection(filter(None, node.outputs)):
      continue
    node.outputs = [v if v in needed else None for v in node.outputs]
    _add_bodies(node)
    needed.update(v for v in node.inputs if v is not None)
    kept.append(node)
  return Graph(graph.inputs, graph.outputs, kept[::-1])


def _add_bodies(node: Node) -> None:
  if node.op == "scan":
    _add_scan(node)
  elif node.op == "while":
    params = node.params
    skipped = params["cond_nconsts"]
    node.inputs = node.inputs[skipped:]
    node.bodies = [_body(params["body_jaxpr"], node.stack, None)]
  elif node.op == "cond":
    wanted = [v is not None for v in node.outputs]
    node.bodies = [
      _body(branch, node.stack, wanted) for branch in node.params["branches"]
    ]


def _add_scan(node: Node) -> None:
  """Builds the body without carries that only serve themselves."""
  params = node.params
  num_consts, num_carry = params["num_consts"], params["num_carry"]
  wanted = [v is not None for v in node.outputs]
  while True:
    body = _body(params["jaxpr"], node.stack, wanted)
    used = _used(body)
    carried = body.inputs[num_consts : num_consts + num_carry]
    more = [
      w or (i < num_carry and carried[i] in used) for i, w in enumerate(wanted)
    ]
    if more == wanted:
      break
    wanted = more
  node.inputs = [
    outer if inner in used else None
    for outer, inner in zip(node.inputs, body.inputs, strict=True)
  ]
  node.bodies = [body]


def _used(graph: Graph) -> set[Value]:
  used = {v for v in graph.outputs if v is not None}
  for node in graph.nodes:
    used.update(v for v in node.inputs if v is not None)
  return used


def root(value: Value) -> Value:
  """Returns the value whose memory this one is."""
  while value.node is not None and value.node.op in ALIASES:
    source = value.node.inputs[0]
    if source is None or len(value.node.outputs) > 1:
      break
    value = source
  return value


def device_bytes(value: Value, mesh: dict[str, int]) -> int:
  """Returns the bytes of one device's part."""
  size = value.itemsize
  for length, names in zip(value.shape, value.spec, strict=True):
    size *= -(-length // math.prod(mesh[n] for n in names))
  return size
