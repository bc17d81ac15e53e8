"""How fast the devices work: model TFLOP/s and MFU, from the program itself.

  model FLOPs   of the traced step: forward and backward, no recomputation, and
                of attention only the pairs that a causal mask lets through
  TFLOP/s       model FLOPs / seconds of a step / devices / 1e12
  MFU           TFLOP/s / the devices' peak in the dtype of most FLOPs

Both are per device. A kind of device whose peak is not known has no MFU.
"""

import dataclasses

import jax

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware as hardware_lib

_TERA = 1e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFigures:
  """What a step costs, and what its devices could do.

  Attributes:
    flops: Model FLOPs of a step, over all devices.
    num_devices: Of the mesh.
    peak: FLOP/s of a device; None if not known.
    note: What MFU stands on, or why there is none; for the user, once.
  """

  flops: float
  num_devices: int
  peak: float | None
  note: str

  def values(self, seconds: float) -> dict[str, float]:
    """Returns `model_tflops_per_device` and, if known, `mfu`.

    Args:
      seconds: Of a step, positive.
    """
    if seconds <= 0 or self.flops <= 0:
      return {}
    rate = self.flops / seconds / self.num_devices
    figures = {"model_tflops_per_device": rate / _TERA}
    if self.peak is not None:
      figures["mfu"] = rate / self.peak
    return figures


def of_step(
  traced: jax.stages.Traced, *, length: int, num_devices: int, device_kind: str
) -> StepFigures:
  """Counts a traced step.

  Args:
    traced: The whole program, before it is split over devices.
    length: Tokens of a row.
    num_devices: Over how many it is split.
    device_kind: As `jax.Device.device_kind` says it.
  """
  counted = flops_lib.count(traced.jaxpr)
  total = counted.causal_model_flops(length)
  dtypes = counted.by("dtype", remat=False)
  hardware = hardware_lib.for_device_kind(device_kind)
  peak, dtype = None, next(iter(dtypes), "")
  if hardware is not None and dtype:
    peak = hardware.peak_flops(dtype)
  if not total:
    note = "no matrix product was found in the step, so there is no MFU"
  elif peak is None:
    what = f"{dtype} " if hardware is not None else ""
    note = f"the {what}peak of {device_kind!r} is not known, so there is no MFU"
  else:
    note = f"MFU is of {peak / _TERA:,.0f} TFLOP/s ({device_kind}, {dtype})"
  return StepFigures(flops=total, num_devices=num_devices, peak=peak, note=note)
