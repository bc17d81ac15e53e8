"""Matrix-multiplication FLOPs of a traced program, by phase and by part.

Counted from a jaxpr, so no device and no compiler is needed. A contraction
costs `2 * batch * m * n * k`, what is elementwise costs nothing: for
a decoder, one training step is exactly

  6 * (parameters in matmuls) * tokens + 12 L N H T^2 B

with all keys of all queries counted, visible or not (N heads of width H); the
tied head counts once, a table that is looked up not at all.

Loops with a known length count every trip, a `cond` its dearest branch, a
kernel what its formula or its own cost estimate says. What is not known, such
as the trips of a `while`, is in `Flops.notes`.

The phase of an operation is read from JAX's name stack: what is under
`rematted_computation` is recomputed, else what is transposed is the backward
pass. The part is the path of the linen module.
"""

from collections.abc import Callable, Mapping
import dataclasses
import enum
import math
import re
from typing import Any

import jax
from jax.extend import core
import numpy as np

from paxon.quantization import matmuls
from paxon.runner.plan.program_text import name_stack


class Phase(enum.Enum):
  """When an operation runs."""

  FORWARD = "forward"
  BACKWARD = "backward"
  REMAT = "remat"


class Kind(enum.Enum):
  """What an operation is."""

  MATMUL = "matmul"
  # Products of queries with keys, and of weights with values.
  ATTENTION = "attention"
  CONVOLUTION = "convolution"
  RAGGED = "ragged_dot"
  KERNEL = "kernel"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """What FLOPs are summed by.

  Attributes:
    phase: When they are executed.
    kind: What they are.
    part: Path of the linen module, such as `DecoderLm/stack/layers/blocks_0`.
    dtype: Name of the wider operand's dtype.
    quantized: Which product of a quantized einsum it is, such as `input
      gradient`; empty for what no recipe covers.
  """

  phase: Phase
  kind: Kind
  part: str
  dtype: str
  quantized: str = ""


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOPs of one execution of a program, over all its devices.

  Attributes:
    counts: FLOPs by key.
    notes: What could not be counted, one sentence each.
  """

  counts: Mapping[Key, int]
  notes: tuple[str, ...] = ()

  @property
  def hardware_flops(self) -> int:
    """All FLOPs that are executed, recomputation included."""
    return sum(self.counts.values())

  @property
  def model_flops(self) -> int:
    """FLOPs without recomputation."""
    return self.hardware_flops - self.phase(Phase.REMAT)

  def causal_model_flops(self, length: int) -> float:
    """Returns `model_flops` without what a causal mask hides.

    Args:
      length: Number of tokens in a row, T: of T^2 pairs T(T+1)/2 are visible.
    """
    hidden = 1 - (1 + 1 / length) / 2
    attention = sum(
      count
      for key, count in self.counts.items()
      if key.kind is Kind.ATTENTION and key.phase is not Phase.REMAT
    )
    return self.model_flops - hidden * attention

  def phase(self, phase: Phase) -> int:
    """Returns the FLOPs of one phase."""
    return sum(n for key, n in self.counts.items() if key.phase is phase)

  def by(self, field: str, *, remat: bool = True) -> dict[str, int]:
    """Returns the FLOPs by one field of `Key`, largest first.

    Args:
      field: `phase`, `kind`, `part`, `dtype` or `quantized`.
      remat: Whether to count recomputation.
    """
    sums: dict[str, int] = {}
    for key, count in self.counts.items():
      if remat or key.phase is not Phase.REMAT:
        value = getattr(key, field)
        name = value.value if isinstance(value, enum.Enum) else value
        sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


# A kernel's FLOPs, from its equation, as (kind, needed, recomputed).
KernelFormula = Callable[[Any], tuple[Kind, int, int]]


def count(
  jaxpr: core.ClosedJaxpr, *, kernels: Mapping[str, KernelFormula] | None = None
) -> Flops:
  """Counts the FLOPs of a jaxpr.

  Args:
    jaxpr: As `jax.jit(f).trace(*args).jaxpr` gives it, of the whole program
      before it is split over devices.
    kernels: Formulas for kernels (by the name of the Pallas call, or of the
      primitive) beside those that are known here.

  Returns:
    The sums.
  """
  counter = _Counter({**_KNOWN_KERNELS, **(kernels or {})})
  counts = counter.jaxpr(jaxpr.jaxpr, "")
  return Flops(counts, tuple(dict.fromkeys(counter.notes)))


_Counts = dict[Key, int]


class _Counter:
  """Walks jaxprs; the name stack of inner ones is relative to the outer."""

  def __init__(self, kernels: Mapping[str, KernelFormula]) -> None:
    self._kernels = kernels
    self.notes: list[str] = []

  def jaxpr(self, jaxpr: core.Jaxpr, stack: str) -> _Counts:
    counts: _Counts = {}
    for eqn in jaxpr.eqns:
      inner = f"{stack}/{eqn.source_info.name_stack}"
      _add(counts, self._equation(eqn, inner))
    return counts

  def _equation(self, eqn: Any, stack: str) -> _Counts:
    name = eqn.primitive.name
    if name in _CONTRACTIONS:
      kind, flops = _CONTRACTIONS[name](eqn)
      if kind is Kind.MATMUL and _is_attention(eqn, stack):
        kind = Kind.ATTENTION
      return _entry(stack, kind, flops, eqn)
    if name == "pallas_call":
      return self._pallas(eqn, stack)
    if name in self._kernels:
      return _kernel(stack, self._kernels[name](eqn), eqn)
    if name == "cond":
      branches = [
        self.jaxpr(branch.jaxpr, stack) for branch in eqn.params["branches"]
      ]
      return max(branches, key=lambda branch: sum(branch.values()))
    bodies = [self.jaxpr(body, stack) for body in _bodies(eqn.params)]
    counts: _Counts = {}
    for body in bodies:
      _add(counts, body, times=_trips(eqn))
    if name == "while" and counts:
      self.notes.append(
        f"The trips of the while loop in {_part(stack) or 'the program'} are"
        " not known; it is counted once."
      )
    return counts

  def _pallas(self, eqn: Any, stack: str) -> _Counts:
    name = eqn.params.get("name") or "pallas_call"
    if name in self._kernels:
      return _kernel(stack, self._kernels[name](eqn), eqn)
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
      return _entry(stack, Kind.KERNEL, int(estimate.flops), eqn)
    body = self.jaxpr(eqn.params["jaxpr"], stack)
    grid = eqn.params["grid_mapping"].grid
    if not all(isinstance(size, int) for size in grid):
      self.notes.append(
        f"The grid of the kernel {name} is not known; one cell is counted."
      )
      grid = ()
    # An upper bound: a kernel may skip cells, as causal attention does.
    return _entry(stack, Kind.KERNEL, math.prod(grid) * sum(body.values()), eqn)


def _add(counts: _Counts, more: _Counts, *, times: int = 1) -> None:
  for key, flops in more.items():
    counts[key] = counts.get(key, 0) + times * flops


def _entry(stack: str, kind: Kind, flops: int, eqn: Any) -> _Counts:
  return _key(stack, kind, flops, eqn, _phase(stack))


def _key(stack: str, kind: Kind, flops: int, eqn: Any, phase: Phase) -> _Counts:
  if not flops:
    return {}
  dtypes = [
    np.dtype(v.aval.dtype)
    for v in eqn.invars
    if jax.dtypes.issubdtype(getattr(v.aval, "dtype", bool), np.number)
  ]
  # Before its operands a kernel may have tables of integers.
  dtypes = [d for d in dtypes if jax.dtypes.issubdtype(d, np.inexact)] or dtypes
  widest = max(dtypes[:2], key=lambda d: d.itemsize).name if dtypes else ""
  key = Key(
    phase=phase,
    kind=kind,
    part=_part(stack),
    dtype=widest,
    quantized=name_stack.quantized(stack),
  )
  return {key: flops}


def _kernel(stack: str, result: tuple[Kind, int, int], eqn: Any) -> _Counts:
  kind, needed, recomputed = result
  counts = _entry(stack, kind, needed, eqn)
  _add(counts, _key(stack, kind, recomputed, eqn, Phase.REMAT))
  return counts


def _bodies(params: Mapping[str, Any]) -> list[core.Jaxpr]:
  """All jaxprs among an equation's parameters."""
  found = []
  for value in params.values():
    for item in value if isinstance(value, tuple | list) else (value,):
      if isinstance(item, core.ClosedJaxpr):
        found.append(item.jaxpr)
      elif isinstance(item, core.Jaxpr):
        found.append(item)
  return found


