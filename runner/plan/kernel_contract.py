"""Kernels that compute a step, and checks of the expected ones.

Kernels that the program asks for are decided: cuDNN's attention, splash
attention, other Pallas kernels, matmuls in fp8. Which kernel multiplies
matrices on a GPU is left to the autotuning of the run, which tries Triton's
and cuBLAS's; a plan has no GPU to try them on.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Final

from paxon.runner.plan import hardware, result
from paxon.runner.plan.program_text import costs, hlo, kernels, name_stack
from paxon.runner.settings import expected_kernels

# The scope that `layers.attention.ring` names.
_RING: Final = "ring_attention"
# Kernels among which autotuning chooses. 8-bit matmuls of cuBLAS are used only
# on request, or where Triton is off.
_TUNED: Final = frozenset({expected_kernels.CUBLAS, expected_kernels.TRITON})
# The dtypes of cuBLAS's low-precision kernels.
_NARROW: Final = {
  expected_kernels.CUBLAS_FP8: "float8",
  expected_kernels.CUBLAS_INT8: "int8",
}


def choices(
  program: hlo.Program, *, is_tuned: bool
) -> tuple[result.KernelChoice, ...]:
  """Returns which kernels compute attention and matmuls.

  Args:
    program: The compiled step of one device.
    is_tuned: Whether it was compiled where it runs, autotuning included.

  Returns:
    One entry for each part, kernel and dtype; by part, the most executed first.
  """
  counts: dict[tuple[str, str, str], int] = {}
  for each in find_kernels(program):
    parts = [each.part]
    if name_stack.find_quantized(each.cost.name) and each.cost.flops:
      parts.append(expected_kernels.QUANTIZED)
    for part in parts:
      key = part, each.kernel, each.cost.dtype
      counts[key] = counts.get(key, 0) + each.count
  order = (*expected_kernels.PARTS, expected_kernels.OTHER)
  return tuple(
    result.KernelChoice(
      part=part,
      kernel=kernel,
      is_final=is_tuned or is_final(kernel),
      count=count,
      dtype=dtype,
    )
    for (part, kernel, dtype), count in sorted(
      counts.items(), key=lambda item: (order.index(item[0][0]), -item[1])
    )
  )


@dataclasses.dataclass(frozen=True)
class Execution:
  """An instruction that a kernel of this list computes.

  Attributes:
    part: Of `PARTS`, or `other`.
    kernel: Our name of it.
    count: How often it is executed in a step.
    cost: Of one execution.
  """

  part: str
  kernel: str
  count: int
  cost: costs.Cost


def find_kernels(program: hlo.Program) -> Iterator[Execution]:
  """Yields the work of kernels, in the order of the program's text.

  Args:
    program: The compiled step of one device.
  """
  runs = costs.read(program).runs
  for (computation, name), cost in costs.read(program).operations.items():
    instruction = program.computations[computation].instructions[name]
    found = _classify(instruction, cost)
    if found is not None and runs.get(computation):
      yield Execution(*found, runs[computation], cost)


def is_final(kernel: str) -> bool:
  """Returns whether a kernel of a plan is that of the run.

  Args:
    kernel: A name of `KERNELS`; others are decided.
  """
  return kernel not in _TUNED


def mismatches(
  expected: Sequence[expected_kernels.ExpectedKernel],
  found: Sequence[result.KernelChoice],
  *,
  platform: hardware.Platform,
) -> Iterator[tuple[expected_kernels.ExpectedKernel, str]]:
  """Yields expectations that are decidedly not met, with the found kernels.

  Args:
    expected: Of the experiment.
    found: Result of `choices`.
    platform: Platform whose compiler made the program.
  """
  for each in expected:
    if not _holds_on(each, platform):
      continue
    of_part = [choice for choice in found if choice.part == each.part]
    others = [choice for choice in of_part if choice.kernel != each.kernel]
    is_met = len(others) < len(of_part)
    if each.part == expected_kernels.QUANTIZED and each.kernel in _NARROW:
      # For 8-bit operands, autotuning may still find such a kernel.
      others = [c for c in others if c.is_final or not _may_be(c, each)]
      is_met = bool(of_part) and not others
    elif each.part != expected_kernels.MATMULS:
      is_met = is_met and not others
    elif each.kernel in _TUNED and any(not c.is_final for c in of_part):
      # The run will tell.
      is_met = True
    if not is_met:
      yield each, _words(others)


def _holds_on(
  expected: expected_kernels.ExpectedKernel, platform: hardware.Platform
) -> bool:
  """Whether an expectation is checked on a platform."""
  where = expected_kernels.KERNELS[expected.kernel].platform
  return where in (None, platform.value)


def _may_be(
  choice: result.KernelChoice, expected: expected_kernels.ExpectedKernel
) -> bool:
  """Whether matmuls have the dtype of a low-precision kernel."""
  return choice.dtype.startswith(_NARROW[expected.kernel])


def _words(found: Sequence[result.KernelChoice]) -> str:
  if not found:
    return "none"
  known = expected_kernels.KERNELS
  return ", ".join(
    f"{choice.count} of {choice.kernel} ({known[choice.kernel].description})"
    if choice.kernel in known
    else f"{choice.count} of {choice.kernel}"
    for choice in found
  )


def _classify(
  instruction: hlo.Instruction, cost: costs.Cost
) -> tuple[str, str] | None:
  """The part that an instruction computes, and the kernel that does."""
  kernel = cost.kernel
  is_backward = name_stack.is_backward(
    cost.name
  ) and not name_stack.is_recomputed(cost.name)
  attention = (
    expected_kernels.BACKWARD if is_backward else expected_kernels.FORWARD
  )
  if name_stack.is_grouped(cost.name) and cost.flops:
    if not _is_pallas(kernel):
      return expected_kernels.GROUPED, expected_kernels.XLA
    is_megablox = kernel == "tpu_custom_call" and "gmm" in cost.name
    return (
      expected_kernels.GROUPED,
      expected_kernels.MEGABLOX if is_megablox else expected_kernels.PALLAS,
    )
  if kernels.is_attention(kernel):
    is_backward = kernels.is_attention_backward(kernel)
    return (
      expected_kernels.BACKWARD if is_backward else expected_kernels.FORWARD,
      expected_kernels.CUDNN,
    )
  if _RING in cost.name and cost.kind in (costs.ATTENTION, costs.MATMUL):
    # Small ones are cuBLAS's.
    return attention, expected_kernels.RING
  if kernel.startswith("__cublas"):
    if kernel.endswith("$f8"):
      return expected_kernels.MATMULS, expected_kernels.CUBLAS_FP8
    return (
      expected_kernels.MATMULS,
      expected_kernels.CUBLAS_INT8
      if cost.dtype == "int8"
      else expected_kernels.CUBLAS,
    )
  if _is_pallas(kernel):
    if "splash" in instruction.attributes:
      return attention, expected_kernels.SPLASH
    is_attention = "attention" in name_stack.part(cost.name).lower()
    return (
      attention if is_attention else expected_kernels.OTHER
    ), expected_kernels.PALLAS
  if cost.kind == costs.ATTENTION:
    return attention, expected_kernels.PLAIN
  if cost.kind in (costs.ATTENTION, costs.MATMUL, costs.CONVOLUTION):
    return (
      expected_kernels.MATMULS,
      expected_kernels.TRITON if "triton" in kernel else expected_kernels.XLA,
    )
  return None


def _is_pallas(kernel: str) -> bool:
  """Whether a custom call is a Pallas kernel: of TPUs, Triton's, Mosaic's."""
  return kernel == "tpu_custom_call" or any(
    word in kernel for word in ("xla.gpu.triton", "mosaic_gpu")
  )
