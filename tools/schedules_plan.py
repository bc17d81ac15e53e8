"""The time of a step on eight stages of H200, by the plan's rates.

A stage is one H200 of a DGX; its forward pass, and the gradients of its input
and of its weights, take what their products, attention, memory traffic and
kernels take at the rates that the plan's estimate has (`runner.plan.estimate`).
The simulation of schedules then says what a step takes on the executor's clock.
"""

from typing import Final

from paxon.pipeline.schedules import (
  closed_forms,
  operation,
  simulation,
  table,
)
from paxon.pipeline.schedules import costs as costs_lib
from paxon.runner.plan import hardware
from paxon.runner.plan.estimate import calibration, rates

NUM_STAGES: Final = 8
NUM_MICROBATCHES: Final = 32
LENGTH: Final = 8192
# The shape of Llama 3 8B (https://arxiv.org/abs/2407.21783, table 3).
NUM_LAYERS: Final = 32
EMBED: Final = 4096
MLP: Final = 14_336
HEADS: Final = 32
KV_HEADS: Final = 8
HEAD: Final = 128
# Kernels of a layer's forward pass, about: products, attention, norms and what
# lies between them.
_KERNELS: Final = 12
_BYTES: Final = 2
_HEADINGS: Final = (
  "Schedule",
  "Bubble, asynchronous, ms",
  "lock-step, ms",
  "Step, ms",
  "to GPipe",
  "Step with recomputation, ms",
  "to GPipe",
)


def calibrated() -> calibration.Calibration:
  """Returns the shares of the data sheet's rates that the plan reckons with."""
  found = calibration.for_hardware(hardware.named("h200"))
  assert found is not None
  return found


def stage_costs() -> costs_lib.Costs:
  """Returns the times of a stage for one microbatch, in milliseconds."""
  reached = rates.of(hardware.named("h200"), calibrated())
  assert reached is not None
  products = reached.flops("bfloat16")
  attention = reached.flops("bfloat16", is_attention=True)
  assert products is not None
  assert attention is not None
  layers = NUM_LAYERS // NUM_STAGES
  weights = EMBED * HEAD * 2 * (HEADS + KV_HEADS) + 3 * EMBED * MLP
  product = 2 * weights * LENGTH / products
  # Half of scores and sums, which is what a causal kernel computes.
  scores = 2 * LENGTH**2 * HEADS * HEAD / attention
  # Two norms and two sums of width D, the rotation of queries and keys, and
  # the gate: what is read and written beside the products.
  widths = 10 * EMBED + 2 * (HEADS + KV_HEADS) * HEAD + 3 * MLP
  passing = widths * LENGTH * _BYTES / reached.memory
  # Sums of gradients in float32 are read and written.
  adding = 8 * weights / reached.memory
  kernels = _KERNELS * reached.kernel_overhead

  def milliseconds(seconds: float) -> float:
    return 1e3 * layers * seconds

  return costs_lib.Costs(
    forward=milliseconds(product + scores + passing + kernels),
    # Five products of scores where the forward pass has two.
    input_gradient=milliseconds(
      product + 2.5 * scores + 1.5 * passing + 1.5 * kernels
    ),
    weight_gradient=milliseconds(product + adding + 0.5 * kernels),
    message=1e3 * LENGTH * EMBED * _BYTES / (reached.link * reached.num_links),
  )


def recomputing(
  costs: costs_lib.Costs, schedule: table.Table
) -> costs_lib.Costs:
  """Returns the times of operations that run their piece forward again.

  Args:
    costs: Of operations that do not.
    schedule: Where it has W, this repeats the way back through the layers, too.
  """
  kinds = {op.kind for _, op in schedule.places()}
  weights = costs.weight_gradient
  if operation.Kind.WEIGHT_GRADIENT in kinds:
    weights += costs.forward + costs.input_gradient
  return costs_lib.Costs(
    forward=costs.forward,
    input_gradient=costs.input_gradient,
    weight_gradient=weights,
    recompute=costs.forward,
    message=costs.message,
  )


def rows() -> list[tuple[str, ...]]:
  """Returns the headings and a row for each schedule."""
  costs, found = stage_costs(), []
  first: tuple[float, float] | None = None
  for form in closed_forms.CLOSED_FORMS:
    made = form.make(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
    saved = simulation.simulate(made, costs=costs)
    again = simulation.simulate(made, costs=recomputing(costs, made))
    steps = saved.lock_step.total, again.lock_step.total
    first = first or steps
    found.append(
      (
        made.name,
        f"{saved.asynchronous.bubble:.0f}",
        f"{saved.lock_step.bubble:.0f}",
        f"{steps[0]:.0f}",
        f"{steps[0] / first[0]:.2f}",
        f"{steps[1]:.0f}",
        f"{steps[1] / first[1]:.2f}",
      )
    )
  return [_HEADINGS, *found]
