"""Buffer allocation: which values of a graph alias others.

Elementwise chains are computed where they are used, so only what must be there
is: operands and results of products, kernels and collectives, results of
reductions, what loops are given and give back. Everything else is *fused*: it
reads the values with memory that it is made of.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math

from paxon.runner.plan.memory import graph as graphs

_Node, _Value = graphs.Node, graphs.Value

PRODUCTS = frozenset(
  {"dot_general", "conv_general_dilated", "ragged_dot_general"}
)
# A node of ours: its operand in another order of dimensions.
LAYOUT_COPY = "layout_copy"
LOOPS = frozenset({"scan", "while", "cond"})
REDUCTIONS = frozenset(
  {
    "argmax",
    "argmin",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_prod",
    "reduce_sum",
  }
)
# Neither fused into what uses them, nor with what they use.
_WHOLE = frozenset(
  {
    "cumlogsumexp",
    "cummax",
    "cumsum",
    "scatter",
    "scatter-add",
    "sort",
    "top_k",
  }
)


class Buffers:
  """The memory of one graph.

  Attributes:
    owners: Values with memory of their own.
    gathers: Of each operand of a product that is split otherwise than it must
      be: the bytes of the gathered copy.
  """

  def __init__(self, graph: graphs.Graph, mesh: dict[str, int]) -> None:
    self._mesh = mesh
    self._graph = graph
    self._sources: dict[_Value, frozenset[_Value]] = {}
    self._aliases: dict[_Value, _Value] = {}
    self.gathers: dict[_Value, int] = {}
    self.partial: dict[_Node, int] = {}
    self.owners = self._find_owners()

  def size(self, value: _Value) -> int:
    """Returns one device's bytes of a value."""
    return graphs.device_bytes(value, self._mesh)

  def root(self, value: _Value) -> _Value:
    """Returns the value whose memory `value` would be."""
    found = self._aliases.get(value)
    if found is None:
      found = value
      while found.node is not None and found.node.op in graphs.ALIASES:
        source = found.node.inputs[0]
        if source is None or self.size(source) != self.size(found):
          break
        found = source
      self._aliases[value] = found
    return found

  def sources(self, value: _Value) -> frozenset[_Value]:
    """Returns the values with memory that reading `value` reads."""
    value = self.root(value)
    if value in self.owners or value.node is None:
      return frozenset((value,))
    found = self._sources.get(value)
    if found is None:
      found = self.read_by(value.node)
      self._sources[value] = found
    return found

  def read_by(self, node: _Node) -> frozenset[_Value]:
    """Returns the values with memory that a node reads."""
    return frozenset().union(
      *(self.sources(v) for v in node.inputs if v is not None)
    )

  def _find_owners(self) -> set[_Value]:
    owners: set[_Value] = set()
    for node in self._graph.nodes:
      if is_whole(node):
        owners.update(v for v in node.outputs if v is not None)
        owners.update(self.root(v) for v in node.inputs if v is not None)
      elif node.op in REDUCTIONS or node.op == LAYOUT_COPY:
        owners.update(v for v in node.outputs if v is not None)
      elif node.op == "gather" and node.inputs[0] is not None:
        owners.add(self.root(node.inputs[0]))
      elif node.op == "sharding_constraint":
        source, out = node.inputs[0], node.outputs[0]
        assert source is not None
        assert out is not None
        if self.size(source) < self.size(out):
          owners.update((self.root(source), out))
      if node.op == "dot_general":
        self._add_communication(node)
    return owners

  def _add_communication(self, node: _Node) -> None:
    """Notes which operands are gathered, and which result is scattered."""
    (out,) = node.outputs
    if out is None:
      return
    (lhs_c, rhs_c), _ = node.params["dimension_numbers"]
    split = {n for names in out.spec for n in names}
    summed: set[str] = set()
    for value, contract in zip(node.inputs, (lhs_c, rhs_c), strict=True):
      if value is None:
        continue
      kept = []
      for d, names in enumerate(value.spec):
        is_summed = d in contract
        if is_summed:
          summed.update(names)
        kept.append(tuple(n for n in names if is_summed or n in split))
      self._note_gather(node, value, tuple(kept), contract)
    scattered = math.prod(self._mesh[n] for n in summed & split)
    # A sum over devices of which each keeps its part.
    if scattered > 1 and self._is_sum(node, summed & split):
      self.partial[node] = self.size(out) * scattered

  def _is_sum(self, node: _Node, names: set[str]) -> bool:
    """Whether both operands are split over `names` where they are summed."""
    (lhs_c, rhs_c), _ = node.params["dimension_numbers"]
    return all(
      v is not None and names <= {n for d in contract for n in v.spec[d]}
      for v, contract in zip(node.inputs, (lhs_c, rhs_c), strict=True)
    )

  def _note_gather(
    self,
    node: _Node,
    value: _Value,
    kept: graphs.Spec,
    contract: Sequence[int],
  ) -> None:
    """Notes a gather of what the other operand does not share."""
    lhs, rhs = node.inputs
    other = rhs if value is lhs else lhs
    (lhs_c, rhs_c), _ = node.params["dimension_numbers"]
    other_contract = rhs_c if value is lhs else lhs_c
    spec = list(kept)
    if other is not None:
      taken = {
        n
        for d, names in enumerate(other.spec)
        if d not in other_contract
        for n in names
      }
      for d in contract:
        spec[d] = tuple(n for n in spec[d] if n not in taken)
    whole = dataclasses.replace(value, spec=tuple(spec))
    if self.size(whole) > self.size(value):
      self.gathers[self.root(value)] = self.size(whole)


def is_whole(node: _Node) -> bool:
  """Whether operands and results of a node must be in memory."""
  return (
    node.op in PRODUCTS
    or node.op in LOOPS
    or node.op in _WHOLE
    or node.op in ("pallas_call", "custom_call", "ffi_call", "shard_map")
    or "attention" in node.op
  )


def total(values: Iterable[_Value], mesh: dict[str, int]) -> int:
  """Returns one device's bytes of values."""
  return sum(graphs.device_bytes(v, mesh) for v in values)
