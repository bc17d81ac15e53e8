"""The estimate of a plan, or why there is none."""

from collections.abc import Sequence
import math
from typing import Final

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware, network, result
from paxon.runner.plan.estimate import efficiency as efficiencies
from paxon.runner.plan.estimate import simulation
from paxon.runner.plan.program_text import collectives, costs, hlo

# FLOPs of the compiled text over those of the jaxpr. Below, products are
# missing in one of them; above, the compiler computes much twice, or what was
# read is wrong. Either way a time would be of another program.
_LEAST: Final = 0.999
_MOST: Final = 1.02


def of(
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
    communication: What `collectives.find` returns of it.
    placement: Of the mesh.
    kind: The hardware.
    efficiency: Fractions of its rates; None for a CPU.
    flops: Of the step, from its jaxpr.
    batch_shape: Rows and their length, for tokens per second.

  Returns:
    The estimate, or None, and notes that say why.
  """
  try:
    _check_flops(program, flops, num_devices=len(placement.domains))
    estimate = _estimate(
      program,
      communication,
      placement,
      kind,
      efficiency,
      flops,
      batch_shape,
    )
  except simulation.NotPredictedError as error:
    return None, (f"The time of a step is not predicted: {error}.",)
  return estimate, ()


def _estimate(
  program: hlo.Program,
  communication: collectives.Communication,
  placement: network.Placement,
  kind: hardware.Hardware,
  efficiency: efficiencies.Efficiency | None,
  flops: flops_lib.Flops,
  batch_shape: Sequence[int] | None,
) -> result.Estimate:
  sheet = efficiencies.rates(kind, efficiencies.DATASHEET)
  rates = None if efficiency is None else efficiencies.rates(kind, efficiency)
  if efficiency is None or rates is None or sheet is None:
    raise simulation.NotPredictedError(
      f"the rates of {kind.name} are not known"
    )

  operations = costs.read(program).operations

  def simulate(at: efficiencies.Rates) -> simulation.Timeline:
    return simulation.simulate(
      program,
      operations=operations,
      transfers={
        (c.computation, c.instruction): network.transfer(c, placement, at.links)
        for c in communication.collectives
      },
      rates=at,
      attention_share=flops.attention_share(),
    )

  found, on_sheet = simulate(rates), simulate(sheet)
  num_devices = len(placement.domains)
  model: float = flops.model_flops
  tokens = None
  if batch_shape is not None and len(batch_shape) > 1:
    model = flops.causal_model_flops(batch_shape[1])
    tokens = batch_shape[0] * batch_shape[1]
  most = model / (num_devices * sheet.peak)
  products = math.fsum(
    count / num_devices / (sheet.flops(dtype) or sheet.peak)
    for dtype, count in flops.by("dtype").items()
    if dtype
  )
  return result.Estimate(
    step=found.total,
    compute=found.compute,
    memory=found.memory,
    overhead=found.overhead,
    exposed=found.exposed,
    tokens_per_second=tokens / found.total if tokens and found.total else None,
    mfu=_ratio(most, found.total),
    band=efficiency.band,
    source=efficiency.source,
    datasheet_step=on_sheet.total,
    datasheet_mfu=_ratio(most, on_sheet.total),
    ceiling_mfu=_ratio(most, products),
  )


def _check_flops(
  program: hlo.Program, flops: flops_lib.Flops, *, num_devices: int
) -> None:
  total = costs.read(program)
  if total.unknown:
    raise simulation.NotPredictedError(
      f"there is no formula for the FLOPs of {', '.join(total.unknown)}"
    )
  if flops.hardware_flops:
    ratio = num_devices * total.flops / flops.hardware_flops
    if not _LEAST <= ratio <= _MOST:
      raise simulation.NotPredictedError(
        f"the compiled program has {ratio:.4f} of the FLOPs of the traced one,"
        f" not {_LEAST} to {_MOST}"
      )


def _ratio(a: float, b: float) -> float:
  return a / b if b else 0.0
