"""Analytical cost of a candidate: matmuls, links, memory.

The time is the sum, as if nothing overlapped: so that of two candidates the one
that recomputes more or sends more is never the cheaper.
"""

from collections.abc import Mapping
import dataclasses
import math

from paxon.runner.plan import hardware
from paxon.runner.plan.search import communication


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Seconds of a step at datasheet rates.

  Attributes:
    compute: Matrix products, recomputation included.
    fast: Communication inside a host or a slice.
    network: Communication between them.
  """

  compute: float
  fast: float
  network: float

  @property
  def total(self) -> float:
    """One after the other."""
    return self.compute + self.fast + self.network

  @property
  def bound(self) -> float:
    """All at the same time."""
    return max(self.compute, self.fast, self.network)


def of(
  flops: Mapping[str, float | int],
  traffic: communication.Traffic,
  *,
  kind: hardware.Hardware,
  num_devices: int,
) -> Cost:
  """Returns the cost of a step.

  Args:
    flops: Of all devices, recomputation included, by dtype of the operands.
    traffic: Of one device.
    kind: The hardware.
    num_devices: How many of it.

  Raises:
    ValueError: The hardware's rates are not known.
  """
  peak = kind.peak_flops()
  if peak is None or kind.link_bandwidth is None:
    raise ValueError(f"The rates of {kind.name} are not known.")
  network = kind.network_bandwidth or kind.link_bandwidth
  return Cost(
    compute=math.fsum(
      count / num_devices / (kind.peak_flops(dtype) or peak)
      for dtype, count in flops.items()
      if dtype
    ),
    fast=traffic.fast / kind.link_bandwidth,
    network=traffic.network / network,
  )
