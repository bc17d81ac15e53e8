"""Kernels of a compiled program: custom calls and fusions of a named kind.

Matmuls inside a kernel do not stand in the text; they follow from its operands
and its configuration:

  cuDNN attention, forward       2 matmuls of [B,N,T,H] and [B,N,S,H]
  cuDNN attention, backward      5: four, and the scores once more
  cuDNN convolution              as a `convolution`; the gradients of the input
                                 and of the kernel have its shapes swapped
  cuBLAS, cuBLASLt               as a `dot` with the configured dimensions
  splash attention               2 forward; 3 for queries and 4 for keys and
                                 values backward, or 5 of one kernel for all
  grouped matmul                 each used row times one matrix
  other Pallas on TPUs           what its author's cost estimate says
"""

import math
import re

from paxon.runner.plan.program_text import hlo, matmuls, name_stack

# Custom calls that compute nothing.
_NO_KERNELS = frozenset(
  (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "PrepareAsyncCallDone",
    "PrepareAsyncCallStart",
    "SliceId",
    "ZeroCrop",
  )
)
# Kernels without matmuls: sorting and packing.
_NO_MATMULS = frozenset(
  (
    "GatherScatterIndicesBitpacked",
    "TopK",
    "__cub$DeviceRadixSort",
    "__cub$DeviceRadixSortUnassignedKeys",
    "MoveToHost",
    "MoveToDevice",
  )
)
_FUSION_KIND = re.compile(r'"fusion_backend_config":\{"kind":"([^"]+)"')
_CUSTOM_NAME = re.compile(r'"custom_fusion_config":\{"name":"([^"]+)"')
# XLA writes some of its JSON with spaces.
_SCORES = re.compile(
  r'"intermediate_tensor_shape":\s*\{[^{}]*?"dimensions":\s*\[([^\]]*)\]'
)
_MASK = re.compile(r'"mask_type":\s*"(\w+)"')
_WINDOW = re.compile(r'"sliding_window_length":\s*"?(\d+)')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_ESTIMATE = re.compile(r'"cost_estimate":\s*\{[^{}]*"flops":\s*"?(\d+)')
_FMHA = "__cudnn$fmha"
_CONVOLUTION = "__cudnn$conv"
_GEMM = "__cublas$"
# The name that JAX gives the Pallas call.
_SPLASH = re.compile(r"/splash_m[hq]a_(fwd|dq|dkv)_")
_SPLASH_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4}
# Results of the backward pass for keys and values; that for all has more.
_SPLASH_RESULTS = 4


def name(instruction: hlo.Instruction) -> str | None:
  """Returns the name under which a kernel is counted, None for others.

  Args:
    instruction: Any.

  Returns:
    The target of a custom call; of a fusion of a kind of its own that kind,
    such as `__triton_nested_gemm_fusion`, or the name of its implementation.
  """
  if instruction.opcode == "custom-call":
    found = target(instruction)
    return None if found in _NO_KERNELS else found
  if instruction.opcode != "fusion":
    return None
  kind = _FUSION_KIND.search(instruction.attributes)
  if kind is None:
    return None
  custom = _CUSTOM_NAME.search(instruction.attributes)
  if kind[1] != "__custom_fusion" or custom is None:
    return kind[1]
  # A copy of a slice is no kernel.
  return None if custom[1] == "dynamic_slice_fusion" else custom[1]


def target(call: hlo.Instruction) -> str:
  """Returns the target of a custom call."""
  return (call.attribute("custom_call_target") or "").strip('"')


def is_free(call: hlo.Instruction) -> bool:
  """Returns whether a custom call computes nothing."""
  return target(call) in _NO_KERNELS


def is_attention(kernel: str) -> bool:
  """Returns whether a kernel of this name is cuDNN's attention."""
  return kernel.startswith(_FMHA)


def is_attention_backward(kernel: str) -> bool:
  """Returns whether a kernel of this name is its backward pass."""
  return is_attention(kernel) and "Backward" in kernel


def has_bias(kernel: str) -> bool:
  """Returns whether a kernel of this name is cuDNN's attention with a bias."""
  return is_attention(kernel) and "Bias" in kernel


def is_splash(call: hlo.Instruction) -> bool:
  """Returns whether a custom call is splash attention."""
  return _SPLASH.search(call.op_name) is not None


def factors(operands: list[hlo.Type]) -> list[hlo.Type]:
  """Returns the first two operands of numbers that a kernel multiplies.

  Args:
    operands: Of a custom call; tables of integers may come before.
  """
  floats = [t for t in operands if t.dtype.startswith(("f", "bf"))]
  return (floats or operands)[:2]