def _trips(eqn: Any) -> int:
  """How often the bodies of an equation are executed."""
  params = eqn.params
  if eqn.primitive.name == "scan":
    return params["length"]
  if eqn.primitive.name == "shard_map":
    # The body is one device's part along the axes that are manual here.
    sizes = dict(params["mesh"].shape)
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    return math.prod(sizes[axis] for axis in (manual or sizes))
  return 1


def _phase(stack: str) -> Phase:
  if "rematted_computation" in stack:
    return Phase.REMAT
  return Phase.BACKWARD if "transpose(" in stack else Phase.FORWARD


# What JAX and quantized matmuls add for themselves.
_NO_PARTS = frozenset(
  ("", "rematted_computation", "checkpoint", *matmuls.SCOPES)
)


def _part(stack: str) -> str:
  """The path of modules: no transforms, methods, einsums or repetitions."""
  text = re.sub(r"\b(?:jvp|transpose|vmap|custom_jvp|custom_vjp)\(", "", stack)
  parts: list[str] = []
  for part in text.replace(")", "").split("/"):
    name = part.partition(".")[0]
    skipped = "->" in name or name in _NO_PARTS
    if not skipped and (not parts or parts[-1] != name):
      parts.append(name)
  # A model's name comes back where transforms are nested.
  return "/".join(dict.fromkeys(parts))


