"""Achieved rates of a device: datasheet rates times efficiency factors.

The factors of GPUs are rounded values of kernels of three train steps, and of
attention alone, on one H200; those of TPUs of published microbenchmarks. The
simulation then runs one device at these rates. What it lacks multiplies its
time (`Efficiency.slowdown`):

  (1 + casts * share of 8-bit FLOPs)
    * exp(load [several devices] + stragglers * sqrt(2 log(hosts)))

* casts: XLA's casts to 8 bits with transposes reach a fifth of the memory
  bandwidth. One H200 took 284.7 ms for 262 ms by the plan.
* load: the devices of a host share its power and cooling, so clocks fall, and
  NCCL's kernels take multiprocessors from matmuls that run at the same time.
* stragglers: a step waits for the slowest host. Of n hosts with equal normal
  deviations the slowest is about sqrt(2 log(n)) deviations late.

Load and stragglers are fitted to published runs, which docs/plan_accuracy.md
lists and `tools/plans --accuracy` prints. `tools/gpu_check` measures the rates
of a machine and writes them in the form that plans read:

  PAXON_PLAN_EFFICIENCY=matmul=0.74,matmul.float8=0.7,memory=0.62
"""

from collections.abc import Mapping
import dataclasses
import math
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
    casts: Share by which a step is longer if all its FLOPs are of 8 bits.
    load: Logarithm of the multiple of the time with several devices.
    stragglers: The same for each deviation that the slowest host is late.
    band: Multiples of an estimate between which the measured time is expected,
      nine times of ten.
    lone_band: The same for one device.
    host: Of the link to the memory of the host; assumed.
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
  casts: float = 0.0
  load: float = 0.0
  stragglers: float = 0.0
  band: tuple[float, float] = (0.75, 1.33)
  lone_band: tuple[float, float] = (0.75, 1.33)
  host: float = 0.8

  def slowdown(
    self, *, num_devices: int, num_hosts: int, low_precision: float
  ) -> float:
    """Returns the multiple of the simulated time that a step takes.

    Args:
      num_devices: Number of devices.
      num_hosts: Number of hosts that they are on.
      low_precision: Share of the step's FLOPs with operands of 8 bits.
    """
    logarithm = self.stragglers * math.sqrt(2 * math.log(num_hosts))
    if num_devices > 1:
      logarithm += self.load
    return (1 + self.casts * low_precision) * math.exp(logarithm)


_PAGE: Final = "docs/plan_accuracy.md"
# Bands of nine of ten published runs, each without itself in the fit.
_OTHERS: Final = (0.9, 1.15)
_CUDA: Final = Efficiency(
  source=f"kernels of one H200, other hardware assumed alike ({_PAGE})",
  matmul=0.75,
  attention=0.45,
  narrow_heads=0.5,
  attention_bias=0.6,
  memory=0.6,
  fast_link=0.8,
  network=0.85,
  kernel_overhead=1.5e-6,
  casts=0.1,
  stragglers=0.065,
)
_HOPPER: Final = dataclasses.replace(
  _CUDA,
  source=f"kernels of one H200, scaled by seven published runs ({_PAGE})",
  load=0.064,
  band=(0.85, 1.22),
  lone_band=_OTHERS,
)
_A100: Final = dataclasses.replace(
  _CUDA,
  source=f"kernels of one H200, and two published runs ({_PAGE})",
  # 32 hosts are as fast as one: the adapters are twice as fast for the FLOPs.
  stragglers=0.0,
  band=_OTHERS,
)
_B200: Final = dataclasses.replace(
  _CUDA,
  source=f"kernels of one H200, and one published run ({_PAGE})",
  # One run says little.
  band=_HOPPER.band,
)
_TPU: Final = Efficiency(
  source=f"published microbenchmarks, and one published run ({_PAGE})",
  matmul=0.9,
  attention=0.5,
  memory=0.9,
  fast_link=0.9,
  network=0.8,
  kernel_overhead=0.0,
  band=_OTHERS,
)
_V4: Final = dataclasses.replace(
  _TPU,
  source=f"published microbenchmarks, and seven published runs ({_PAGE})",
  load=0.06,
)
_FAMILIES: Final[Mapping[str, Efficiency]] = {
  "a100": _A100,
  "h100": _HOPPER,
  "h200": _HOPPER,
  "b200": _B200,
  "v4": _V4,
}
DATASHEET: Final = Efficiency(
  source="datasheet rates",
  matmul=1.0,
  attention=1.0,
  memory=1.0,
  fast_link=1.0,
  network=1.0,
  kernel_overhead=0.0,
  host=1.0,
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
  is_tpu = kind.platform is hardware.Platform.TPU
  found = _FAMILIES.get(kind.name, _TPU if is_tpu else _CUDA)
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
    source=f"{VARIABLE}={text}; the others: {found.source}",
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
    host: Bytes/s to or from the memory of the host; None if not known.
  """

  matmul: Mapping[str, float]
  attention: Mapping[str, float]
  memory: float
  links: network.Links
  kernel_overhead: float
  peak: float
  host: float | None = None
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
  between, host = links.network, kind.host_bandwidth
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
    host=host and host * efficiency.host,
    narrow_heads=efficiency.narrow_heads,
    attention_bias=efficiency.attention_bias,
  )
