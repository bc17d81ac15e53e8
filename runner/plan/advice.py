"""Proposed changes for a program that does not fit in memory.

For what the search cannot find, or was not asked for.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Final

from paxon.runner import units
from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import result

# Share of a step above which waiting for one axis is worth advice.
_LONG_WAIT: Final = 0.15


def of(
  memory: result.Memory,
  flops: flops_lib.Flops,
  *,
  mesh: Mapping[str, int],
  batch: Sequence[int] | None,
) -> tuple[str, ...]:
  """Returns changes, the first to try first; none if the program fits.

  Args:
    memory: Of the program.
    flops: Of the program; says whether anything is recomputed.
    mesh: Size of each mesh axis.
    batch: Rows and their length, if known.
  """
  if memory.fit is not result.Fit.DOES_NOT_FIT:
    return ()
  state, usable = memory.state_and_batch, memory.usable
  shards = " x ".join(f"{a}={n}" for a, n in mesh.items() if n > 1) or "one"
  if usable is not None and state > usable:
    parts = -(-state // int(usable)) * 2
    return (
      f"The state alone takes {units.size(state)} of {units.size(usable)} on"
      f" each device: split it over more devices, for example over {parts}"
      f" times as many by the mesh axis fsdp (the mesh is {shards}).",
      "An optimizer with less state (adafactor, lion) takes less, and needs a"
      " learning rate of its own.",
    )
  changes = []
  if not flops.phase(flops_lib.Phase.REMAT):
    changes.append(
      "Nothing is recomputed: set the stack's remat_policy, for example"
      " --fdl.task.model.stack.remat_policy=layers.remat.save_nothing."
    )
  if batch is not None and batch[0] > 1:
    changes.append(
      f"Halve the activations: global_batch_size={batch[0] // 2}, or the"
      " learner's num_microbatches=2 with the same batch."
    )
  changes.append(f"Split it over more devices; the mesh is {shards}.")
  return tuple(changes)


def for_waiting(estimate: result.Estimate | None) -> tuple[str, ...]:
  """Returns advice for a step that waits long for one kind of communication.

  Args:
    estimate: Of the step's time, if there is one.
  """
  if estimate is None or not estimate.step:
    return ()
  return tuple(
    f"{units.share(seconds / estimate.step)} of the step waits for"
    f" communication over the mesh axis {axes}: make it smaller in the mesh, or"
    " compare layouts with --plan_search."
    for axes, seconds in estimate.exposed.items()
    if seconds > _LONG_WAIT * estimate.step
  )


def devices_for(whole: int, *, usable: float, num_devices: int) -> str:
  """Returns how many devices a state needs that these cannot hold.

  Args:
    whole: Bytes of the state, not split.
    usable: Bytes of a device.
    num_devices: How many there are.
  """
  least = math.ceil(whole / usable)
  # Of a power of two as many divide most sizes, and half stays for the rest.
  roomy = 2 ** math.ceil(math.log2(max(2 * whole / usable, 1)))
  return (
    f"The state takes {units.size(whole)} in all; split over {num_devices}"
    f" devices it is {units.size(whole / num_devices)} of"
    f" {units.size(usable)} on each. At least {least} such devices hold it,"
    f" {roomy} leave half of their memory to activations: a larger --target,"
    f" with --fdl.mesh=fsdp={roomy}."
  )
