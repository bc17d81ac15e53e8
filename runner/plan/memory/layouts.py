"""Copies that compilers make because memory has an order of dimensions.

The result of a product lies in memory with its dimensions in order: batch, then
what is left of the left operand, then of the right one. A transposition only
renames dimensions. Where an elementwise operation meets two orders, or where a
product's operand does not begin with its batch dimensions, one operand is
copied. What a loop reads in another order than the loop before wrote it in is
copied as a whole, between the loops.
"""

from collections.abc import Sequence
import dataclasses
import math

from paxon.runner.plan.memory import buffers as buffers_lib
from paxon.runner.plan.memory import graph as graphs

COPY = buffers_lib.LAYOUT_COPY

_Node, _Value = graphs.Node, graphs.Value
# Dimensions from the slowest to the fastest.
_Order = tuple[int, ...]

_ELEMENTWISE_LIKE = frozenset({"concatenate", "pad", "slice", "split"})
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})


def with_copies(graph: graphs.Graph) -> None:
  """Adds nodes that copy to a graph, and to those of its loops."""
  _Layouts().graph(graph, {})


class _Layouts:
  """Orders of all values; those that nothing has settled are missing."""

  def __init__(self) -> None:
    # In the order in which they were settled.
    self._orders: dict[_Value, _Order] = {}
    # How a loop's slices lie, if nothing asks for more.
    self._stored: dict[_Value, _Order] = {}
    self._copied: dict[tuple[_Value, _Order], _Value] = {}

  def graph(
    self, graph: graphs.Graph, given: dict[_Value, _Order | None]
  ) -> None:
    """Adds the copies of one graph.

    Args:
      graph: Its nodes are replaced.
      given: Orders of its inputs that differ from that of the dimensions;
        `None` for what the first use settles.
    """
    for value in graph.inputs:
      order = given.get(value, _plain(value))
      if order is not None:
        self._orders[value] = order
    nodes: list[_Node] = []
    for node in graph.nodes:
      if node.op == "scan":
        nodes += self._scan(node)
      else:
        for body in node.bodies:
          self.graph(body, {})
        nodes += self._copies(node)
        self._result(node)
      nodes.append(node)
    graph.nodes = nodes

  def _scan(self, node: _Node) -> list[_Node]:
    """Returns copies of stacks that are read in another order."""
    (body,) = node.bodies
    num_consts = node.params["num_consts"]
    first = num_consts + node.params["num_carry"]
    stacks = [
      (i, outer, inner)
      for i, (outer, inner) in enumerate(
        zip(node.inputs, body.inputs, strict=True)
      )
      if i >= first and outer is not None
    ]
    # Stacks of weights lie as they are stored.
    free = [
      (i, outer, inner)
      for i, outer, inner in stacks
      if outer.node is not None and outer.node.op == "scan"
    ]
    given: dict[_Value, _Order | None] = {}
    for _, outer, inner in free:
      given[inner] = None
      self._stored[inner] = tuple(
        d - 1 for d in self._orders.get(outer, _plain(outer)) if d
      )
    for outer, inner in zip(
      node.inputs, body.inputs[:num_consts], strict=False
    ):
      if outer is not None:
        # What is only a broadcast is made in the order that is wanted.
        given[inner] = self._orders.get(outer)
    self.graph(body, given)
    copies: list[_Node] = []
    for i, outer, inner in free:
      wanted = self._orders.get(inner)
      stored = self._orders.get(outer, _plain(outer))
      if wanted is None:
        continue
      stacked = (0, *(d + 1 for d in wanted))
      if _differ(outer, stacked, stored):
        node.inputs[i] = self._copy(outer, stacked, node.stack, copies)
    num_carry = node.params["num_carry"]
    for i, (outer, inner) in enumerate(
      zip(node.outputs, body.outputs, strict=True)
    ):
      if outer is None or inner is None:
        continue
      self._orders[outer] = _plain(outer)
      order = self._orders.get(inner)
      if i >= num_carry and order is not None:
        self._orders[outer] = (0, *(d + 1 for d in order))
    return copies

  def _copies(self, node: _Node) -> list[_Node]:
    """Returns copies of operands whose order does not do."""
    if node.op == "dot_general":
      return self._product_copies(node)
    if not self._is_elementwise(node):
      return []
    out = node.outputs[0]
    known = [
      v
      for v in node.inputs
      if v is not None and v in self._orders and v.shape == _shape(out, node, v)
    ]
    if not known:
      return []
    # The later one is copied.
    order = next(o for v, o in self._orders.items() if v in known)
    copies: list[_Node] = []
    for i, value in enumerate(node.inputs):
      if value in known and _differ(value, self._orders[value], order):
        node.inputs[i] = self._copy(value, order, node.stack, copies)
    return copies

  def _copy(
    self, value: _Value, order: _Order, stack: str, copies: list[_Node]
  ) -> _Value:
    """Returns a copy; a new one is added to `copies`."""
    found = self._copied.get((value, order))
    if found is None:
      found = dataclasses.replace(value, is_block_input=False)
      found.node = _Node(COPY, {}, [value], [found], stack)
      self._orders[found] = order
      self._copied[value, order] = found
      copies.append(found.node)
    return found

  def _product_copies(self, node: _Node) -> list[_Node]:
    (lhs_c, rhs_c), (lhs_b, rhs_b) = node.params["dimension_numbers"]
    copies: list[_Node] = []
    for i, (batch, contract) in enumerate(((lhs_b, lhs_c), (rhs_b, rhs_c))):
      value = node.inputs[i]
      if value is None:
        continue
      order = self._orders.get(value)
      free = [
        d
        for d in range(len(value.shape))
        if d not in batch and d not in contract
      ]
      wanted = (*batch, *free, *contract)
      if order is None:
        stored = self._preferred(value)
        does = _is_matrix(value, stored, batch, contract)
        self._settle(value, stored if does else wanted)
      elif not _is_matrix(value, order, batch, contract):
        node.inputs[i] = self._copy(value, wanted, node.stack, copies)
    return copies

  def _preferred(self, value: _Value) -> _Order:
    """Returns how a value lies that nothing has settled."""
    found = self._stored.get(value)
    node = value.node
    if found is None and node is not None:
      for source in node.inputs:
        if source is None or source in self._orders:
          continue
        if node.op in graphs.ALIASES:
          found = _forward(node, source, value, self._preferred(source))
        elif source.shape == value.shape:
          found = self._preferred(source)
        break
    return _plain(value) if found is None else found

  def _is_elementwise(self, node: _Node) -> bool:
    return (
      not buffers_lib.is_whole(node)
      and node.op not in buffers_lib.REDUCTIONS
      and node.op not in graphs.ALIASES
      and node.op not in ("broadcast_in_dim", "iota", "gather")
    )

  def _result(self, node: _Node) -> None:
    """Settles the results, and operands that follow from each other."""
    source = next((v for v in node.inputs if v is not None), None)
    for out in node.outputs:
      if out is None:
        continue
      order = None
      if node.op == "dot_general" or buffers_lib.is_whole(node):
        order = _plain(out)
      elif source is None or node.op in ("broadcast_in_dim", "iota"):
        continue
      elif node.op == "gather" or _is_turned_product(node, source):
        order = _plain(out)
      elif node.op in graphs.ALIASES or node.op in buffers_lib.REDUCTIONS:
        known = self._orders.get(source)
        order = None if known is None else _forward(node, source, out, known)
      else:
        order = next(
          (
            self._orders[v]
            for v in node.inputs
            if v is not None
            and v in self._orders
            and len(v.shape) == len(out.shape)
          ),
          None,
        )
        if order is not None:
          for v in node.inputs:
            if v is not None and v.shape == out.shape:
              self._settle(v, order)
      if order is not None:
        self._orders[out] = order

  def _settle(self, value: _Value, order: _Order) -> None:
    """Gives an order to a value that has none, and to what it is made of."""
    if value in self._orders:
      return
    self._orders[value] = order
    node = value.node
    if node is None or node.op == "broadcast_in_dim":
      return
    for source in node.inputs:
      if source is None:
        continue
      if node.op in graphs.ALIASES:
        before = _backward(node, source, value, order)
        if before is not None:
          self._settle(source, before)
      elif source.shape == value.shape:
        self._settle(source, order)


