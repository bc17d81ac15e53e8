"""The estimate of a plan, or why there is none."""

from collections.abc import Sequence
import math
from typing import Final

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware, network, result
from paxon.runner.plan.estimate import efficiency as efficiencies
from paxon.runner.plan.estimate import simulation
from paxon.runner.plan.program_text import collectives, costs, hlo, lints

_LOW: Final = ("float8", "int8")


def estimate_step(
  program: hlo.Program,
  *,
  communication: collectives.Communication,
  placement: network.Placement,
  kind: hardware.Hardware,
  efficiency: efficiencies.Efficiency | None,
  flops: flops_lib.Flops,
  batch_shape: Sequence[int] | None,
) -> tuple[result.Estimate | None, tuple[str, ...]]:
  """Estimates the time of a step.

  Args:
    program: The compiled step of one device.
    communication: Result of `collectives.find` for the program.
    placement: Of the mesh.
    kind: The hardware.
    efficiency: Fractions of its rates; None for a CPU.
    flops: Of the step, from its jaxpr.
    batch_shape: Rows and their length, for tokens per second.

  Returns:
    The estimate, or None, and notes: why there is none, or what is unusual.
  """
  num_devices = len(placement.domains)
  sheet = efficiencies.rates(kind, efficiencies.DATASHEET)
  rates = None if efficiency is None else efficiencies.rates(kind, efficiency)
  found = costs.read(program)

  def simulate(at: efficiencies.Rates) -> simulation.Timeline:
    return simulation.simulate(
      program,
      operations=found.operations,
      transfers={
        (c.computation, c.instruction): network.transfer(c, placement, at.links)
        for c in communication.collectives
      },
      rates=at,
      attention_share=flops.attention_share(),
    )

  try:
    ratio = _compare_flops(found, flops, num_devices=num_devices)
    if efficiency is None or rates is None or sheet is None:
      raise simulation.NotPredictedError(
        f"the rates of {kind.name} are not known"
      )
    on_sheet = simulate(sheet)
    slowdown = efficiency.slowdown(
      num_devices=num_devices,
      num_hosts=math.ceil(num_devices / kind.devices_per_host),
      low_precision=_find_low_precision(flops),
    )
    step = simulate(rates).stretch(slowdown)
  except simulation.NotPredictedError as error:
    return None, (f"The time of a step is not predicted: {error}.",)
  model: float = flops.model_flops
  tokens = None
  if batch_shape is not None and len(batch_shape) > 1:
    model = flops.causal_model_flops(batch_shape[1])
    tokens = batch_shape[0] * batch_shape[1]
  most = model / (num_devices * sheet.peak)
  products = math.fsum(
    count / num_devices / (sheet.flops(dtype) or sheet.peak)
    for dtype, count in flops.count_by("dtype").items()
    if dtype
  )
  # Compilers move a few FLOPs between matmuls.
  added = ratio if ratio > lints.RATIO[1] else 1.0
  estimate = result.Estimate(
    step=step.total,
    compute=step.compute,
    memory=step.memory,
    overhead=step.overhead,
    exposed=step.exposed,
    tokens_per_second=tokens / step.total if tokens and step.total else None,
    mfu=_ratio(most, step.total),
    band=efficiency.band if num_devices > 1 else efficiency.lone_band,
    source=efficiency.source,
    slowdown=slowdown,
    datasheet_step=on_sheet.total,
    datasheet_mfu=_ratio(most, on_sheet.total),
    ceiling_mfu=_ratio(most, added * products),
  )
  if added == 1.0:
    return estimate, ()
  return estimate, (
    f"The estimated step time includes what the compiler added: {added:.3f}"
    " times the traced FLOPs.",
  )


def _compare_flops(
  found: costs.Costs, flops: flops_lib.Flops, *, num_devices: int
) -> float:
  """Returns the FLOPs of the compiled program, relative to the traced one.

  Raises:
    NotPredictedError: FLOPs of the compiled program are unknown or missing.
  """
  if found.unknown:
    raise simulation.NotPredictedError(
      f"there is no formula for the FLOPs of {', '.join(found.unknown)}"
    )
  if not flops.hardware_flops:
    return 1.0
  ratio = num_devices * found.flops / flops.hardware_flops
  if ratio < lints.RATIO[0]:
    raise simulation.NotPredictedError(
      f"the compiled program has {ratio:.4f} of the FLOPs of the traced one,"
      f" less than {lints.RATIO[0]}"
    )
  return ratio


def _find_low_precision(flops: flops_lib.Flops) -> float:
  """Returns the share of FLOPs whose operands have 8 bits."""
  counts = flops.count_by("dtype")
  low = sum(n for name, n in counts.items() if name and name.startswith(_LOW))
  return _ratio(float(low), float(sum(counts.values())))


def _ratio(a: float, b: float) -> float:
  return a / b if b else 0.0
