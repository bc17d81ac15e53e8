"""Sharding propagation: the mesh axes that split each value.

A simple form of what the SPMD partitioner does: arguments, results and
constraints are settled; everything else takes, first along the program and then
against it, what its neighbours have, as long as no axis is used twice.
"""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any

import jax

from paxon.runner.plan.memory import graph as graphs

Mesh = dict[str, int]
_Spec = graphs.Spec
_Value = graphs.Value

# Along and against, until what one loop's body says has reached another's.
_ROUNDS = 3


def propagate(
  graph: graphs.Graph,
  *,
  inputs: Sequence[Any],
  outputs: Sequence[Any],
  mesh: Mesh,
) -> None:
  """Settles `spec` of all values, those of bodies included.

  Args:
    graph: Of the program.
    inputs: A sharding of each of its inputs, `None` where none is given.
    outputs: The same of its outputs.
    mesh: Sizes of the mesh axes.
  """
  for values, shardings in ((graph.inputs, inputs), (graph.outputs, outputs)):
    for value, sharding in zip(values, shardings, strict=True):
      if value is not None:
        _fix(value, sharding)
  rules = _Rules(mesh)
  _each(graph, _settle)
  for number in range(_ROUNDS):
    rules.is_last = number == _ROUNDS - 1
    rules.graph(graph, is_forward=True)
    rules.graph(graph, is_forward=False)


def merged(specs: Iterable[_Spec], rank: int) -> _Spec:
  """Returns the union of specs, earlier ones first, no axis twice."""
  result: list[tuple[str, ...]] = [()] * rank
  taken: set[str] = set()
  for spec in specs:
    for i, names in enumerate(spec):
      if names and not result[i] and not taken.intersection(names):
        result[i] = names
        taken.update(names)
  return tuple(result)


def _is_gradient(node: graphs.Node) -> bool:
  """Whether a product sums over devices, as gradients of weights do."""
  if node.op != "dot_general":
    return False
  summed = [
    {n for d in contract for n in value.spec[d]}
    for value, contract in zip(
      node.inputs, node.params["dimension_numbers"][0], strict=True
    )
    if value is not None
  ]
  return len(summed) == 2 and bool(summed[0] & summed[1])


def _undisputed(specs: Sequence[_Spec]) -> list[_Spec]:
  """Returns specs without the axes that they have in different dimensions."""
  places: dict[str, set[int]] = {}
  for spec in specs:
    for i, names in enumerate(spec):
      for name in names:
        places.setdefault(name, set()).add(i)
  return [
    tuple(
      names if all(len(places[n]) == 1 for n in names) else () for names in spec
    )
    for spec in specs
  ]


