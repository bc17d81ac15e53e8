"""Advice for programs that do not fit, or wait long for communication.

It complements the search, which compiles what it proposes.
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
  """Returns changes, the best first; none if the program fits.

  Args:
    memory: Memory of the program.
    flops: FLOPs of the program, which show whether it recomputes anything.
    mesh: Size of each mesh axis.
    batch: Number and length of the sequences, if known.
  """
  if memory.fit is not result.Fit.DOES_NOT_FIT:
    return ()
  state, usable = memory.state_and_batch, memory.usable
  axes = " x ".join(f"{a}={n}" for a, n in mesh.items() if n > 1)
  shards = f"the mesh is {axes or 'one device'}"
  if usable is not None and state > usable:
    factor = -(-state // int(usable)) * 2
    return (
      f"The state alone takes {units.size(state)} of {units.size(usable)} on"
      f" each device: shard it over {factor} times as many devices with the"
      f" mesh axis fsdp ({shards}).",
      "An optimizer with a smaller state (adafactor, lion) needs less memory"
      " and another learning rate.",
    )
  changes = []
  if not flops.phase(flops_lib.Phase.REMAT):
    changes.append(
      "Recompute activations: set the stack's remat_policy, for example"
      " --fdl.task.model.stack.remat_policy=layers.remat.save_nothing."
    )
  if batch is not None and batch[0] > 1:
    changes.append(
      f"Halve the activations: global_batch_size={batch[0] // 2}, or the"
      " learner's num_microbatches=2 with the same batch."
    )
  changes.append(f"Shard the step over more devices ({shards}).")
  return tuple(changes)


def for_waiting(estimate: result.Estimate | None) -> tuple[str, ...]:
  """Returns advice for a step that waits long for one kind of communication.

  Args:
    estimate: Estimated step time, if there is one.
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
  """Returns the number of devices that a state needs, in a sentence.

  Args:
    whole: Bytes of the unsharded state.
    usable: Bytes of a device.
    num_devices: Number of devices, which cannot hold the state.
  """
  least = math.ceil(whole / usable)
  # A power of two divides most sizes.
  roomy = 2 ** math.ceil(math.log2(max(2 * whole / usable, 1)))
  return (
    f"The state takes {units.size(whole)}; sharded over {num_devices} devices"
    f" it is {units.size(whole / num_devices)} of {units.size(usable)} on each."
    f" At least {least} such devices hold it, {roomy} leave half of their"
    " memory for activations: use a larger --target, with"
    f" --fdl.mesh=fsdp={roomy}."
  )
