"""Achieved rates of a device: datasheet rates times efficiency factors.

The factors of GPUs are rounded values of kernels of three train steps, and of
attention alone; those of TPUs of published microbenchmarks. `tools/gpu_check`
measures the factors of a machine and writes them in the form that plans read:

  PAXON_PLAN_EFFICIENCY=matmul=0.74,matmul.float8=0.7,memory=0.62
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Final

from paxon.runner import user_error
from paxon.runner.plan import hardware, network

# Environment variable with factors that replace those of the table.
VARIABLE: Final = "PAXON_PLAN_EFFICIENCY"

_FACTORS: Final = ("matmul", "attention", "memory", "fast_link", "network")
# Datasheets may be a little too modest; twice their rate is a mistake.
_MOST: Final = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
  """Achieved fractions of datasheet rates.

  Attributes:
    source: Origin of the factors, in one line.
    matmul: Of matmuls, unless `by_dtype` has the dtype.
    by_dtype: Of matmuls by dtype.
    attention: Of attention kernels, with heads of 128.
    narrow_heads: Multiple of it with heads of less than 128.
    attention_bias: Multiple of it with a bias, as packed documents have.
    memory: Of the memory bandwidth.
    fast_link: Of the links within a host or slice.
    network: Of the links between them.
    kernel_overhead: Seconds between two kernels.
    band: Multiples of an estimate between which the measured time is expected.
  """

  source: str
  matmul: float
  by_dtype: Mapping[str, float] = dataclasses.field(default_factory=dict)
  attention: float
  memory: float
  fast_link: float
  network: float
  kernel_overhead: float
  narrow_heads: float = 1.0
  attention_bias: float = 1.0
  band: tuple[float, float] = (0.75, 1.33)


_CUDA: Final = Efficiency(
  source=(
    "measured on one H200, 2026-11-27: matmuls of bfloat16 and fp8 0.75 of peak"
    " and other kernels 0.6 of the memory bandwidth in train steps; cuDNN"
    " attention 0.45 of peak with heads of 128, half of it with heads of 64,"
    " 0.6 of it with a bias; not measured by us: NCCL gathers 0.8 of NVLink and"
    " 0.85 of the adapters, 1.5 us between kernels"
  ),
  matmul=0.75,
  attention=0.45,
  narrow_heads=0.5,
  attention_bias=0.6,
  memory=0.6,
  fast_link=0.8,
  network=0.85,
  kernel_overhead=1.5e-6,
)
_TPU: Final = Efficiency(
  source=(
    "not measured by us, 2026-11-21: rounded values for large matmuls, long"
    " copies and long gathers, 0.9 of each rate; attention kernels 0.5, the"
    " data center network 0.8; no time between instructions"
  ),
  matmul=0.9,
  attention=0.5,
  memory=0.9,
  fast_link=0.9,
  network=0.8,
  kernel_overhead=0.0,
)
DATASHEET: Final = Efficiency(
  source="datasheet rates",
  matmul=1.0,
  attention=1.0,
  memory=1.0,
  fast_link=1.0,
  network=1.0,
  kernel_overhead=0.0,
)


def choose(
  kind: hardware.Hardware, environ: Mapping[str, str]
) -> Efficiency | None:
  """Returns the efficiency of a kind of device, or None for a CPU.

  Args:
    kind: The hardware.
    environ: The environment; `PAXON_PLAN_EFFICIENCY` replaces factors.

  Raises:
    UserError: The variable has another form.
  """
  if kind.platform is hardware.Platform.CPU:
    return None
  found = _CUDA if kind.platform is hardware.Platform.CUDA else _TPU
  text = environ.get(VARIABLE, "").strip()
  if not text:
    return found
  factors: dict[str, Any] = {}
  by_dtype: dict[str, float] = {}
  dtypes = sorted(
    {d for n in hardware.names() for d in hardware.find_kind(n).flops}
  )
  for entry in text.split(","):
    name, _, value = (part.strip() for part in entry.partition("="))
    family, _, dtype = name.partition(".")
    try:
      factor = float(value)
    except ValueError:
      factor = 0.0
    is_known = name in _FACTORS or (family == "matmul" and dtype in dtypes)
    if not is_known or not 0 < factor <= _MOST:
      raise user_error.UserError(
        f"{VARIABLE}={text}: {entry.strip()!r} must be NAME=FACTOR with a"
        f" factor above 0 and at most {_MOST:g}; names are"
        f" {', '.join(_FACTORS)} and matmul.DTYPE with DTYPE one of"
        f" {', '.join(dtypes)}."
      )
    if dtype:
      by_dtype[dtype] = factor
    else:
      factors[name] = factor
  return dataclasses.replace(
    found,
    source=f"{VARIABLE}={text}; the others {found.source}",
    by_dtype=by_dtype,
    **factors,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
  """Rates of one device that a program achieves.

  Attributes:
    matmul: FLOP/s of matmuls, by dtype.
    attention: FLOP/s of attention kernels with heads of 128, by dtype.
    narrow_heads: Multiple of these with heads of less than 128.
    attention_bias: Multiple of these with a bias.
    memory: Bytes/s of the memory.
    links: To other devices.
    kernel_overhead: Seconds between two kernels.
    peak: Datasheet FLOP/s in bfloat16, for MFUs.
  """

  matmul: Mapping[str, float]
  attention: Mapping[str, float]
  memory: float
  links: network.Links
  kernel_overhead: float
  peak: float
  narrow_heads: float = 1.0
  attention_bias: float = 1.0

  def flops(self, dtype: str, *, is_attention: bool = False) -> float | None:
    """Returns the FLOP/s of matmuls, or None for an unknown dtype.

    Args:
      dtype: Of their operands, as JAX names it.
      is_attention: Whether an attention kernel computes them.
    """
    table = self.attention if is_attention else self.matmul
    name = "float8" if dtype.startswith("float8") else dtype
    return table.get(name)

  def attention_factor(self, head_dim: int | None, *, has_bias: bool) -> float:
    """Returns the share of the rate of attention that a cuDNN kernel reaches.

    Args:
      head_dim: Size of its heads; None if not known.
      has_bias: Whether it reads a bias.
    """
    narrow = head_dim is not None and head_dim < 128
    return (self.narrow_heads if narrow else 1.0) * (
      self.attention_bias if has_bias else 1.0
    )


def rates(kind: hardware.Hardware, efficiency: Efficiency) -> Rates | None:
  """Returns the rates of a kind of device, or None without datasheet rates."""
  peak, memory, links = (
    kind.peak_flops(),
    kind.memory_bandwidth,
    network.links(kind),
  )
  if peak is None or memory is None or links is None:
    return None
  between = links.network
  return Rates(
    matmul={
      dtype: rate * efficiency.by_dtype.get(dtype, efficiency.matmul)
      for dtype, rate in kind.flops.items()
    },
    attention={
      dtype: rate * efficiency.attention for dtype, rate in kind.flops.items()
    },
    memory=memory * efficiency.memory,
    links=dataclasses.replace(
      links,
      fast=links.fast * efficiency.fast_link,
      network=None if between is None else between * efficiency.network,
    ),
    kernel_overhead=efficiency.kernel_overhead,
    peak=peak,
    narrow_heads=efficiency.narrow_heads,
    attention_bias=efficiency.attention_bias,
  )