def of_sharding(sharding: Any, rank: int) -> _Spec | None:
  """Returns the spec of a sharding, `None` where it leaves something open."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return None
  entries: list[Any] = list(sharding.spec) + [()] * rank
  spec = []
  for entry in entries[:rank]:
    if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
      entry = ()
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    # An axis of size one splits nothing, and must not take part in conflicts.
    spec.append(tuple(n for n in names if sharding.mesh.shape[n] > 1))
  return tuple(spec)


def _fix(value: _Value, sharding: Any) -> None:
  spec = of_sharding(sharding, len(value.shape))
  if spec is not None:
    value.spec = spec
    value.is_fixed = True


def _each(graph: graphs.Graph, visit: Callable[[graphs.Node], None]) -> None:
  for node in graph.nodes:
    visit(node)
    for body in node.bodies:
      _each(body, visit)


def _settle(node: graphs.Node) -> None:
  """Settles the results of constraints."""
  (value,) = node.outputs[:1] or (None,)
  if node.op != "sharding_constraint" or value is None:
    return
  sharding = node.params["sharding"]
  spec = of_sharding(sharding, len(value.shape))
  if spec is not None:
    value.spec = spec
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    value.is_fixed = unconstrained not in tuple(sharding.spec)


class _Rules:
  """How specs go through operations."""

  def __init__(self, mesh: Mesh) -> None:
    self._mesh = mesh
    self.is_last = False

  def graph(self, graph: graphs.Graph, *, is_forward: bool) -> None:
    for node in graph.nodes if is_forward else reversed(graph.nodes):
      if node.op == "scan":
        self._scan(node, is_forward)
      elif node.bodies:
        self._bodies(node, is_forward)
      else:
        self._operation(node, is_forward)

  def _operation(self, node: graphs.Node, is_forward: bool) -> None:
    out = node.outputs[0]
    if out is None:
      return
    if is_forward:
      specs = [
        self._through(node, v, v.spec)
        for v in sorted(
          (v for v in node.inputs if v is not None),
          key=lambda v: -math.prod(v.shape) * v.itemsize,
        )
      ]
      if not self.is_last and _is_gradient(node):
        # Whoever uses the product says which of two dimensions gets an axis.
        specs = _undisputed(specs)
      for value in node.outputs:
        if value is not None and len(value.shape) == len(out.shape):
          self._refine(value, specs)
    elif node.op not in _ONE_WAY:
      for value in node.inputs:
        if value is not None:
          self._refine(value, [self._back(node, value, out.spec)])

  def _refine(self, value: _Value, specs: Iterable[_Spec]) -> None:
    if value.is_fixed or not value.shape:
      return
    spec = merged([value.spec, *specs], len(value.shape))
    value.spec = tuple(
      names if size % math.prod(self._mesh[n] for n in names) == 0 else ()
      for names, size in zip(spec, value.shape, strict=True)
    )

  def _through(self, node: graphs.Node, value: _Value, spec: _Spec) -> _Spec:
    """The spec of the result that an operand's spec asks for."""
    out = node.outputs[0]
    assert out is not None
    rule = _FORWARD.get(node.op)
    if rule is not None:
      return rule(node, value, spec, out, self._mesh)
    return _of_equal_dimensions(spec, value.shape, out.shape)

  def _back(self, node: graphs.Node, value: _Value, spec: _Spec) -> _Spec:
    """The spec of an operand that the result's spec asks for."""
    out = node.outputs[0]
    assert out is not None
    rule = _BACKWARD.get(node.op)
    if rule is not None:
      return rule(node, value, spec, out, self._mesh)
    return _of_equal_dimensions(spec, out.shape, value.shape)

  def _scan(self, node: graphs.Node, is_forward: bool) -> None:
    (body,) = node.bodies
    num_consts = node.params["num_consts"]
    num_carry = node.params["num_carry"]
    first_x = num_consts + num_carry

    def link(
      outer: _Value | None, inner: _Value | None, is_stack: bool
    ) -> None:
      if outer is None or inner is None:
        return
      lead = outer.spec[:1] if is_stack else ()
      self._refine(inner, [outer.spec[len(lead) :]])
      self._refine(outer, [(*lead, *inner.spec)])

    def link_all() -> None:
      for i, (outer, inner) in enumerate(
        zip(node.inputs, body.inputs, strict=True)
      ):
        link(outer, inner, i >= first_x)
      for i, (outer, inner) in enumerate(
        zip(node.outputs, body.outputs, strict=True)
      ):
        link(outer, inner, i >= num_carry)
        if i < num_carry:
          link(body.inputs[num_consts + i], inner, False)

    link_all()
    self.graph(body, is_forward=is_forward)
    link_all()

  def _bodies(self, node: graphs.Node, is_forward: bool) -> None:
    for body in node.bodies:
      outer = node.inputs[-len(body.inputs) :] if body.inputs else []
      for a, b in zip(outer, body.inputs, strict=True):
        if a is not None:
          self._refine(b, [a.spec])
      self.graph(body, is_forward=is_forward)
      for a, b in zip(node.outputs, body.outputs, strict=True):
        if a is not None and b is not None:
          self._refine(a, [b.spec])
          self._refine(b, [a.spec])


_Rule = Callable[[graphs.Node, _Value, _Spec, _Value, Mesh], _Spec]


def _of_equal_dimensions(
  spec: _Spec, shape: tuple[int, ...], other: tuple[int, ...]
) -> _Spec:
  """Returns what of the spec of a shape holds for another shape."""
  if len(shape) != len(other):
    return ((),) * len(other)
  return tuple(
    names if a == b else ()
    for names, a, b in zip(spec, shape, other, strict=True)
  )


def _transpose(node, value, spec, out, mesh) -> _Spec:
  del value, out, mesh
  return tuple(spec[i] for i in node.params["permutation"])


def _transpose_back(node, value, spec, out, mesh) -> _Spec:
  del value, out, mesh
  permutation = node.params["permutation"]
  result: list[tuple[str, ...]] = [()] * len(spec)
  for i, j in enumerate(permutation):
    result[j] = spec[i]
  return tuple(result)


def _broadcast(node, value, spec, out, mesh) -> _Spec:
  del mesh
  result: list[tuple[str, ...]] = [()] * len(out.shape)
  if value is node.inputs[0]:
    for i, j in enumerate(node.params["broadcast_dimensions"]):
      if value.shape[i] == out.shape[j]:
        result[j] = spec[i]
  return tuple(result)


def _broadcast_back(node, value, spec, out, mesh) -> _Spec:
  del mesh
  if value is not node.inputs[0]:
    return ((),) * len(value.shape)
  return tuple(
    spec[j] if value.shape[i] == out.shape[j] else ()
    for i, j in enumerate(node.params["broadcast_dimensions"])
  )


def _reduce(node, value, spec, out, mesh) -> _Spec:
  del out, mesh
  if len(spec) != len(value.shape):
    return ()
  gone = set(node.params["axes"])
  return tuple(names for i, names in enumerate(spec) if i not in gone)


