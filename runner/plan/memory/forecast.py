"""The memory of a training step, from its jaxpr: no compiler, no device.

What compilers do with memory is simulated: the sharding of each value, which
values are fused and which are there, when they come and go, and what the
scan of the layers stacks for the backward pass. See
docs/design/0013-memory-forecast.md for what is assumed and how far it is off.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax

from paxon.runner.plan import hardware
from paxon.runner.plan.memory import graph as graphs
from paxon.runner.plan.memory import layouts, liveness, propagation
from paxon.runner.plan.memory import saved as saved_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
  """Bytes of one device.

  Attributes:
    saved: What is held from the forward pass for the backward pass, by remat
      name; `layer inputs` is what loops of layers carry, `unnamed` the rest.
    gradients: All gradients, as the optimizer is given them.
    workspace: The rest of what is there at the peak.
    peak: The most that is in use at once, arguments included.
    at: The operations at the peak, outermost first.
  """

  saved: Mapping[str, int]
  gradients: int
  workspace: int
  peak: int
  at: tuple[str, ...]


def forecast(
  traced: jax.stages.Traced,
  *,
  inputs: Any,
  mesh: jax.sharding.Mesh,
  arguments: int,
  platform: hardware.Platform,
) -> Forecast:
  """Forecasts the memory of a step `(state, batch) -> (state, metrics)`.

  Args:
    traced: The step, whose state is donated.
    inputs: What it was traced with: a tree of `jax.ShapeDtypeStruct` with
      shardings.
    mesh: Its devices.
    arguments: Bytes of what one device is given.
    platform: Whose compiler will make the program.
  """
  graph = graphs.of(traced.jaxpr)
  sizes = dict(mesh.shape)
  propagation.propagate(
    graph,
    inputs=[leaf.sharding for leaf in jax.tree.leaves(inputs)],
    outputs=[leaf.sharding for leaf in jax.tree.leaves(traced.out_info)],
    mesh=sizes,
  )
  held = saved_lib.saved(graph, sizes)
  gradients = saved_lib.gradients(graph, sizes)
  layouts.with_copies(graph)
  # Compilers for accelerators order the work so that communication is hidden.
  is_hiding = platform is not hardware.Platform.CPU and mesh.size > 1
  use = liveness.peak(
    graph, sizes, given=frozenset(graph.inputs), is_hiding=is_hiding
  )
  return Forecast(
    saved=held,
    gradients=gradients,
    workspace=max(use.total - sum(held.values()) - gradients, 0),
    peak=arguments + use.total,
    at=use.at,
  )