def _is_turned_product(node: _Node, source: _Value) -> bool:
  """Whether a product is transposed that can be computed so from the start."""
  if node.op != "transpose" or source.node is None:
    return False
  if source.node.op != "dot_general":
    return False
  _, (lhs_batch, _) = source.node.params["dimension_numbers"]
  return not lhs_batch


def _plain(value: _Value) -> _Order:
  return tuple(range(len(value.shape)))


def _shape(out: _Value | None, node: _Node, value: _Value) -> tuple[int, ...]:
  if node.op in _ELEMENTWISE_LIKE or out is None:
    return value.shape
  return out.shape


def _differ(value: _Value, a: _Order, b: _Order) -> bool:
  """Whether two orders differ where it matters."""

  def real(order: _Order) -> list[int]:
    return [d for d in order if value.shape[d] > 1]

  return real(a) != real(b)


def _is_matrix(
  value: _Value, order: _Order, batch: Sequence[int], contract: Sequence[int]
) -> bool:
  """Whether batch dimensions come first, and then two groups in one piece."""
  kinds = []
  for d in order:
    if value.shape[d] > 1:
      kind = "batch" if d in batch else "sum" if d in contract else "free"
      if not kinds or kinds[-1] != kind:
        kinds.append(kind)
  if "batch" in kinds and kinds[0] != "batch":
    return False
  return len(kinds) == len(set(kinds))


