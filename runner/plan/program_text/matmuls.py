"""FLOPs of the matmuls in a compiled program: `dot` and `convolution`.

A matmul of m x k with k x n costs 2 m n k. On TPUs all matmuls are
convolutions, a batched one with a window as large as the batch of which all but
the diagonal is padding; so what counts, along each spatial dimension, are the
pairs of an output and a window position that meet an element which is there.
"""

import dataclasses
import functools
import math
import re

import numpy as np

from paxon.runner.plan.program_text import hlo

_WINDOW = re.compile(r"(\w+)=([\dx_\-]+)")

# JAX's names of element types.
_NAMES = {
  "pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32",
  "f64": "float64", "c64": "complex64", "c128": "complex128",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Matmul:
  """One matmul.

  Attributes:
    flops: Of one execution.
    dtype: JAX's name of the wider operand's dtype.
    is_batched: Whether it has batch dimensions, as matmuls of activations with
      activations have.
  """

  flops: int
  dtype: str
  is_batched: bool


def find_matmul(
  instruction: hlo.Instruction, computation: hlo.Computation
) -> Matmul | None:
  """Returns the matmul that an instruction is, or None.

  Args:
    instruction: Any.
    computation: The one that it is in.
  """
  if instruction.opcode not in ("dot", "convolution"):
    return None
  left, right = (
    computation.instructions[operand].type
    for operand in instruction.operands[:2]
  )
  count = _dot if instruction.opcode == "dot" else _convolution
  flops, is_batched = count(instruction, left, right)
  widest = max((left, right), key=lambda t: t.bits).dtype
  return Matmul(flops, dtype_name(widest), is_batched)


def dtype_name(dtype: str) -> str:
  """Returns JAX's name of HLO's element type: `bfloat16` for `bf16`."""
  if dtype in _NAMES:
    return _NAMES[dtype]
  if dtype.startswith("f8"):
    return f"float8_{dtype[2:]}"
  match = re.fullmatch(r"([su])(\d+)", dtype)
  if match is None:
    return dtype
  return f"{'int' if match[1] == 's' else 'uint'}{match[2]}"


def _dot(
  dot: hlo.Instruction, left: hlo.Type, right: hlo.Type
) -> tuple[int, bool]:
  del right
  is_batched = bool(_dims(dot, "lhs_batch_dims"))
  contracted = _dims(dot, "lhs_contracting_dims")
  if not contracted:
    # An outer product is elementwise work, as in the count of the jaxpr.
    return 0, is_batched
  shared = math.prod(left.shape[i] for i in contracted)
  return 2 * math.prod(dot.type.shape) * shared, is_batched


def _dims(dot: hlo.Instruction, name: str) -> list[int]:
  return [int(n) for n in re.findall(r"\d+", dot.attribute(name) or "")]


def _convolution(
  convolution: hlo.Instruction, left: hlo.Type, right: hlo.Type
) -> tuple[int, bool]:
  return count_convolution(
    convolution, left.shape, right.shape, convolution.type.shape
  )


def count_convolution(
  convolution: hlo.Instruction,
  left: tuple[int, ...],
  right: tuple[int, ...],
  out: tuple[int, ...],
) -> tuple[int, bool]:
  """Returns the FLOPs of a convolution, and whether it is a batched matmul.

  Args:
    convolution: An instruction with the attributes of a convolution.
    left: Shape of the convolved array.
    right: Shape of the kernel.
    out: Shape of the result.

  Raises:
    hlo.ParseError: It has no dimension labels.
  """
  labels = re.match(
    r"(\w+)_(\w+)->(\w+)", convolution.attribute("dim_labels") or ""
  )
  if labels is None:
    raise hlo.ParseError(
      f"The convolution {convolution.name} has no dimension labels."
    )
  inputs, kernel, outputs = labels.groups()
  # Products per output besides its window, a multiply and an add each.
  flops = 2 * right[kernel.index("i")]
  flops *= out[outputs.index("b")] * out[outputs.index("f")]
  window = _window(convolution.attribute("window") or "")
  is_batched = False
  for i in range(len(inputs) - 2):
    label = str(i)
    sizes = (
      left[inputs.index(label)],
      right[kernel.index(label)],
      out[outputs.index(label)],
    )
    count = valid_positions(
      *sizes,
      stride=_along(window, "stride", i, 1),
      low=_along(window, "pad", i, 0),
      lhs_dilate=_along(window, "lhs_dilate", i, 1),
      rhs_dilate=_along(window, "rhs_dilate", i, 1),
    )
    flops *= count
    # Each element of a batch meets its like, and no other.
    is_batched |= count > 1 and set(sizes) == {count}
  return flops, is_batched


def _window(text: str) -> dict[str, list[str]]:
  return {name: values.split("x") for name, values in _WINDOW.findall(text)}


def _along(
  window: dict[str, list[str]], name: str, i: int, default: int
) -> int:
  """One field of a window along a dimension; of a padding, the low one."""
  if name not in window:
    return default
  return int(window[name][i].partition("_")[0])


@functools.lru_cache(maxsize=4096)
def valid_positions(
  size: int,
  kernel: int,
  out: int,
  *,
  stride: int,
  low: int,
  lhs_dilate: int,
  rhs_dilate: int,
) -> int:
  """Returns the pairs of an output and a window position that meet an input.

  Args:
    size: Inputs along a dimension.
    kernel: Window positions.
    out: Outputs.
    stride: From one window to the next.
    low: Padding before the first input.
    lhs_dilate: Distance of two inputs, between which there are zeros.
    rhs_dilate: Distance of two window positions.
  """
  # The shorter of the two lists is walked, the other is a vector.
  starts = np.arange(out) * stride - low
  offsets = np.arange(kernel) * rhs_dilate
  if out < kernel:
    starts, offsets = offsets, starts
  last = (size - 1) * lhs_dilate
  count = 0
  for offset in offsets.tolist():
    positions = starts + offset
    inside = (positions >= 0) & (positions <= last)
    if lhs_dilate > 1:
      inside &= positions % lhs_dilate == 0
    count += int(np.count_nonzero(inside))
  return count
