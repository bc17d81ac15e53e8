"""Which kernels compute a step, and which of them an experiment expects.

Kernels that the program asks for are decided: cuDNN's attention, splash
attention, other Pallas kernels, products in fp8. Which kernel multiplies
matrices on a GPU is left to the autotuning of the run, which tries Triton's
and cuBLAS's; a plan has no GPU to try them on.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import re
import types
from typing import Final

from paxon.runner.configuration import suggestions
from paxon.runner.plan import hardware, result
from paxon.runner.plan.program_text import costs, hlo, kernels, name_stack

FORWARD: Final = "attention forward"
BACKWARD: Final = "attention backward"
PRODUCTS: Final = "matmuls"
# Those that a quantization recipe covers; they count in their own part too.
QUANTIZED: Final = "quantized matmuls"
OTHER: Final = "other"
PARTS: Final = (FORWARD, BACKWARD, PRODUCTS, QUANTIZED)

CUDNN: Final = "cudnn"
SPLASH: Final = "splash"
PALLAS: Final = "pallas"
RING: Final = "ring"
PLAIN: Final = "plain"
CUBLAS: Final = "cublas"
CUBLAS_FP8: Final = "cublas fp8"
CUBLAS_INT8: Final = "cublas int8"
TRITON: Final = "triton"
XLA: Final = "xla"

_Platform = hardware.Platform


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """Where a kernel may be met: whose compiler has it (None: all), and parts."""

  platform: hardware.Platform | None
  parts: tuple[str, ...]
  words: str


_ATTENTION: Final = (FORWARD, BACKWARD)
_PRODUCTS: Final = (PRODUCTS, QUANTIZED)
KERNELS: Final[Mapping[str, _Kernel]] = types.MappingProxyType(
  {
    CUDNN: _Kernel(_Platform.CUDA, _ATTENTION, "cuDNN's fused attention"),
    SPLASH: _Kernel(_Platform.TPU, _ATTENTION, "splash attention"),
    PALLAS: _Kernel(None, _ATTENTION, "a Pallas kernel"),
    RING: _Kernel(None, _ATTENTION, "matmuls, in blocks of ring attention"),
    PLAIN: _Kernel(None, _ATTENTION, "matmuls, with all logits in memory"),
    CUBLAS: _Kernel(_Platform.CUDA, _PRODUCTS, "cuBLAS or cuBLASLt"),
    CUBLAS_FP8: _Kernel(_Platform.CUDA, _PRODUCTS, "cuBLASLt in fp8"),
    CUBLAS_INT8: _Kernel(_Platform.CUDA, _PRODUCTS, "cuBLASLt in int8"),
    TRITON: _Kernel(_Platform.CUDA, _PRODUCTS, "XLA's Triton fusions"),
    XLA: _Kernel(None, _PRODUCTS, "XLA's own code"),
  }
)
# The scope that `layers.attention.ring` names.
_RING: Final = "ring_attention"
# What autotuning chooses among. Products of cuBLAS in few bits stand only where
# they were asked for, or where Triton is off.
_TUNED: Final = frozenset({CUBLAS, TRITON})
# The dtypes of cuBLAS's kernels for few bits.
_NARROW: Final = {CUBLAS_FP8: "float8", CUBLAS_INT8: "int8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedKernel:
  """What an experiment expects of its compiled step.

  It holds on the platform of the kernel (cuDNN's is CUDA) and is not looked at
  elsewhere. Attention must be all of this kernel, and so must quantized
  products; of matmuls some.

  Attributes:
    part: `attention forward`, `attention backward`, `matmuls` or
      `quantized matmuls`, which are those that a quantization recipe covers.
    kernel: A name of `KERNELS`.
  """

  part: str
  kernel: str

  def __post_init__(self) -> None:
    if self.part not in PARTS:
      raise ValueError(
        f"ExpectedKernel.part is {self.part!r}"
        f"{suggestions.hint(self.part, PARTS)}"
      )
    known = [name for name, k in KERNELS.items() if self.part in k.parts]
    if self.kernel not in known:
      raise ValueError(
        f"ExpectedKernel.kernel is {self.kernel!r}, which is none of"
        f" {self.part}{suggestions.hint(self.kernel, known)}"
      )

  def holds_on(self, platform: hardware.Platform) -> bool:
    """Returns whether it is looked at on a platform."""
    return KERNELS[self.kernel].platform in (None, platform)


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
  for each in executed(program):
    parts = [each.part]
    if name_stack.quantized(each.cost.name) and each.cost.flops:
      parts.append(QUANTIZED)
    for part in parts:
      key = part, each.kernel, each.cost.dtype
      counts[key] = counts.get(key, 0) + each.count
  order = (*PARTS, OTHER)
  return tuple(
    result.KernelChoice(
      part=part,
      kernel=kernel,
      is_decided=is_tuned or is_decided(kernel),
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


def executed(program: hlo.Program) -> Iterator[Execution]:
  """Yields what kernels compute, in the order of the program's text.

  Args:
    program: The compiled step of one device.
  """
  runs = costs.multiplicities(program)
  for (computation, name), cost in costs.costs(program).items():
    instruction = program.computations[computation].instructions[name]
    found = _classified(instruction, cost)
    if found is not None and runs.get(computation):
      yield Execution(*found, runs[computation], cost)


def is_decided(kernel: str) -> bool:
  """Returns whether a kernel of a plan is that of the run.

  Args:
    kernel: A name of `KERNELS`; others are decided.
  """
  return kernel not in _TUNED


def mismatches(
  expected: Sequence[ExpectedKernel],
  found: Sequence[result.KernelChoice],
  *,
  platform: hardware.Platform,
) -> Iterator[tuple[ExpectedKernel, str]]:
  """Yields expectations that are decidedly not met, with what was found.

  Args:
    expected: Of the experiment.
    found: What `choices` returned.
    platform: Whose compiler made the program.
  """
  for each in expected:
    if not each.holds_on(platform):
      continue
    of_part = [choice for choice in found if choice.part == each.part]
    others = [choice for choice in of_part if choice.kernel != each.kernel]
    is_met = len(others) < len(of_part)
    if each.part == QUANTIZED and each.kernel in _NARROW:
      # Of operands in few bits, autotuning may still find such a kernel.
      others = [c for c in others if c.is_decided or not _may_be(c, each)]
      is_met = bool(of_part) and not others
    elif each.part != PRODUCTS:
      is_met = is_met and not others
    elif each.kernel in _TUNED and any(not c.is_decided for c in of_part):
      # The run will tell.
      is_met = True
    if not is_met:
      yield each, _words(others)


def _may_be(choice: result.KernelChoice, expected: ExpectedKernel) -> bool:
  """Whether products have the dtype of a kernel for few bits."""
  return choice.dtype.startswith(_NARROW[expected.kernel])


def _words(found: Sequence[result.KernelChoice]) -> str:
  if not found:
    return "none"
  return ", ".join(
    f"{choice.count} of {choice.kernel} ({KERNELS[choice.kernel].words})"
    if choice.kernel in KERNELS
    else f"{choice.count} of {choice.kernel}"
    for choice in found
  )


def _classified(
  instruction: hlo.Instruction, cost: costs.Cost
) -> tuple[str, str] | None:
  """The part that an instruction computes, and the kernel that does."""
  kernel = kernels.name(instruction) or ""
  is_backward = name_stack.is_backward(
    cost.name
  ) and not name_stack.is_recomputed(cost.name)
  attention = BACKWARD if is_backward else FORWARD
  if kernels.is_attention(kernel):
    is_backward = kernels.is_attention_backward(kernel)
    return BACKWARD if is_backward else FORWARD, CUDNN
  if _RING in cost.name and cost.kind in (costs.ATTENTION, costs.MATMUL):
    # Small ones are cuBLAS's.
    return attention, RING
  if kernel.startswith("__cublas"):
    if kernel.endswith("$f8"):
      return PRODUCTS, CUBLAS_FP8
    return PRODUCTS, CUBLAS_INT8 if cost.dtype == "int8" else CUBLAS
  if _is_pallas(kernel):
    if "splash" in instruction.attributes:
      return attention, SPLASH
    is_attention = "attention" in name_stack.part(cost.name).lower()
    return (attention if is_attention else OTHER), PALLAS
  if cost.kind == costs.ATTENTION and not _is_projection(cost.name):
    return attention, PLAIN
  if cost.kind in (costs.ATTENTION, costs.MATMUL, costs.CONVOLUTION):
    return PRODUCTS, TRITON if "triton" in kernel else XLA
  return None


def _is_projection(stack: str) -> bool:
  """Whether a product is an einsum that has not both queries T and keys S.

  The compiler gives gradients of weights batch dimensions too.
  """
  equations = re.findall(r"[\w.,]+->\w+", stack)
  return bool(equations) and not {"T", "S"} <= set(equations[-1])


def _is_pallas(kernel: str) -> bool:
  """Whether a custom call is a Pallas kernel: of TPUs, Triton's, Mosaic's."""
  return kernel == "tpu_custom_call" or any(
    word in kernel for word in ("xla.gpu.triton", "mosaic_gpu")
  )
