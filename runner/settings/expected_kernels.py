"""Kernels that an experiment expects in its compiled training step.

`runner.plan.kernel_contract` finds the kernels of a program.
"""

from collections.abc import Mapping
import dataclasses
import types
from typing import Final

from paxon.sharding import suggestions

FORWARD: Final = "attention forward"
BACKWARD: Final = "attention backward"
MATMULS: Final = "matmuls"
# Matmuls covered by a quantization recipe; MATMULS includes them.
QUANTIZED: Final = "quantized matmuls"
# Matmuls of tokens with the matrices of their experts.
GROUPED: Final = "grouped matmuls"
OTHER: Final = "other"
PARTS: Final = (FORWARD, BACKWARD, MATMULS, QUANTIZED, GROUPED)

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
MEGABLOX: Final = "megablox"

_ATTENTION: Final = (FORWARD, BACKWARD)
_MATMULS: Final = (MATMULS, QUANTIZED)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A kernel that experiments can expect.

  Attributes:
    platform: `cuda` or `tpu`; None for all.
    parts: Parts that it computes, of `PARTS`.
    description: For reports.
  """

  platform: str | None
  parts: tuple[str, ...]
  description: str


KERNELS: Final[Mapping[str, Kernel]] = types.MappingProxyType(
  {
    CUDNN: Kernel("cuda", _ATTENTION, "cuDNN's fused attention"),
    SPLASH: Kernel("tpu", _ATTENTION, "splash attention"),
    PALLAS: Kernel(None, (*_ATTENTION, GROUPED), "a Pallas kernel"),
    MEGABLOX: Kernel("tpu", (GROUPED,), "JAX's Pallas kernel for TPUs"),
    RING: Kernel(None, _ATTENTION, "matmuls, in blocks of ring attention"),
    PLAIN: Kernel(None, _ATTENTION, "matmuls, with all logits in memory"),
    CUBLAS: Kernel("cuda", _MATMULS, "cuBLAS or cuBLASLt"),
    CUBLAS_FP8: Kernel("cuda", _MATMULS, "cuBLASLt in fp8"),
    CUBLAS_INT8: Kernel("cuda", _MATMULS, "cuBLASLt in int8"),
    TRITON: Kernel("cuda", _MATMULS, "XLA's Triton fusions"),
    XLA: Kernel(None, (*_MATMULS, GROUPED), "XLA's own code"),
  }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedKernel:
  """A kernel that the compiled training step must use.

  Checked only on the kernel's platform. All attention, quantized or grouped
  matmuls must use it; of `matmuls` at least one.

  Attributes:
    part: `attention forward`, `attention backward`, `matmuls`,
      `quantized matmuls` (covered by a quantization recipe) or
      `grouped matmuls` (of mixtures of experts).
    kernel: A name in `KERNELS`.
  """

  part: str
  kernel: str

  def __post_init__(self) -> None:
    if self.part not in PARTS:
      raise ValueError(
        f"ExpectedKernel.part is {self.part!r}"
        f"{suggestions.suggest(self.part, PARTS)}"
      )
    known = [name for name, k in KERNELS.items() if self.part in k.parts]
    if self.kernel not in known:
      raise ValueError(
        f"ExpectedKernel.kernel is {self.kernel!r}, which does not compute"
        f" {self.part}{suggestions.suggest(self.kernel, known)}"
      )
