"""Matmul FLOPs of a traced program, by phase and by module.

Counted from a jaxpr, without a device or a compiler. A contraction costs
`2 * batch * m * n * k`, elementwise operations cost nothing. For a decoder, one
training step is exactly

  6 * (parameters in matmuls) * tokens + 12 L N H T^2 B

with all keys of all queries, masked or not (N heads of width H). A tied head
counts once, an embedding lookup not at all.

Loops count all trips, a `cond` its most expensive branch, a kernel its formula
or its own cost estimate. Unknown numbers, such as the trips of a `while`, are
in `Flops.notes`.

A pipeline computes in all ticks and stages, also where a stage has no
microbatch. Its scope `live_N_of_M` says how many of M executions are on a
microbatch; the rest, the bubble, is no part of the model's FLOPs.

cuDNN and splash attention skip masked blocks. `Flops.skipped` is what they do
not compute: cuDNN by its mask type, splash by the table of blocks that is
constant in the jaxpr.

The phase of an operation is read from JAX's name stack: `rematted_computation`
is recomputation, else `transpose` is the backward pass. The module is the path
of the linen module.
"""

from collections.abc import Mapping
import dataclasses
import enum
import fractions
import math
import re
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval
import numpy as np

from paxon.layers.moe import grouped_matmul
from paxon.runner.plan import kernel_flops
from paxon.runner.plan.program_text import matmuls, name_stack


class Phase(enum.Enum):
  """The pass in which an operation runs."""

  FORWARD = "forward"
  BACKWARD = "backward"
  REMAT = "remat"


class Kind(enum.Enum):
  """The kind of an operation."""

  MATMUL = "matmul"
  # Matmuls of queries and keys, and of attention weights and values.
  ATTENTION = "attention"
  CONVOLUTION = "convolution"
  # Matmuls of rows with the matrices of their groups.
  GROUPED = "grouped matmul"
  KERNEL = "kernel"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """The key of a sum of FLOPs.

  Attributes:
    phase: Pass in which they run.
    kind: Kind of the operation.
    part: Path of the linen module, such as `DecoderLm/stack/layers/blocks_0`.
    dtype: Dtype of the wider operand.
    quantized: Matmul of a quantized einsum, such as `input gradient`; empty
      without a recipe.
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
    counts: FLOPs by key, as if no attention kernel skipped a block.
    notes: Why some FLOPs are not counted, one sentence each.
    bubbles: FLOPs of `counts` in pipeline bubbles, by key. Negative for
      operations of a `cond` whose branch is not the most expensive.
    skipped: FLOPs of `counts` that attention kernels skip, by key; 0 for a
      kernel that skips none.
  """

  counts: Mapping[Key, int]
  notes: tuple[str, ...] = ()
  bubbles: Mapping[Key, int] = dataclasses.field(default_factory=dict)
  skipped: Mapping[Key, int] = dataclasses.field(default_factory=dict)

  @property
  def hardware_flops(self) -> int:
    """All FLOPs, with recomputation and bubbles."""
    return sum(self.counts.values())

  @property
  def model_flops(self) -> int:
    """FLOPs without recomputation and bubbles."""
    return sum(self._model().values())

  @property
  def bubble_flops(self) -> int:
    """FLOPs in pipeline bubbles, including recomputation."""
    return sum(self.bubbles.values())

  def causal_model_flops(self, length: int) -> float:
    """Returns `model_flops` without masked pairs of causal attention.

    Args:
      length: Length of a sequence, T: T(T+1)/2 of T^2 pairs are unmasked.
    """
    masked = 1 - (1 + 1 / length) / 2
    attention = sum(
      count
      for key, count in self._model().items()
      if key.kind is Kind.ATTENTION
    )
    return self.model_flops - masked * attention

  def count_executed(self) -> Mapping[Key, int]:
    """Returns the FLOPs that are computed: `counts` without `skipped`."""
    return {k: n - self.skipped.get(k, 0) for k, n in self.counts.items()}

  def attention_share(self) -> float:
    """Returns the share of the attention kernels' FLOPs that is computed."""
    whole = sum(self.counts[key] for key in self.skipped)
    return 1 - sum(self.skipped.values()) / whole if whole else 1.0

  def _model(self) -> dict[Key, int]:
    keys = {**self.counts, **self.bubbles}
    return {
      key: self.counts.get(key, 0) - self.bubbles.get(key, 0)
      for key in keys
      if key.phase is not Phase.REMAT
    }

  def phase(self, phase: Phase) -> int:
    """Returns the FLOPs of one phase."""
    return sum(n for key, n in self.counts.items() if key.phase is phase)

  def count_by(self, field: str, *, remat: bool = True) -> dict[str, int]:
    """Returns the FLOPs by one field of `Key`, largest first.

    Args:
      field: `phase`, `kind`, `part`, `dtype` or `quantized`.
      remat: Whether to count recomputation and bubbles.
    """
    sums: dict[str, int] = {}
    for key, count in (self.counts if remat else self._model()).items():
      value = getattr(key, field)
      name = value.value if isinstance(value, enum.Enum) else value
      sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def count(jaxpr: core.ClosedJaxpr) -> Flops:
  """Counts the FLOPs of a jaxpr.

  Args:
    jaxpr: As `jax.jit(f).trace(*args).jaxpr` gives it, of the whole program
      before it is split over devices.
  """
  counter = _Counter()
  # Compilers remove dead code, such as the head where a pipeline's first stage
  # needs the embedding only.
  live, _ = partial_eval.dce_jaxpr(
    jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True
  )
  constants = dict(zip(live.constvars, jaxpr.consts, strict=True))
  counts = counter.jaxpr(live, "", constants)
  return Flops(
    {key: work.flops for key, work in counts.items() if work.flops},
    tuple(dict.fromkeys(counter.notes)),
    {
      key: round(work.flops - work.live)
      for key, work in counts.items()
      if work.live != work.flops
    },
    {
      key: round(counts[key].skipped)
      for key in counter.attention
      if key in counts
    },
  )


