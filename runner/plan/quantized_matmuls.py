"""Kernels and dtypes of quantized matmuls in a compiled program.

A quantized einsum names its matmuls (`quantization.scopes`), whatever
dtype they have, so that each of them is found in the traced program, with the
dtype that its operands have there, and in the compiled one, with what the
compiler made of it. The two differ where the hardware has no such matmuls.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Final

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware, kernel_contract, result
from paxon.runner.plan.program_text import hlo, name_stack

_AGAIN: Final = "forward again"
_FORWARD: Final = "forward"

# (path of the module, matmul).
_Key = tuple[str, str]


# Operations that compilers drop from matmuls without changing them.
_ALMOST: Final = 0.999


@dataclasses.dataclass
class _Compiled:
  """A matmul in the compiled text of one device.

  Attributes:
    dtype: Of the form that costs most, where there are several.
    kernel: Of that form.
    largest: FLOPs of that form.
    flops: Of all forms.
    count: Of all forms.
  """

  dtype: str
  kernel: str
  largest: int
  flops: int = 0
  count: int = 0


def find_quantized_matmuls(
  flops: flops_lib.Flops,
  program: hlo.Program | None,
  *,
  kind: hardware.Hardware,
  num_devices: int,
) -> tuple[result.QuantizedMatmul, ...]:
  """Returns the kernel and dtype of each quantized matmul.

  Args:
    flops: Of the traced step.
    program: The compiled step of one device; None if it was not compiled.
    kind: The hardware.
    num_devices: How many of it.
  """
  traced = _count_traced(flops)
  compiled: dict[_Key, _Compiled] = {}
  if program is not None:
    compiled = _count_compiled(program)
    joined = {
      key: _joined_with(key, traced, compiled, num_devices)
      for key in traced.keys() - compiled.keys()
    }
    compiled |= {key: c for key, c in joined.items() if c is not None}
  return tuple(
    _matmul(
      key, dtypes, compiled.get(key), kind, is_compiled=program is not None
    )
    for key, dtypes in traced.items()
  )


def is_narrow(dtype: str) -> bool:
  """Whether matmuls of a dtype are low-precision: fp8 or int8.

  Args:
    dtype: As JAX names it.
  """
  return _family(dtype) in ("fp8", "int8")


def warnings(
  matmuls: Sequence[result.QuantizedMatmul],
) -> Iterator[str]:
  """Yields a sentence for each reason why matmuls are not low-precision."""
  reasons: dict[tuple[str, str], list[result.QuantizedMatmul]] = {}
  for matmul in matmuls:
    if not matmul.is_quantized:
      key = matmul.dtype, matmul.reason
      reasons.setdefault(key, []).append(matmul)
  for (dtype, reason), members in reasons.items():
    first = members[0]
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    yield (
      f"{len(members)} of {len(matmuls)} quantized matmuls run as"
      f" {dtype or 'something unknown'}: {first.module} ({first.role}){more},"
      f" because {reason}."
    )


def _count_traced(flops: flops_lib.Flops) -> Mapping[_Key, Mapping[str, int]]:
  """FLOPs of covered matmuls by the dtype of their operands."""
  found: dict[_Key, dict[str, int]] = {}
  for key, count in flops.counts.items():
    if key.quantized:
      is_again = key.phase is flops_lib.Phase.REMAT
      name = _AGAIN if is_again else key.quantized
      dtypes = found.setdefault((key.part, name), {})
      dtypes[key.dtype] = dtypes.get(key.dtype, 0) + count
  return found


def _count_compiled(program: hlo.Program) -> dict[_Key, _Compiled]:
  found: dict[_Key, _Compiled] = {}
  for each in kernel_contract.find_kernels(program):
    stack, cost = each.cost.name, each.cost
    name = name_stack.find_quantized(stack)
    if not name or not cost.flops:
      continue
    if name == _FORWARD and name_stack.is_recomputed(stack):
      name = _AGAIN
    count = each.count * cost.flops
    new = _Compiled(cost.dtype, each.kernel, count)
    old = found.setdefault((name_stack.part(stack), name), new)
    if count > old.largest:
      old.dtype, old.kernel, old.largest = cost.dtype, each.kernel, count
    old.flops += count
    old.count += each.count
  return found


def _joined_with(
  key: _Key,
  traced: Mapping[_Key, Mapping[str, int]],
  compiled: Mapping[_Key, _Compiled],
  num_devices: int,
) -> _Compiled | None:
  """Returns the matmul of the same layer that has this one's FLOPs too.

  Compilers join matmuls that share an operand, such as those of queries and
  keys, and keep one name.
  """
  layer = key[0].rpartition("/")[0]
  alike = [
    k for k in traced if (k[0].rpartition("/")[0], k[1]) == (layer, key[1])
  ]
  there = [compiled[k] for k in alike if k in compiled]
  wanted = sum(sum(traced[k].values()) for k in alike)
  has_all = num_devices * sum(c.flops for c in there) >= _ALMOST * wanted
  return max(there, key=lambda c: c.flops) if there and has_all else None


def _matmul(
  key: _Key,
  dtypes: Mapping[str, int],
  found: _Compiled | None,
  kind: hardware.Hardware,
  *,
  is_compiled: bool,
) -> result.QuantizedMatmul:
  traced = max(dtypes, key=dtypes.__getitem__)
  if found is not None:
    dtype, reason = found.dtype, _reason(traced, found.dtype, kind)
  elif not is_compiled:
    is_slow = is_narrow(traced) and not _has(kind, traced)
    dtype = "bfloat16" if is_slow else traced
    reason = _reason(traced, dtype, kind)
  else:
    dtype = ""
    reason = "the compiled text has no matmul of this name"
  return result.QuantizedMatmul(
    module=key[0],
    role=key[1],
    traced_dtype=traced,
    dtype=dtype,
    kernel=found.kernel if found else "",
    is_final=found is not None and kernel_contract.is_final(found.kernel),
    count=found.count if found else 0,
    flops=sum(dtypes.values()),
    is_quantized=not reason,
    reason=reason,
  )


def _reason(traced: str, dtype: str, kind: hardware.Hardware) -> str:
  """Why a matmul is not multiplied in 8 bits; empty if it is."""
  if not is_narrow(traced):
    return (
      f"its operands are {traced} when they meet: the recipe leaves one of"
      " them in the layer's dtype, or its scales vary along what is summed"
    )
  if _family(dtype) == _family(traced):
    return ""
  if not _has(kind, traced):
    return f"{kind.name} has no {_family(traced)} matmuls"
  return f"the compiler for {kind.name} multiplies {traced} as {dtype}"


def _family(dtype: str) -> str:
  """Returns `fp8` or `int8` for a low-precision dtype, else the dtype."""
  if dtype.startswith("float8"):
    return "fp8"
  return "int8" if dtype in ("int4", "int8") else dtype


def _has(kind: hardware.Hardware, dtype: str) -> bool:
  """Whether the data sheet has a rate for matmuls of a dtype."""
  name = "int8" if _family(dtype) == "int8" else dtype
  return kind.peak_flops(name) is not None
