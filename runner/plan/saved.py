"""Activations saved for the backward pass, by remat name.

Names and shapes are those of the traced step: the arrays that the loop over
layers stacks for the backward pass, and named values of unrolled layers. The
number of shards is an analytical estimate, by the logical axes that values
with such a name have.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import math
from typing import Any, Final

import jax
from jax.extend import core

from paxon.layers import remat
from paxon.sharding import axes

LAYER_INPUTS: Final = "layer inputs"
UNNAMED: Final = "unnamed"

# The last axis of values with these names; others are split by tokens alone.
_AXES: Final = {
  remat.ATTENTION_QUERY: axes.ACTIVATION_HEADS,
  remat.ATTENTION_KEY: axes.ACTIVATION_KV_HEADS,
  remat.ATTENTION_VALUE: axes.ACTIVATION_KV_HEADS,
  remat.ATTENTION_CONTEXT: axes.ACTIVATION_HEADS,
  remat.ATTENTION_OUTPUT: axes.ACTIVATION_EMBED,
  remat.FEED_FORWARD_HIDDEN: axes.ACTIVATION_MLP,
  remat.FEED_FORWARD_OUTPUT: axes.ACTIVATION_EMBED,
  LAYER_INPUTS: axes.ACTIVATION_EMBED,
}
# Their result is the operand, in another shape or by another name.
_ALIASES: Final = frozenset(
  {
    "copy",
    "copy_p",
    "expand_dims",
    "name",
    "optimization_barrier",
    "reduce_precision",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
  }
)


def measure_saved(
  jaxpr: core.ClosedJaxpr, *, shards: Callable[[str], int]
) -> dict[str, int]:
  """Returns bytes of one device by remat name, largest first.

  Args:
    jaxpr: A training step.
    shards: Returns the number of shards along a logical axis.
  """
  sums: dict[str, int] = {}
  for ops in _levels(jaxpr.jaxpr, ""):
    # With microbatches, both passes are inside their loop.
    if not any(op.is_backward for op in ops):
      continue
    for value, name in _find_held(ops):
      axis = _AXES.get(name)
      is_between = name == LAYER_INPUTS
      length = axes.ACTIVATION_LENGTH if is_between else axes.LENGTH
      names = (axes.BATCH, length, *([axis] if axis else []))
      size = value.size // math.prod(map(shards, names))
      sums[name] = sums.get(name, 0) + size
    break
  ordered = sorted(sums.items(), key=lambda item: -item[1])
  return {name: size for name, size in ordered if size}


@dataclasses.dataclass(eq=False, slots=True)
class _Value:
  size: int
  op: "_Op | None" = None
  is_block_input: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class _Op:
  name: str
  params: Any
  inputs: "list[_Value | None]"
  outputs: "list[_Value]"
  stack: str

  @property
  def is_backward(self) -> bool:
    return "transpose(" in self.stack or "rematted" in self.stack


def _find_held(ops: Sequence[_Op]) -> Iterator[tuple[_Value, str]]:
  """Yields the values of the forward pass that the backward pass reads."""
  found: set[_Value] = set()
  for op in ops:
    if not op.is_backward:
      continue
    for value in op.inputs:
      first, name = _named_root(value)
      if first is None or first.op is None or first.op.is_backward:
        continue
      if first in found:
        continue
      if first.op.name == "scan":
        stacked = _name_of_stacked(first)
        # A final carry is no stack.
        if stacked is not None:
          found.add(first)
          yield first, stacked
      elif name is not None or first.is_block_input:
        found.add(first)
        yield first, name or LAYER_INPUTS


def _named_root(value: _Value | None) -> tuple[_Value | None, str | None]:
  """Returns the value whose memory this one is, and its remat name."""
  name = None
  while value is not None and value.op is not None:
    if value.op.name == "name":
      name = value.op.params["name"]
    if value.op.name not in _ALIASES:
      break
    value = value.op.inputs[0]
  return value, name


def _name_of_stacked(value: _Value) -> str | None:
  """The name of a value that a loop stacks; None for one that it carries."""
  op = value.op
  assert op is not None
  body = _open(op.params["jaxpr"])
  index = op.outputs.index(value)
  # Inside the loop, stacked outputs lack the leading axis.
  is_stacked = [
    len(outer.aval.shape) > len(inner.aval.shape)
    for outer, inner in zip(op.params["_outvars"], body.outvars, strict=True)
  ]
  if not is_stacked[index]:
    return None
  num_carry = is_stacked.count(False)
  builder = _Builder()
  inputs = [_value(v.aval) for v in body.invars]
  outputs = builder.inline(body, inputs, "")
  first, name = _named_root(outputs[index])
  if name is not None:
    return name
  num_scanned = sum(
    len(outer.aval.shape) > len(inner.aval.shape)
    for outer, inner in zip(op.params["_invars"], body.invars, strict=True)
  )
  carries = inputs[len(inputs) - num_scanned - num_carry :][:num_carry]
  return LAYER_INPUTS if first in carries else UNNAMED


def _levels(jaxpr: core.Jaxpr, stack: str) -> Iterator[list[_Op]]:
  """Yields the operations of a program, then those of the bodies of loops."""
  builder = _Builder()
  builder.inline(jaxpr, [_value(v.aval) for v in jaxpr.invars], stack)
  yield builder.ops
  for op in builder.ops:
    if op.name in ("scan", "while"):
      body = op.params.get("jaxpr", op.params.get("body_jaxpr"))
      yield from _levels(_open(body), op.stack)


class _Builder:
  """Collects operations; calls are inlined, loops are not entered."""

  def __init__(self) -> None:
    self.ops: list[_Op] = []

  def inline(
    self, jaxpr: core.Jaxpr, arguments: Sequence[_Value | None], stack: str
  ) -> list[_Value | None]:
    known: dict[Any, _Value | None] = dict(
      zip(jaxpr.invars, arguments, strict=True)
    )
    known |= {v: _value(v.aval) for v in jaxpr.constvars}

    def read(atom: Any) -> _Value | None:
      return None if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
      inputs = [read(v) for v in eqn.invars]
      inner = f"{stack}/{eqn.source_info.name_stack}"
      name, called = eqn.primitive.name, _get_called(eqn)
      outputs: list[Any]
      if called is not None:
        if name in ("checkpoint", "remat2", "remat") and "transpose(" in inner:
          for value in inputs:
            if value is not None:
              value.is_block_input = True
        outputs = self.inline(called, inputs, inner)
      else:
        outputs = [_value(v.aval) for v in eqn.outvars]
        params = {**eqn.params, "_invars": eqn.invars, "_outvars": eqn.outvars}
        op = _Op(name, params, inputs, outputs, inner)
        for value in outputs:
          value.op = op
        self.ops.append(op)
      known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _get_called(eqn: Any) -> core.Jaxpr | None:
  """The jaxpr that an equation calls once with its own operands."""
  if eqn.primitive.name in ("scan", "while", "cond", "pallas_call"):
    return None
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    found = eqn.params.get(key)
    found = _open(found)
    if isinstance(found, core.Jaxpr) and len(found.invars) == len(eqn.invars):
      return found
  return None


def _open(jaxpr: Any) -> Any:
  return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _value(aval: Any) -> _Value:
  itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0) or 0
  # Offloaded values are not in the memory of the device.
  if getattr(aval, "memory_space", None) is jax.memory.Space.Host:
    itemsize = 0
  return _Value(itemsize * math.prod(getattr(aval, "shape", ())))
