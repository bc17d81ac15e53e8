"""The least time of a step, at datasheet rates.

Not an estimate: it is what no program can beat, with everything that can
overlap overlapped, all links of a chip busy, and memory read once.
"""

from collections.abc import Iterable, Mapping, Sequence
import math

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware, result
from paxon.runner.plan.program_text import collectives as collectives_lib

FAST = "fast"
NETWORK = "network"


def summarize(
  collectives: Sequence[collectives_lib.Collective],
  *,
  kind: hardware.Hardware,
  domains: Sequence[int],
) -> tuple[result.Collectives, ...]:
  """Sums collectives by kind, axes and link.

  Args:
    collectives: Of one step.
    kind: The hardware.
    domains: For each position of the mesh, which fast network it is in.

  Returns:
    The sums, the largest first.
  """
  groups: dict[tuple[object, ...], list[collectives_lib.Collective]] = {}
  for collective in collectives:
    key = (
      collective.kind,
      collective.axes,
      _link(collective, domains),
      collective.gathers,
    )
    groups.setdefault(key, []).append(collective)
  sums = []
  for members in groups.values():
    first = members[0]
    bandwidths = [_bandwidth(c, kind, domains) for c in members]
    wire = [c.count * c.wire_bytes for c in members]
    seconds = [
      w / b for w, b in zip(wire, bandwidths, strict=True) if b is not None
    ]
    sums.append(
      result.Collectives(
        kind=first.kind,
        axes=first.axes,
        link=_link(first, domains),
        count=sum(c.count for c in members),
        asynchronous=sum(c.count for c in members if c.is_asynchronous),
        payload_bytes=sum(c.count * c.payload_bytes for c in members),
        dtype_bytes=_by_dtype(members),
        wire_bytes=math.fsum(wire),
        seconds=math.fsum(seconds) if len(seconds) == len(members) else None,
        gathers=first.gathers,
      )
    )
  return tuple(sorted(sums, key=lambda c: -c.wire_bytes))


def bound(
  flops: flops_lib.Flops,
  *,
  kind: hardware.Hardware,
  num_devices: int,
  collectives: Sequence[result.Collectives],
  traffic: float | None,
  batch_shape: Sequence[int] | None,
) -> result.Bound | None:
  """Returns the bound, or None where the hardware's rates are not known.

  Args:
    flops: Of a step.
    kind: The hardware.
    num_devices: How many of it.
    collectives: What `summarize` returned.
    traffic: Bytes that are read or written at least; None if not compiled.
    batch_shape: Rows and their length, for tokens per second.
  """
  peak = kind.peak_flops()
  if peak is None:
    return None
  compute = math.fsum(
    count / num_devices / (kind.peak_flops(dtype) or peak)
    for dtype, count in flops.by("dtype").items()
    if dtype
  )
  times = {
    link: math.fsum(c.seconds or 0.0 for c in collectives if c.link == link)
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
  is_compiled = traffic is not None
  return result.Bound(
    compute=compute,
    memory=memory,
    fast_link=times[FAST] if is_compiled else None,
    network=times[NETWORK] if is_compiled else None,
    step=step,
    tokens_per_second=tokens / step if tokens and step else None,
    mfu=model / (num_devices * peak * step) if step else 0.0,
  )


def _by_dtype(
  members: Iterable[collectives_lib.Collective],
) -> dict[str, int]:
  """Payload bytes of all executions, by dtype."""
  sums: dict[str, int] = {}
  for member in members:
    for dtype, size in member.dtype_bytes.items():
      sums[dtype] = sums.get(dtype, 0) + member.count * size
  return sums


def _link(
  collective: collectives_lib.Collective, domains: Sequence[int]
) -> str:
  if collective.between_slices:
    return NETWORK
  met = {domains[member] for member in collective.members}
  return NETWORK if len(met) > 1 else FAST


def _bandwidth(
  collective: collectives_lib.Collective,
  kind: hardware.Hardware,
  domains: Sequence[int],
) -> float | None:
  """Bytes per second that one device of a group can send."""
  if _link(collective, domains) == FAST:
    return kind.link_bandwidth
  if kind.network_bandwidth is None or not collective.members:
    return kind.network_bandwidth
  met: Mapping[int, int] = _tally(domains[m] for m in collective.members)
  # Members that share a host send over all their adapters together.
  together = kind.network_bandwidth * min(met.values())
  return min(together, kind.link_bandwidth or together)


def _tally(values: Iterable[int]) -> dict[int, int]:
  tally: dict[int, int] = {}
  for value in values:
    tally[value] = tally.get(value, 0) + 1
  return tally
