"""Metrics of a training step's cost: TFLOP/s, MFU and memory.

  model FLOPs   of the traced step: forward and backward, no recomputation, and
                for attention only the pairs that a causal mask admits
  TFLOP/s       model FLOPs / seconds of a step / devices / 1e12
  MFU           TFLOP/s / the devices' peak in the dtype of most FLOPs

Rates are per device; memory is in bytes. There is no MFU for a device kind
whose peak is unknown.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
import resource
import sys
from typing import Any

import jax

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware as hardware_lib

_TERA = 1e12
_STATUS = "/proc/self/status"
_KIB = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
  """The FLOPs of a step and the peak of its devices.

  Attributes:
    flops: Model FLOPs of a step, over all devices.
    num_devices: Number of devices in the mesh.
    peak: Peak FLOP/s of a device; None if unknown.
    note: One line for the user: the basis of MFU, or why there is none; empty
      on CPUs, whose vendors state no peak.
  """

  flops: float
  num_devices: int
  peak: float | None
  note: str

  def values(self, seconds: float) -> dict[str, float]:
    """Returns `model_tflops_per_device` and, if the peak is known, `mfu`."""
    if seconds <= 0 or self.flops <= 0:
      return {}
    rate = self.flops / seconds / self.num_devices
    values = {"model_tflops_per_device": rate / _TERA}
    if self.peak is not None:
      values["mfu"] = rate / self.peak
    return values


def count_step(
  traced: jax.stages.Traced, *, length: int, num_devices: int, device_kind: str
) -> StepCost:
  """Counts the FLOPs of a traced step on sequences of `length` tokens."""
  counted = flops_lib.count(traced.jaxpr)
  total = counted.causal_model_flops(length)
  dtypes = counted.count_by("dtype", remat=False)
  hardware = hardware_lib.find_by_device_kind(device_kind)
  peak, dtype = None, next(iter(dtypes), "")
  if hardware is not None and dtype:
    peak = hardware.peak_flops(dtype)
  if not total:
    note = "no MFU: the step contains no matmul"
  elif peak is None and device_kind == "cpu":
    note = ""
  elif peak is None:
    what = f"{dtype} " if hardware is not None else ""
    note = f"no MFU: the {what}peak of {device_kind!r} is unknown"
  else:
    note = (
      f"MFU is relative to {peak / _TERA:,.0f} TFLOP/s ({device_kind}, {dtype})"
    )
  return StepCost(flops=total, num_devices=num_devices, peak=peak, note=note)


def device_memory(
  devices: Sequence[jax.Device], *, step: Mapping[str, float] | None = None
) -> dict[str, float]:
  """Returns `device_memory_bytes` and, since the start, its peak.

  Both are the maximum over this host's devices; for devices without memory
  statistics, such as CPUs, the result is `step` (see `step_memory`).
  """
  values = max_over_devices(
    [
      device.memory_stats()
      for device in devices
      if device.process_index == jax.process_index()
    ]
  )
  return values or dict(step or {})


def max_over_devices(
  stats: Sequence[Mapping[str, int] | None],
) -> dict[str, float]:
  """Returns the values of `device_memory`; empty without any statistics."""
  counted = [each for each in stats if each and "bytes_in_use" in each]
  if not counted:
    return {}
  values = {
    "device_memory_bytes": float(max(s["bytes_in_use"] for s in counted))
  }
  peaks = [s["peak_bytes_in_use"] for s in counted if "peak_bytes_in_use" in s]
  if peaks:
    values["device_memory_peak_bytes"] = float(max(peaks))
  return values


def step_memory(compiled: jax.stages.Compiled) -> dict[str, float]:
  """Returns `step_memory_bytes`: memory per device of a compiled step.

  Donated buffers count once. Empty if the compiler has no memory analysis.
  """
  analysis: Any = compiled.memory_analysis()
  if analysis is None:
    return {}
  total = (
    analysis.argument_size_in_bytes
    + analysis.output_size_in_bytes
    + analysis.temp_size_in_bytes
    - analysis.alias_size_in_bytes
  )
  return {"step_memory_bytes": float(total)}


def host_memory() -> dict[str, float]:
  """Returns `host_memory_bytes` (resident) and `host_memory_peak_bytes`."""
  if os.path.exists(_STATUS):
    with open(_STATUS) as file:
      return parse_status(file.read())
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # In KiB on Linux, in bytes on macOS.
  scale = 1 if sys.platform == "darwin" else _KIB
  return {"host_memory_peak_bytes": float(peak * scale)}


def parse_status(text: str) -> dict[str, float]:
  """Returns the values of `host_memory` from Linux's `/proc/self/status`."""
  names = {"VmRSS": "host_memory_bytes", "VmHWM": "host_memory_peak_bytes"}
  values = {}
  for line in text.splitlines():
    key, _, value = line.partition(":")
    if key in names:
      values[names[key]] = float(int(value.split()[0]) * _KIB)
  return values