@dataclasses.dataclass(frozen=True)
class _Work:
  """FLOPs: in total, of live microbatches, and skipped by a kernel."""

  flops: int
  live: fractions.Fraction
  skipped: fractions.Fraction = fractions.Fraction(0)


_GROUPED = (grouped_matmul.PRODUCT, grouped_matmul.GROUPED_MATMUL_TRANSPOSED)
_Counts = dict[Key, _Work]
# Values of variables that are constant, by variable.
_Known = Mapping[Any, Any]


class _Counter:
  """Walks jaxprs; the name stack of inner ones is relative to the outer."""

  def __init__(self) -> None:
    self.notes: list[str] = []
    # Keys of attention kernels.
    self.attention: dict[Key, None] = {}

  def jaxpr(self, jaxpr: core.Jaxpr, stack: str, known: _Known) -> _Counts:
    counts: _Counts = {}
    for eqn in jaxpr.eqns:
      inner = f"{stack}/{eqn.source_info.name_stack}"
      _add(counts, self._equation(eqn, inner, known))
    return counts

  def _equation(self, eqn: Any, stack: str, known: _Known) -> _Counts:
    name = eqn.primitive.name
    # Without its product, these are constants of it that left a loop.
    if eqn.params.get("name") in _GROUPED and eqn.outvars[0].aval.ndim > 1:
      # Also of a loop whose trips are not known. Kernels skip other rows.
      x, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
      flops = round(2 * math.prod(x) * out[-1] * name_stack.used_rows(stack))
      return _entry(stack, Kind.GROUPED, flops, eqn, _phase(stack))
    if name in _CONTRACTIONS:
      kind, flops = _CONTRACTIONS[name](eqn)
      if kind is Kind.MATMUL and _is_attention(eqn, stack):
        kind = Kind.ATTENTION
      return _entry(stack, kind, flops, eqn, _phase(stack))
    attention = kernel_flops.attention(eqn, known)
    if attention is not None:
      counts = _kernel(stack, attention, eqn)
      self.attention |= dict.fromkeys(counts)
      return counts
    if name == "pallas_call":
      return self._pallas(eqn, stack)
    inner = _bodies(eqn.params)
    if name == "cond":
      usual = [body for body in inner if _is_usual(body)]
      inner = usual if len(usual) == 1 else inner
    bodies = [
      self.jaxpr(body, stack, _constants_inside(eqn, body, known))
      for body in inner
    ]
    if name == "cond":
      return _branches(eqn, bodies)
    counts: _Counts = {}
    for body in bodies:
      _add(counts, body, times=_trips(eqn))
    if name == "while" and counts:
      place = name_stack.module(stack) or "the program"
      self.notes.append(
        f"The trips of the while loop in {place} are not known; it is counted"
        " once."
      )
    return counts

  def _pallas(self, eqn: Any, stack: str) -> _Counts:
    name = eqn.params.get("name") or "pallas_call"
    phase = _phase(stack)
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
      return _entry(stack, Kind.KERNEL, int(estimate.flops), eqn, phase)
    body = self.jaxpr(eqn.params["jaxpr"], stack, {})
    grid = eqn.params["grid_mapping"].grid
    if not all(isinstance(size, int) for size in grid):
      self.notes.append(
        f"The grid of the kernel {name} is not known; one cell is counted."
      )
      grid = ()
    # An upper bound, because a kernel may skip cells.
    flops = math.prod(grid) * sum(work.flops for work in body.values())
    return _entry(stack, Kind.KERNEL, flops, eqn, phase)