def _forward(
  node: _Node, source: _Value, out: _Value, order: _Order
) -> _Order | None:
  """The order of what an alias or a reduction makes of its operand."""
  if node.op == "transpose":
    permutation = node.params["permutation"]
    return tuple(permutation.index(d) for d in order)
  if node.op in buffers_lib.REDUCTIONS:
    gone = set(node.params["axes"])
    kept = [d for d in range(len(source.shape)) if d not in gone]
    if len(kept) != len(out.shape):
      return None
    return tuple(kept.index(d) for d in order if d not in gone)
  if node.op in _RESHAPES:
    return _reshaped(source.shape, out.shape, order)
  return order if len(source.shape) == len(out.shape) else None


def _backward(
  node: _Node, source: _Value, out: _Value, order: _Order
) -> _Order | None:
  """The order of an alias's operand from that of its result."""
  if node.op == "transpose":
    return tuple(node.params["permutation"][d] for d in order)
  if node.op in _RESHAPES:
    return _reshaped(out.shape, source.shape, order)
  return order if len(source.shape) == len(out.shape) else None


def _reshaped(
  source: Sequence[int], target: Sequence[int], order: _Order
) -> _Order | None:
  """The order after a reshape, by groups of dimensions with equal elements."""
  position = {d: k for k, d in enumerate(order)}
  groups = _groups(source, target)
  if groups is None:
    return None
  keyed = []
  for left, right in groups:
    real = [d for d in left if source[d] > 1]
    ranks = [position[d] for d in real]
    if ranks and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
      # Not in one piece: it must be written anew, in order.
      return tuple(range(len(target)))
    keyed.append((ranks[0] if ranks else len(order), right))
  keyed.sort(key=lambda item: item[0])
  return tuple(d for _, right in keyed for d in right)


def _groups(
  source: Sequence[int], target: Sequence[int]
) -> list[tuple[list[int], list[int]]] | None:
  """Pairs of runs of dimensions with equal numbers of elements."""
  if math.prod(source) != math.prod(target) or not math.prod(source):
    return None
  groups = []
  i = j = 0
  while i < len(source) or j < len(target):
    left, right = [], []
    a = b = 1
    while (not left and not right) or a != b:
      if (a <= b and i < len(source)) or j >= len(target):
        a *= source[i]
        left.append(i)
        i += 1
      else:
        b *= target[j]
        right.append(j)
        j += 1
    groups.append((left, right))
  return groups