def _is_attention(eqn: Any, stack: str) -> bool:
  """Whether a contraction is of activations with activations per position.

  Such a product has batch dimensions, which one with weights has not, and is
  inside a module called attention, or an einsum over queries T and keys S.
  """
  (_, _), (lhs_batch, _) = eqn.params["dimension_numbers"]
  if not lhs_batch:
    return False
  equations = re.findall(r"[\w.,]+->\w+", stack)
  last = set(equations[-1]) if equations else set()
  return last >= {"T", "S"} or "attention" in _part(stack).lower()


def _dot(eqn: Any) -> tuple[Kind, int]:
  lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
  (contract, _), (batch, _) = eqn.params["dimension_numbers"]
  if not contract:
    # An outer product is elementwise work.
    return Kind.MATMUL, 0
  shared = math.prod(lhs[i] for i in (*contract, *batch))
  return Kind.MATMUL, 2 * math.prod(lhs) * math.prod(rhs) // max(shared, 1)


def _convolution(eqn: Any) -> tuple[Kind, int]:
  out = eqn.outvars[0].aval.shape
  kernel = eqn.invars[1].aval.shape
  dims = eqn.params["dimension_numbers"].rhs_spec
  inputs = kernel[dims[1]] * math.prod(kernel[i] for i in dims[2:])
  # Of a dilated input most products are with zeros that are never there.
  holes = math.prod(eqn.params["lhs_dilation"] or (1,))
  return Kind.CONVOLUTION, 2 * math.prod(out) * inputs // holes


def _ragged(eqn: Any) -> tuple[Kind, int]:
  lhs = eqn.invars[0].aval.shape
  dims = eqn.params["ragged_dot_dimension_numbers"]
  (contract, _), _ = dims.dot_dimension_numbers
  flops = 2 * math.prod(eqn.outvars[0].aval.shape)
  flops *= math.prod(lhs[i] for i in contract)
  if set(dims.lhs_ragged_dimensions) & set(contract):
    # Each group sums over its own rows, not over all.
    flops //= eqn.invars[2].aval.shape[-1]
  return Kind.RAGGED, flops


_CONTRACTIONS = {
  "dot_general": _dot,
  "conv_general_dilated": _convolution,
  "ragged_dot_general": _ragged,
}


def _cudnn(eqn: Any) -> int:
  """FLOPs of one product of queries [..H] with keys [..S..], in cuDNN."""
  query, key = (v.aval.shape for v in eqn.invars[:2])
  # `layout` is JAX's AttentionLayout: 0 is BTNH, 1 is BNTH.
  length_axis = 2 if eqn.params["layout"] else 1
  return 2 * math.prod(query) * key[length_axis]


def _cudnn_forward(eqn: Any) -> tuple[Kind, int, int]:
  return Kind.ATTENTION, 2 * _cudnn(eqn), 0


def _cudnn_backward(eqn: Any) -> tuple[Kind, int, int]:
  # Four products, and the scores once more.
  return Kind.ATTENTION, 4 * _cudnn(eqn), _cudnn(eqn)


def _splash(eqn: Any) -> int:
  """FLOPs of one product of queries [..T,H] with keys [..S,H], in splash."""
  shapes = [
    v.aval.shape
    for v in eqn.invars
    if jax.dtypes.issubdtype(v.aval.dtype, np.floating)
  ]
  query, key = shapes[:2]
  return 2 * math.prod(query) * key[-2]


def _splash_forward(eqn: Any) -> tuple[Kind, int, int]:
  return Kind.ATTENTION, 2 * _splash(eqn), 0


def _splash_queries(eqn: Any) -> tuple[Kind, int, int]:
  # The scores and the gradient of the weights, once more.
  return Kind.ATTENTION, _splash(eqn), 2 * _splash(eqn)


def _splash_keys(eqn: Any) -> tuple[Kind, int, int]:
  # The scores once more; the fused kernel has gradients of queries too.
  is_fused = len(eqn.outvars) > 4
  return Kind.ATTENTION, (4 if is_fused else 3) * _splash(eqn), _splash(eqn)


_KNOWN_KERNELS: Mapping[str, KernelFormula] = {
  "dot_product_attention_fwd": _cudnn_forward,
  "dot_product_attention_fwd_wrapper": _cudnn_forward,
  "dot_product_attention_bwd": _cudnn_backward,
  "dot_product_attention_bwd_wrapper": _cudnn_backward,
  "splash_mha_fwd_segmented_residuals": _splash_forward,
  "splash_mha_fwd_segmented_no_residuals": _splash_forward,
  "splash_mha_dq_segmented_no_residuals": _splash_queries,
  "splash_mha_dkv_segmented_no_residuals": _splash_keys,
}
