"""Advice for states that do not fit, and for steps that wait long.

It complements the search, which compiles what it proposes.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Final

from paxon.runner import units
from paxon.runner.plan import hardware, result

# Share of a step above which waiting for one axis is worth advice.
_LONG_WAIT: Final = 0.15
# Names in a sentence on memory.
_MAX_NAMES: Final = 4
# A change that makes steps slower than this is not proposed.
MAX_SLOWDOWN: Final = 2.0
# Options with which compilers begin gathers earlier.
_OVERLAP: Final[Mapping[hardware.Platform, str]] = {
  hardware.Platform.CUDA: "xla_gpu_enable_pipelined_all_gather=True, or a lower"
  " xla_gpu_all_gather_combine_threshold_bytes",
  hardware.Platform.TPU: "xla_enable_async_all_gather=True and"
  " xla_tpu_enable_async_collective_fusion_fuse_all_gather=True",
}
SMALLER_STATE: Final = (
  "An optimizer with a smaller state (adafactor, lion) needs less memory and"
  " another learning rate."
)


def advise_on_waiting(
  estimate: result.Estimate | None,
  collectives: Sequence[result.Collectives],
  *,
  platform: hardware.Platform,
) -> tuple[str, ...]:
  """Returns advice for a step that waits long for one kind of communication.

  Args:
    estimate: Estimated step time, if there is one.
    collectives: Of the step.
    platform: Platform whose compiler made the program.
  """
  if estimate is None or not estimate.step:
    return ()
  gathered = {",".join(c.axes) for c in collectives if c.kind == "all-gather"}
  lines = []
  for axes, seconds in estimate.exposed.items():
    if seconds <= _LONG_WAIT * estimate.step:
      continue
    if axes == result.HOST:
      lines.append(
        f"{units.share(seconds / estimate.step)} of the step waits for copies"
        " to and from the memory of the host: offload less."
      )
      continue
    text = (
      f"{units.share(seconds / estimate.step)} of the step waits for"
      f" communication over the mesh axis {axes}: make it smaller in the mesh,"
      " or compare other layouts."
    )
    if axes in gathered and platform in _OVERLAP:
      text += (
        f" To gather earlier, try the compiler options {_OVERLAP[platform]}."
      )
    lines.append(text)
  return tuple(lines)


def slowdown(before: result.Plan, after: result.Change) -> float | None:
  """Returns how many times longer a step takes after a change.

  Args:
    before: Plan without the change.
    after: The change.

  Returns:
    The ratio of the estimates, or of the bounds if an estimate is missing; None
    if nothing can be compared.
  """
  old = None if before.estimate is None else before.estimate.step
  new = after.estimate
  if not (old and new):
    old = None if before.bound is None else before.bound.step
    new = after.bound
  return new / old if old and new else None


def is_too_slow(before: result.Plan, after: result.Change) -> bool:
  """Returns whether a change makes a step more than twice as slow.

  Args:
    before: Plan without the change.
    after: The change.
  """
  return (slowdown(before, after) or 0.0) > MAX_SLOWDOWN


def list_memory(memory: result.Memory) -> str:
  """Returns the largest parts of the memory, in a sentence; may be empty.

  Args:
    memory: Of a program that does not fit.
  """
  sizes = {
    "parameters": memory.parameters,
    "optimizer": memory.optimizer,
  }
  if memory.at_peak:
    for found in memory.at_peak:
      name = f"{found.type} of {found.module or 'no module'} ({found.reason})"
      sizes[name] = found.num_bytes
  else:
    sizes["gradients"] = memory.gradients
    sizes |= {f"saved: {name}": size for name, size in memory.saved.items()}
  largest = sorted(sizes.items(), key=lambda item: -item[1])[:_MAX_NAMES]
  texts = [f"{name} {units.size(size)}" for name, size in largest if size]
  return f"Most of the memory is taken by {', '.join(texts)}." if texts else ""


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