def _add(counts: _Counts, more: _Counts, *, times: int = 1) -> None:
  for key, work in more.items():
    old = counts.get(key, _Work(0, fractions.Fraction(0)))
    counts[key] = _Work(
      old.flops + times * work.flops,
      old.live + times * work.live,
      old.skipped + times * work.skipped,
    )


def _entry(
  stack: str,
  kind: Kind,
  flops: int,
  eqn: Any,
  phase: Phase,
  share: float | None = None,
) -> _Counts:
  """FLOPs of one operation; a kernel computes `share` of them."""
  if not flops:
    return {}
  dtypes = [
    np.dtype(v.aval.dtype)
    for v in eqn.invars
    if jax.dtypes.issubdtype(getattr(v.aval, "dtype", bool), np.number)
  ]
  # A kernel may have tables of integers before its operands.
  dtypes = [d for d in dtypes if jax.dtypes.issubdtype(d, np.inexact)] or dtypes
  widest = max(dtypes[:2], key=lambda d: d.itemsize).name if dtypes else ""
  key = Key(
    phase=phase,
    kind=kind,
    part=name_stack.module(stack),
    dtype=widest,
    quantized=name_stack.find_quantized(stack),
  )
  live = fractions.Fraction(flops)
  for number, total in set(name_stack.LIVE.findall(stack)):
    live *= fractions.Fraction(int(number), int(total))
  skipped = 0 if share is None else flops * (1 - fractions.Fraction(share))
  return {key: _Work(flops, live, fractions.Fraction(skipped))}


def _kernel(stack: str, found: kernel_flops.Attention, eqn: Any) -> _Counts:
  kind, share = Kind.ATTENTION, found.share
  counts = _entry(stack, kind, found.needed, eqn, _phase(stack), share)
  _add(counts, _entry(stack, kind, found.again, eqn, Phase.REMAT, share))
  return counts


def _branches(eqn: Any, bodies: list[_Counts]) -> _Counts:
  """The most expensive branch of a `cond`; live FLOPs of all if known."""
  dearest = max(bodies, key=lambda b: sum(work.flops for work in b.values()))
  is_scheduled = any(
    name_stack.LIVE.search(str(inner.source_info.name_stack))
    for branch in eqn.params["branches"]
    for inner in branch.jaxpr.eqns
  )
  if not is_scheduled:
    return dearest
  counts: _Counts = {}
  for body in bodies:
    for key, work in body.items():
      flops = work.flops if body is dearest else 0
      _add(counts, {key: _Work(flops, work.live, work.skipped)})
  return counts


def _is_usual(jaxpr: core.Jaxpr) -> bool:
  """Whether a branch is one that a layer expects to be taken."""
  return any(
    name_stack.is_usual(str(eqn.source_info.name_stack))
    or any(map(_is_usual, _bodies(eqn.params)))
    for eqn in jaxpr.eqns
  )


