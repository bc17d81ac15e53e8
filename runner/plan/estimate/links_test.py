"""Tests for the time of a collective."""

import itertools
import types

import pytest

from paxon.runner.plan import hardware
from paxon.runner.plan.estimate import links, placement, rates
from paxon.runner.plan.program_text import collectives

# One link of a chip, six to a chip; a GPU has one of 450 to a switch.
_CHIP = rates.Rates(
  matmul={},
  attention={},
  memory=1.0,
  link=45e9,
  num_links=6,
  network=6e9,
  kernel_overhead=0.0,
  peak=1.0,
)
_GPU = rates.Rates(
  matmul={},
  attention={},
  memory=1.0,
  link=450e9,
  num_links=1,
  network=50e9,
  kernel_overhead=0.0,
  peak=1.0,
)


def _collective(members, *, kind="all-gather", **fields):
  return collectives.Collective(
    kind=kind,
    axes=("fsdp",),
    whole_axes=True,
    group_size=len(members),
    count=1,
    payload_bytes=0,
    wire_bytes=90e9,
    members=tuple(members),
    **fields,
  )


def _slice(*shape, kind="v4", slices=1):
  """Positions in the order of their coordinates, the last the fastest."""
  cells = list(itertools.product(*map(range, shape)))
  return placement.Placement(
    domains=tuple(s for s in range(slices) for _ in cells),
    coordinates=tuple(cells * slices),
    shape=shape,
    wraps=placement.wraps(hardware.named(kind), shape),
  )


def _hosts(hosts, gpus):
  return placement.Placement(
    domains=tuple(h for h in range(hosts) for _ in range(gpus))
  )


@pytest.mark.parametrize(
  ("kind", "shape", "expected"),
  [
    ("v4", (4, 4, 4), (True, True, True)),
    ("v4", (4, 4, 8), (True, True, True)),
    # No ring at all, although two sides are four.
    ("v4", (2, 4, 4), (False, False, False)),
    ("v5p", (2, 2, 1), (False, False, False)),
    ("v5e", (16, 16), (True, True)),
    ("v5e", (8, 16), (False, True)),
    ("v6e", (4, 8), (False, False)),
  ],
)
def test_which_dimensions_are_rings(kind, shape, expected):
  assert placement.wraps(hardware.named(kind), shape) == expected


@pytest.mark.parametrize(
  ("where", "members", "used"),
  [
    pytest.param(_slice(4, 4, 4), range(4), 2, id="ring"),
    pytest.param(_slice(2, 4, 4), range(4), 1, id="line"),
    pytest.param(_slice(4, 4, 4), range(16), 4, id="two rings"),
    pytest.param(_slice(4, 4, 4), range(64), 6, id="whole torus"),
    pytest.param(_slice(2, 4, 4), range(32), 3, id="whole mesh of lines"),
    # Half of a ring is a line.
    pytest.param(_slice(4, 4, 8), range(4), 1, id="part of a ring"),
    # Every second chip of a ring of eight: a ring, shared by two groups.
    pytest.param(_slice(4, 4, 8), range(0, 8, 2), 1, id="every second chip"),
    pytest.param(_slice(2, 4, 4), range(0, 4, 2), 0.5, id="part of a line"),
    pytest.param(_slice(8, 16, kind="v5e"), range(16), 2, id="v5e ring"),
    pytest.param(
      _slice(8, 16, kind="v5e"), range(0, 128, 16), 1, id="v5e line"
    ),
  ],
)
def test_links_of_a_group(where, members, used):
  found = links.transfer(_collective(members), where, _CHIP)
  assert found.seconds == 90e9 / (used * 45e9)
  assert (found.axes, found.queue) == ("fsdp", "fsdp")


@pytest.mark.parametrize(
  ("members", "hops", "direction"),
  [
    pytest.param([0, 1, 2, 3], 1, "+", id="next"),
    pytest.param([3, 2, 1, 0], 1, "-", id="previous"),
    pytest.param([0, 2], 2, "+", id="the one after the next"),
    # The other way round is shorter.
    pytest.param([0, 3], 1, "-", id="over the end of a ring"),
    # One along y and one along z.
    pytest.param([0, 5], 2, "+", id="around a corner"),
  ],
)
def test_a_permutation_holds_a_link_on_every_hop(members, hops, direction):
  sent = _collective(members, kind="collective-permute")
  found = links.transfer(sent, _slice(4, 4, 4), _CHIP)
  assert found.seconds == pytest.approx(hops * 90e9 / 45e9)
  # Those of two directions do not wait for each other.
  assert found.queue == f"fsdp {direction}"


def test_a_permutation_on_a_line_goes_the_long_way():
  sent = _collective([0, 3], kind="collective-permute")
  found = links.transfer(sent, _slice(2, 4, 4), _CHIP)
  assert found.seconds == pytest.approx(3 * 90e9 / 45e9)


@pytest.mark.parametrize(
  ("members", "bandwidth"),
  [
    pytest.param(range(8), 450e9, id="one host"),
    pytest.param(range(16), 400e9, id="eight adapters of each of two hosts"),
    pytest.param([0, 8], 50e9, id="one adapter of each"),
    pytest.param([0, 1, 8, 9], 100e9, id="two adapters of each"),
  ],
)
def test_links_of_gpus(members, bandwidth):
  found = links.transfer(_collective(members), _hosts(2, 8), _GPU)
  assert found.seconds == 90e9 / bandwidth
  assert found.queue == "link"


def test_the_adapters_are_no_faster_than_nvlink():
  fast = rates.Rates(**vars(_GPU) | {"network": 100e9})
  found = links.transfer(_collective(range(16)), _hosts(2, 8), fast)
  assert found.seconds == 90e9 / 450e9


@pytest.mark.parametrize(
  ("members", "fields"), [((), {"between_slices": True}), (range(128), {})]
)
def test_between_slices_is_the_network(members, fields):
  where = _slice(4, 4, 4, slices=2)
  found = links.transfer(_collective(members, **fields), where, _CHIP)
  assert (found.seconds, found.queue) == (90e9 / 6e9, "network")


def test_a_network_of_unknown_speed():
  alone = rates.Rates(**vars(_GPU) | {"network": None})
  found = links.transfer(_collective(range(16)), _hosts(2, 8), alone)
  assert found.seconds is None


def test_a_faster_link_is_never_slower():
  faster = rates.Rates(**vars(_CHIP) | {"link": 50e9})
  for members in ([0, 1], range(4), range(16), range(64)):
    for kind in ("all-gather", "collective-permute"):
      sent = _collective(members, kind=kind)
      slow, fast = (
        links.transfer(sent, _slice(4, 4, 4), r) for r in (_CHIP, faster)
      )
      assert fast.seconds < slow.seconds


def test_the_placement_of_a_slice():
  # As JAX shows them: chips of two dimensions have a third coordinate, 0.
  devices = [
    types.SimpleNamespace(coords=[x, y, 0])
    for x, y in itertools.product(range(16), range(4))
  ]
  found = placement.of(hardware.named("v5e"), devices, [0] * 64)
  assert found.coordinates[:5] == (
    (0, 0, 0),
    (0, 1, 0),
    (0, 2, 0),
    (0, 3, 0),
    (1, 0, 0),
  )
  assert (found.shape, found.wraps) == ((16, 4, 1), (True, False, False))


def test_the_placement_of_gpus_is_their_hosts():
  hosts = [0] * 8 + [1] * 8
  found = placement.of(hardware.named("h200"), list(range(16)), hosts)
  assert found == _hosts(2, 8)