def flops(call: hlo.Instruction, operands: list[hlo.Type]) -> int | None:
  """Returns the FLOPs of a custom call's matmuls, None without a formula.

  Args:
    call: The custom call.
    operands: Types of its operands.
  """
  found = target(call)
  if found in _NO_KERNELS or found in _NO_MATMULS:
    return 0
  if is_attention(found):
    scores = _SCORES.search(call.attributes)
    if scores is None or not operands:
      return None
    count = 5 if is_attention_backward(found) else 2
    size = math.prod(_ints(scores[1]))
    return count * 2 * size * operands[0].shape[-1]
  if found.startswith(_CONVOLUTION):
    if len(operands) < 2:
      return None
    first, second = (operand.shape for operand in operands[:2])
    result = _first_result(call).shape
    # Window and labels are those of the forward convolution.
    shapes = first, second, result
    if found.endswith("BackwardInput"):
      shapes = result, second, first
    elif found.endswith("BackwardFilter"):
      shapes = first, result, second
    count, _ = matmuls.count_convolution(call, *shapes)
    return count
  if found.startswith(_GEMM):
    contracted = _CONTRACTED.search(call.attributes)
    if contracted is None or not operands:
      return None
    shared = math.prod(operands[0].shape[i] for i in _ints(contracted[1]))
    return 2 * math.prod(_first_result(call).shape) * shared
  splash = _SPLASH.search(call.op_name)
  if splash is not None:
    query, key = factors(operands)
    is_all = len(call.type.elements) > _SPLASH_RESULTS and splash[1] == "dkv"
    count = 5 if is_all else _SPLASH_MATMULS[splash[1]]
    return count * 2 * math.prod(query.shape) * key.shape[-2]
  if name_stack.is_grouped(call.op_name):
    rows, _ = factors(operands)
    share = name_stack.used_rows(call.op_name)
    outputs = _first_result(call).shape[-1]
    return round(2 * math.prod(rows.shape) * outputs * share)
  return _estimate(call)


def computed_share(call: hlo.Instruction) -> float | None:
  """Returns the share of query-key pairs that an attention kernel computes.

  cuDNN skips pairs above the diagonal and before a window.

  Args:
    call: The custom call.

  Returns:
    The share; None if the text of the call does not say it.
  """
  mask, scores = _MASK.search(call.attributes), _SCORES.search(call.attributes)
  if not is_attention(target(call)) or mask is None or scores is None:
    return None
  length, kv_length = _ints(scores[1])[-2:]
  if "CAUSAL" not in mask[1] or length != kv_length:
    return 1.0
  window = _WINDOW.search(call.attributes)
  return causal_share(length, int(window[1]) if window else 0)


def head_dim(call: hlo.Instruction) -> int | None:
  """Returns the size of an attention kernel's heads; None if not known.

  Args:
    call: The custom call; its first result is the output, or a gradient.
  """
  first = call.type.elements[0] if call.type.elements else call.type
  return first.shape[-1] if first.shape else None


def causal_share(length: int, window: int | None) -> float:
  """Returns the share of pairs that a causal mask shows.

  Args:
    length: Number of queries, and of keys.
    window: Number of keys that a query sees at most; None or 0 for all.
  """
  window = min(window or length, length)
  return (window * (window + 1) / 2 + (length - window) * window) / length**2


def multiplies(call: hlo.Instruction) -> bool:
  """Returns whether a custom call may contain matmuls."""
  if target(call) in _NO_KERNELS | _NO_MATMULS:
    return False
  estimate = _estimate(call)
  return estimate is None or estimate > 0


def workspace(call: hlo.Instruction) -> int:
  """Returns bytes among a call's results that are scratch memory."""
  found = target(call)
  last = call.type.elements[-1] if call.type.elements else None
  if last is None or not found.startswith((_FMHA, _CONVOLUTION, _GEMM)):
    return 0
  return last.num_bytes if last.dtype in ("s8", "u8") else 0


def _first_result(call: hlo.Instruction) -> hlo.Type:
  return call.type.elements[0] if call.type.elements else call.type


def _estimate(call: hlo.Instruction) -> int | None:
  """The FLOPs that a kernel's author estimates."""
  estimate = _ESTIMATE.search(call.attributes.replace('\\"', '"'))
  return int(estimate[1]) if estimate else None


def _ints(text: str) -> list[int]:
  return [int(number) for number in re.findall(r"\d+", text)]
