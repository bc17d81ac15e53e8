"""Lower bound of the time of a step, at datasheet rates.

The program cannot be faster: compute, memory and links overlap completely, and
memory is read once. Collectives take the time that `network` gives.
"""

from collections.abc import Iterable, Sequence
import math

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware, network, result
from paxon.runner.plan.program_text import collectives as collectives_lib
from paxon.runner.plan.program_text import name_stack

FAST = "fast"
NETWORK = "network"

# A collective and the seconds of one execution.
_Member = tuple[collectives_lib.Collective, float | None]


def summarize(
  collectives: Sequence[collectives_lib.Collective],
  *,
  kind: hardware.Hardware,
  placement: network.Placement,
) -> tuple[result.Collectives, ...]:
  """Sums collectives by kind, axes and link, the largest first.

  Args:
    collectives: Of one step.
    kind: The hardware.
    placement: Of the mesh.
  """
  device = network.links(kind)
  groups: dict[tuple[object, ...], list[_Member]] = {}
  for collective in collectives:
    transfer = network.transfer(collective, placement, device)
    link = NETWORK if transfer.is_network else FAST
    key = (collective.kind, collective.axes, link, collective.gathers)
    groups.setdefault(key, []).append((collective, transfer.seconds))
  sums = []
  for (_, _, link, _), pairs in groups.items():
    members = [collective for collective, _ in pairs]
    first = members[0]
    seconds = [c.count * s for c, s in pairs if s is not None]
    sums.append(
      result.Collectives(
        kind=first.kind,
        axes=first.axes,
        link=str(link),
        count=sum(c.count for c in members),
        asynchronous=sum(c.count for c in members if c.is_asynchronous),
        payload_bytes=sum(c.count * c.payload_bytes for c in members),
        dtype_bytes=_sums(
          (dtype, c.count * size)
          for c in members
          for dtype, size in c.dtype_bytes.items()
        ),
        # By the path of the linen module.
        module_bytes=_sums(
          (name_stack.part(c.name), c.count * c.payload_bytes) for c in members
        ),
        wire_bytes=math.fsum(c.count * c.wire_bytes for c in members),
        seconds=math.fsum(seconds) if len(seconds) == len(members) else None,
        gathers=first.gathers,
      )
    )
  return tuple(sorted(sums, key=lambda c: -c.wire_bytes))


def compute_bound(
  flops: flops_lib.Flops,
  *,
  kind: hardware.Hardware,
  num_devices: int,
  collectives: Sequence[result.Collectives] | None,
  traffic: float | None,
  batch_shape: Sequence[int] | None,
) -> result.Bound | None:
  """Returns the bound, or None where the hardware's rates are not known.

  Args:
    flops: Of a step.
    kind: The hardware.
    num_devices: How many of it.
    collectives: Result of `summarize`; None if they could not be read.
    traffic: Bytes that are read or written at least; None if not compiled.
    batch_shape: Rows and their length, for tokens per second.
  """
  peak = kind.peak_flops()
  if peak is None:
    return None
  # Without the blocks that attention kernels skip.
  compute = math.fsum(
    count / num_devices / (kind.peak_flops(key.dtype) or peak)
    for key, count in flops.count_executed().items()
    if key.dtype
  )
  times = {
    link: math.fsum(
      c.seconds or 0.0 for c in collectives or () if c.link == link
    )
    for link in (FAST, NETWORK)
  }
  memory = None
  if traffic is not None and kind.memory_bandwidth is not None:
    memory = traffic / kind.memory_bandwidth
  step = max(compute, memory or 0.0, *times.values())
  model: float = flops.model_flops
  tokens = None
  if batch_shape is not None and len(batch_shape) > 1:
    model = flops.causal_model_flops(batch_shape[1])
    tokens = batch_shape[0] * batch_shape[1]
  is_known = traffic is not None and collectives is not None
  return result.Bound(
    compute=compute,
    memory=memory,
    fast_link=times[FAST] if is_known else None,
    network=times[NETWORK] if is_known else None,
    step=step,
    tokens_per_second=tokens / step if tokens and step else None,
    mfu=model / (num_devices * peak * step) if step else 0.0,
  )


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
  sums: dict[str, int] = {}
  for key, size in pairs:
    sums[key] = sums.get(key, 0) + size
  return sums
