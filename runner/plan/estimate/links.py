"""Time of a collective on the links that it uses.

  time = bytes that a device sends / bandwidth of the group

The bandwidth is

* of GPUs of one host: NVLink;
* of GPUs on several: the adapters of a group's members on a host together, but
  no more than NVLink;
* of chips of one slice: two links for each dimension that the group closes a
  ring along, one for each that it is a line of; a group that takes every n-th
  chip shares the links with n - 1 others;
* between slices: the network.

A permutation uses one link and holds it on every chip it passes, so it takes
as many times as long as it has hops.
"""

from collections.abc import Sequence
import dataclasses
import itertools

from paxon.runner.plan.estimate import placement as placements
from paxon.runner.plan.estimate import rates as rates_lib
from paxon.runner.plan.program_text import collectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """One collective as the links see it.

  Attributes:
    seconds: From the first byte to the last; None if a rate is not known.
    axes: Mesh axes with commas between.
    queue: Transfers of one queue follow each other, those of two do not wait.
  """

  seconds: float | None
  axes: str
  queue: str


def transfer(
  collective: collectives.Collective,
  placement: placements.Placement,
  rates: rates_lib.Rates,
) -> Transfer:
  """Returns what one execution of a collective costs.

  Args:
    collective: The collective.
    placement: Of the mesh.
    rates: Of a device.
  """
  axes = ",".join(collective.axes) or "-"
  met = [placement.domains[member] for member in collective.members]
  if collective.between_slices or (len(set(met)) > 1 and placement.coordinates):
    bandwidth, queue = rates.network, "network"
  elif not placement.coordinates:
    bandwidth, queue = _switched(met, rates), "link"
  elif collective.kind == "collective-permute":
    bandwidth, direction = _permuted(collective.members, placement, rates)
    queue = f"{axes} {direction}"
  else:
    bandwidth = group_bandwidth(collective.members, placement, rates)
    queue = axes
  seconds = None if bandwidth is None else collective.wire_bytes / bandwidth
  return Transfer(seconds=seconds, axes=axes, queue=queue)


def group_bandwidth(
  members: Sequence[int],
  placement: placements.Placement,
  rates: rates_lib.Rates,
) -> float:
  """Returns the bytes/s that each chip of a group can send to the others.

  Args:
    members: Positions in the mesh, all in one slice.
    placement: Of the mesh.
    rates: Of a device.
  """
  links = 0.0
  for dimension, size in enumerate(placement.shape):
    at = sorted({placement.coordinates[m][dimension] for m in members})
    if len(at) < 2:
      continue
    stride = min(b - a for a, b in itertools.pairwise(at))
    is_ring = placement.wraps[dimension] and stride * len(at) == size
    links += (2 if is_ring else 1) / stride
  # Devices of one chip need no link; that they share its speed is a guess that
  # matters little.
  return rates.link * (links or rates.num_links)


def _switched(domains: Sequence[int], rates: rates_lib.Rates) -> float | None:
  link = rates.link * rates.num_links
  if len(set(domains)) < 2:
    return link
  if rates.network is None:
    return None
  fewest = min(domains.count(domain) for domain in set(domains))
  return min(link, rates.network * fewest)


def _permuted(
  members: Sequence[int],
  placement: placements.Placement,
  rates: rates_lib.Rates,
) -> tuple[float, str]:
  """The bandwidth of a permutation, and which way it goes."""
  hops, direction = 0, ""
  # From the last member back to the first the other way is free.
  for source, to in itertools.pairwise(members):
    steps = _steps(source, to, placement)
    distance = sum(map(abs, steps))
    if distance > hops:
      hops = distance
      direction = "-" if sum(steps) < 0 else "+"
  if not hops:
    return rates.link * rates.num_links, "chip"
  return rates.link / hops, direction


def _steps(source: int, to: int, placement: placements.Placement) -> list[int]:
  """The shortest way between two chips, along each dimension."""
  steps = []
  for dimension, size in enumerate(placement.shape):
    step = (
      placement.coordinates[to][dimension]
      - placement.coordinates[source][dimension]
    )
    if placement.wraps[dimension] and abs(step) > size - abs(step):
      step -= size if step > 0 else -size
    steps.append(step)
  return steps
