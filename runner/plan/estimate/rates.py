"""Effective rates of a device: datasheet times calibration."""

from collections.abc import Mapping
import dataclasses

from paxon.runner.plan import hardware, network
from paxon.runner.plan.estimate import calibration as calibrations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
  """Rates of one device that a program reaches.

  Attributes:
    matmul: FLOP/s of products, by dtype.
    attention: FLOP/s of attention kernels, by dtype.
    memory: Bytes/s of the memory.
    links: To other devices.
    kernel_overhead: Seconds between two kernels.
    peak: FLOP/s in bfloat16, or of the fastest dtype where no data sheet
      states them, without any share: what an MFU is of.
  """

  matmul: Mapping[str, float]
  attention: Mapping[str, float]
  memory: float
  links: network.Links
  kernel_overhead: float
  peak: float

  def flops(self, dtype: str, *, is_attention: bool = False) -> float | None:
    """Returns the FLOP/s of products, or None for an unknown dtype.

    Args:
      dtype: Of their operands, as JAX names it.
      is_attention: Whether an attention kernel computes them.
    """
    table = self.attention if is_attention else self.matmul
    name = "float8" if dtype.startswith("float8") else dtype
    return table.get(name)


def of(
  kind: hardware.Hardware, calibration: calibrations.Calibration
) -> Rates | None:
  """Returns the rates of a kind of device.

  Args:
    kind: The hardware.
    calibration: Shares of its rates.

  Returns:
    The rates, or None where there is neither a data sheet nor `rates` in the
    calibration.
  """
  flops, memory, link = kind.flops, kind.memory_bandwidth, kind.link_bandwidth
  between = kind.network_bandwidth
  given = calibration.rates
  if given is not None:
    flops, memory, link = given.flops, given.memory, given.fast_link
    between = given.network
  peak = flops.get("bfloat16")
  if given is not None:
    peak = max(flops.values())
  if peak is None or memory is None or link is None:
    return None
  shares = calibration.matmul
  return Rates(
    matmul={
      dtype: rate * shares.get(dtype, shares[calibrations.DEFAULT])
      for dtype, rate in flops.items()
    },
    attention={
      dtype: rate * calibration.attention for dtype, rate in flops.items()
    },
    memory=memory * calibration.memory,
    links=network.Links(
      fast=link * calibration.fast_link,
      count=kind.links,
      network=None if between is None else between * calibration.network,
    ),
    kernel_overhead=calibration.kernel_overhead,
    peak=peak,
  )