def _constants_inside(eqn: Any, body: Any, known: _Known) -> _Known:
  """Values of a body's inputs that are constant."""
  invars = list(eqn.invars)
  if eqn.primitive.name == "cond":
    invars = invars[1:]
  if eqn.primitive.name == "scan":
    # Constants come first, then the carry, then what is sliced in each trip.
    # JAX 0.11 has no parameter with their number.
    num_carry = sum(
      outer.aval.shape == inner.aval.shape
      for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )
    num_sliced = sum(
      outer.aval.shape != inner.aval.shape
      for outer, inner in zip(invars, body.invars, strict=True)
    )
    invars = invars[: len(invars) - num_carry - num_sliced]
  elif len(invars) != len(body.invars):
    return {}
  return {
    inner: known[outer]
    for outer, inner in zip(invars, body.invars, strict=False)
    if not isinstance(outer, core.Literal)
    and outer in known
    and outer.aval.shape == inner.aval.shape
  }


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
    # The body computes one shard along the manual axes.
    sizes = dict(params["mesh"].shape)
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    return math.prod(sizes[axis] for axis in (manual or sizes))
  return 1


def _phase(stack: str) -> Phase:
  if name_stack.is_recomputed(stack):
    return Phase.REMAT
  return Phase.BACKWARD if name_stack.is_backward(stack) else Phase.FORWARD


def _is_attention(eqn: Any, stack: str) -> bool:
  """Whether a contraction is of activations with activations per position.

  It has batch dimensions other than those of `vmap`, which a matmul with
  weights has not, and is inside a module called attention, or is an einsum over
  queries T and keys S.
  """
  (_, _), (lhs_batch, _) = eqn.params["dimension_numbers"]
  if len(lhs_batch) <= stack.count("vmap("):
    return False
  equations = re.findall(r"[\w.,]+->\w+", stack)
  last = set(equations[-1]) if equations else set()
  return last >= {"T", "S"} or "attention" in name_stack.module(stack).lower()


def _dot(eqn: Any) -> tuple[Kind, int]:
  lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
  (contract, _), (batch, _) = eqn.params["dimension_numbers"]
  if not contract:
    # An outer product is elementwise.
    return Kind.MATMUL, 0
  shared = math.prod(lhs[i] for i in (*contract, *batch))
  return Kind.MATMUL, 2 * math.prod(lhs) * math.prod(rhs) // max(shared, 1)


def _convolution(eqn: Any) -> tuple[Kind, int]:
  params = eqn.params
  dims = params["dimension_numbers"]
  left, right = (v.aval.shape for v in eqn.invars[:2])
  out = eqn.outvars[0].aval.shape
  count = 2 * right[dims.rhs_spec[1]]
  count *= out[dims.out_spec[0]] * out[dims.out_spec[1]]
  # As in the compiled program, multiplications with zeros of the padding and of
  # a dilated input are not counted.
  for i, stride in enumerate(params["window_strides"]):
    count *= matmuls.valid_positions(
      left[dims.lhs_spec[2 + i]],
      right[dims.rhs_spec[2 + i]],
      out[dims.out_spec[2 + i]],
      stride=stride,
      low=params["padding"][i][0],
      lhs_dilate=params["lhs_dilation"][i],
      rhs_dilate=params["rhs_dilation"][i],
    )
  return Kind.CONVOLUTION, count


def _count_ragged(eqn: Any) -> tuple[Kind, int]:
  lhs = eqn.invars[0].aval.shape
  dims = eqn.params["ragged_dot_dimension_numbers"]
  (contract, _), _ = dims.dot_dimension_numbers
  flops = 2 * math.prod(eqn.outvars[0].aval.shape)
  flops *= math.prod(lhs[i] for i in contract)
  if set(dims.lhs_ragged_dimensions) & set(contract):
    # Each group sums over its own rows.
    flops //= eqn.invars[2].aval.shape[-1]
  return Kind.GROUPED, flops


_CONTRACTIONS = {
  "dot_general": _dot,
  "conv_general_dilated": _convolution,
  "ragged_dot_general": _count_ragged,
}