def _reduce_back(node, value, spec, out, mesh) -> _Spec:
  del out, mesh
  kept = iter(spec)
  gone = set(node.params["axes"])
  return tuple(() if i in gone else next(kept) for i in range(len(value.shape)))


def reshaped(
  spec: _Spec, source: Sequence[int], target: Sequence[int], mesh: Mesh
) -> _Spec:
  """Returns the spec after a reshape.

  Axes of a dimension stay with the leading dimension of the group of
  dimensions that has the same elements, if it divides.
  """
  result: list[tuple[str, ...]] = [()] * len(target)
  i = j = 0
  while i < len(source) and j < len(target):
    end_i, end_j = i + 1, j + 1
    a, b = source[i], target[j]
    while a != b:
      if a < b:
        if end_i == len(source):
          return tuple(result)
        a *= source[end_i]
        end_i += 1
      else:
        if end_j == len(target):
          return tuple(result)
        b *= target[end_j]
        end_j += 1
    # Dimensions of size one go with no one.
    names = tuple(n for k in range(i, end_i) for n in spec[k])
    first = next((k for k in range(j, end_j) if target[k] > 1), j)
    for_first = next((k for k in range(i, end_i) if source[k] > 1), i)
    only_first = all(not spec[k] for k in range(i, end_i) if k != for_first)
    divides = target[first] % math.prod(mesh[n] for n in names) == 0
    if names and only_first and divides:
      result[first] = names
    i, j = end_i, end_j
  return tuple(result)


def _reshape(node, value, spec, out, mesh) -> _Spec:
  del node
  return reshaped(spec, value.shape, out.shape, mesh)


def _reshape_back(node, value, spec, out, mesh) -> _Spec:
  del node
  return reshaped(spec, out.shape, value.shape, mesh)


def _dot(node, value, spec, out, mesh) -> _Spec:
  del mesh
  (lhs_c, rhs_c), (lhs_b, rhs_b) = node.params["dimension_numbers"]
  lhs, rhs = node.inputs
  result: list[tuple[str, ...]] = [()] * len(out.shape)
  is_lhs = value is lhs
  batch, contract = (lhs_b, lhs_c) if is_lhs else (rhs_b, rhs_c)
  for i, d in enumerate(batch):
    result[i] = spec[d]
  free = [
    d for d in range(len(value.shape)) if d not in batch and d not in contract
  ]
  begin = len(batch) if is_lhs else len(out.shape) - len(free)
  for i, d in enumerate(free):
    result[begin + i] = spec[d]
  del rhs
  return tuple(result)


def _gather(node, value, spec, out, mesh) -> _Spec:
  """Of an embedding: dimensions of ids, then those of whole rows."""
  del mesh
  numbers = node.params["dimension_numbers"]
  result: list[tuple[str, ...]] = [()] * len(out.shape)
  if value is node.inputs[0]:
    kept = [
      d
      for d in range(len(value.shape))
      if d not in numbers.collapsed_slice_dims
      and d not in numbers.operand_batching_dims
    ]
    for d, o in zip(kept, numbers.offset_dims, strict=True):
      if value.shape[d] == out.shape[o]:
        result[o] = spec[d]
  else:
    batch = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]
    for d, o in zip(range(len(value.shape) - 1), batch, strict=False):
      result[o] = spec[d]
  return tuple(result)


def _of_first(node, value, spec, out, mesh) -> _Spec:
  """Results that are split like the first operand, such as a scatter's."""
  del mesh
  if value is node.inputs[0]:
    return spec
  return ((),) * len(out.shape)


def _none(node, value, spec, out, mesh) -> _Spec:
  del node, value, spec, mesh
  return ((),) * len(out.shape)


_REDUCTIONS = (
  "reduce_sum",
  "reduce_max",
  "reduce_min",
  "reduce_prod",
  "reduce_and",
  "reduce_or",
  "argmax",
  "argmin",
)

_FORWARD: dict[str, _Rule] = {
  "transpose": _transpose,
  "broadcast_in_dim": _broadcast,
  "reshape": _reshape,
  "squeeze": _reshape,
  "expand_dims": _reshape,
  "dot_general": _dot,
  "gather": _gather,
  "scatter-add": _of_first,
  "scatter": _of_first,
  "shard_map": _none,
  **dict.fromkeys(_REDUCTIONS, _reduce),
}
_BACKWARD: dict[str, _Rule] = {
  "transpose": _transpose_back,
  "broadcast_in_dim": _broadcast_back,
  "reshape": _reshape_back,
  "squeeze": _reshape_back,
  "expand_dims": _reshape_back,
  **dict.fromkeys(_REDUCTIONS, _reduce_back),
}
# Operands of these are split by their own needs.
_ONE_WAY = frozenset({"dot_general", "gather", "scatter", "shard_map"})
