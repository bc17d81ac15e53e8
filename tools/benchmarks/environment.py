"""What figures were measured on."""

import datetime
import os
import pathlib
import platform
from typing import Any

import jax


def describe(now: datetime.datetime) -> dict[str, Any]:
  """Returns the date, versions and devices, JSON values.

  Args:
    now: The time of the measurement.
  """
  devices = jax.devices()
  return {
    "date": now.date().isoformat(),
    "jax": jax.__version__,
    "python": platform.python_version(),
    "device": devices[0].device_kind,
    "num_devices": len(devices),
    "cpu": cpu_model(),
    "cores": len(os.sched_getaffinity(0)),
    "load_before": round(os.getloadavg()[0], 2),
  }


def cpu_model(path: str = "/proc/cpuinfo") -> str:
  """Returns what the processor calls itself."""
  try:
    lines = pathlib.Path(path).read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  names = [line.partition(":")[2] for line in lines if "model name" in line]
  return names[0].strip() if names else platform.machine()
