"""Memory of devices and of the host, in bytes."""

from collections.abc import Mapping, Sequence
import os
import resource
import sys
from typing import Any

import jax

_STATUS = "/proc/self/status"
_KIB = 1024


def device_memory(
  devices: Sequence[jax.Device], *, step: Mapping[str, float] | None = None
) -> dict[str, float]:
  """Returns `device_memory_bytes` and `device_memory_peak_bytes`.

  Args:
    devices: Of the mesh. Those of other hosts are left out; the fullest counts.
    step: What the compiler says of a step, for devices that count nothing.

  Returns:
    Bytes in use at this moment, and at most since the process began. Where the
    devices do not count, which is so on CPUs, what `step` says.
  """
  figures = fullest(
    [
      device.memory_stats()
      for device in devices
      if device.process_index == jax.process_index()
    ]
  )
  return figures or dict(step or {})


def fullest(stats: Sequence[Mapping[str, int] | None]) -> dict[str, float]:
  """Returns the figures of `device_memory`, nothing if no device counts.

  Args:
    stats: Of each device, as JAX gives them.
  """
  counted = [each for each in stats if each and "bytes_in_use" in each]
  if not counted:
    return {}
  figures = {
    "device_memory_bytes": float(max(s["bytes_in_use"] for s in counted))
  }
  peaks = [s["peak_bytes_in_use"] for s in counted if "peak_bytes_in_use" in s]
  if peaks:
    figures["device_memory_peak_bytes"] = float(max(peaks))
  return figures


def step_memory(compiled: jax.stages.Compiled) -> dict[str, float]:
  """Returns `step_memory_bytes`: what a device needs to run a step.

  Args:
    compiled: The step. Its arguments, results and temporaries count, and
      what is donated counts once.

  Returns:
    Nothing if the compiler does not tell.
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
  # Linux counts KiB here, macOS bytes.
  scale = 1 if sys.platform == "darwin" else _KIB
  return {"host_memory_peak_bytes": float(peak * scale)}


def parse_status(text: str) -> dict[str, float]:
  """Returns the figures of `host_memory` from Linux's `/proc/self/status`.

  Args:
    text: Its content.
  """
  names = {"VmRSS": "host_memory_bytes", "VmHWM": "host_memory_peak_bytes"}
  figures = {}
  for line in text.splitlines():
    key, _, value = line.partition(":")
    if key in names:
      figures[names[key]] = float(int(value.split()[0]) * _KIB)
  return figures
