"""Tests for placement, bandwidth of groups and time of a collective."""

import dataclasses
import itertools
import math
import types

import pytest

from paxon.runner.plan import hardware, network, target, topology
from paxon.runner.plan.program_text import collectives
from paxon.sharding import mesh as meshes

# One link of a chip has 45 GB/s, NVLink 450; see `hardware`.
_CHIP = network.Links(fast=270e9, count=6, network=6e9)
_GPU = network.Links(fast=450e9, count=1, network=50e9)


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
  return network.Placement(
    domains=tuple(s for s in range(slices) for _ in cells),
    coordinates=tuple(cells * slices),
    shape=shape,
    wraps=network.wraps(hardware.find_kind(kind), shape),
  )


def _hosts(hosts, gpus):
  return network.Placement(
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
  assert network.wraps(hardware.find_kind(kind), shape) == expected


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
  found = network.transfer(_collective(members), where, _CHIP)
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
  found = network.transfer(sent, _slice(4, 4, 4), _CHIP)
  assert found.seconds == pytest.approx(hops * 90e9 / 45e9)
  # Those of two directions do not wait for each other.
  assert found.queue == f"fsdp {direction}"


def test_a_permutation_on_a_line_goes_the_long_way():
  sent = _collective([0, 3], kind="collective-permute")
  found = network.transfer(sent, _slice(2, 4, 4), _CHIP)
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
  found = network.transfer(_collective(members), _hosts(2, 8), _GPU)
  assert found.seconds == 90e9 / bandwidth
  assert found.queue == "link"


def test_the_adapters_are_no_faster_than_nvlink():
  fast = dataclasses.replace(_GPU, network=100e9)
  found = network.transfer(_collective(range(16)), _hosts(2, 8), fast)
  assert found.seconds == 90e9 / 450e9


def test_a_permutation_between_hosts_uses_one_adapter():
  sent = _collective(range(16), kind="collective-permute")
  found = network.transfer(sent, _hosts(2, 8), _GPU)
  assert found.seconds == 90e9 / 50e9


@pytest.mark.parametrize(
  ("members", "fields", "bandwidth"),
  [
    # The DCN share of one chip.
    pytest.param((), {"between_slices": True}, 6e9, id="send"),
    pytest.param((0, 64), {}, 6e9, id="one chip of each slice"),
    pytest.param((0, 1, 64, 65), {}, 12e9, id="two chips of each slice"),
    # All chips have 64 x 6 = 384 GB/s, more than the six links of 45.
    pytest.param(range(128), {}, 270e9, id="all chips of both slices"),
  ],
)
def test_between_slices_is_the_network(members, fields, bandwidth):
  where = _slice(4, 4, 4, slices=2)
  found = network.transfer(_collective(members, **fields), where, _CHIP)
  assert (found.seconds, found.queue) == (90e9 / bandwidth, "network")
  assert found.is_network


def test_a_network_of_unknown_speed():
  alone = dataclasses.replace(_GPU, network=None)
  for device in (alone, None):
    found = network.transfer(_collective(range(16)), _hosts(2, 8), device)
    assert found.seconds is None


def test_a_faster_link_is_never_slower():
  faster = dataclasses.replace(_CHIP, fast=300e9)
  for members in ([0, 1], range(4), range(16), range(64)):
    for kind in ("all-gather", "collective-permute"):
      sent = _collective(members, kind=kind)
      slow, fast = (
        network.transfer(sent, _slice(4, 4, 4), r) for r in (_CHIP, faster)
      )
      assert fast.seconds < slow.seconds


# In GB/s, computed by hand from the data sheets: NVLink 450 and 50 an adapter
# on h200; ICI links of 50 on v5e, 45 on v4, 100 on v5p and v6e.
@pytest.mark.parametrize(
  ("text", "mesh", "axes", "expected"),
  [
    # 8 members on each of 8 hosts: min(450, 8 x 50).
    ("h200:8x8", "fsdp=64", ["fsdp"], 400),
    ("h200:2x8", "fsdp=16", ["fsdp"], 400),
    ("h200:1x8", "fsdp=8", ["fsdp"], 450),
    # The last axes are inside a host: eight groups, with one adapter each.
    ("h200:8x8", "fsdp=8,tensor=8", ["tensor"], 450),
    ("h200:8x8", "fsdp=8,tensor=8", ["fsdp"], 50),
    ("h200:8x8", "fsdp=16,tensor=4", ["fsdp"], 100),
    ("h200:8x8", "fsdp=4,tensor=16", ["tensor"], 400),
    ("h200:8x8", "fsdp=8,tensor=8", ["fsdp", "tensor"], 400),
    ("h200:4x8", "fsdp=8,dcn.data=4", ["data"], 50),
    ("h200:4x8", "fsdp=8,dcn.data=4", ["fsdp"], 450),
    # Two lines of four; two rings of 16.
    ("v5e:4x4", "fsdp=16", ["fsdp"], 100),
    ("v5e:4x4", "fsdp=4,tensor=4", ["tensor"], 50),
    ("v5e:16x16", "fsdp=256", ["fsdp"], 200),
    ("v5e:16x16", "fsdp=16,tensor=16", ["fsdp"], 100),
    # Three rings; one ring each.
    ("v4:4x4x4", "fsdp=64", ["fsdp"], 270),
    ("v4:4x4x4", "fsdp=16,tensor=4", ["tensor"], 90),
    ("v4:4x4x4", "fsdp=16,tensor=4", ["fsdp"], 180),
    # Lines, because a side is no multiple of four.
    ("v5p:2x2x2", "fsdp=8", ["fsdp"], 300),
    # Two slices: the share of a chip of its host's 200 Gbit/s.
    ("v4:2x(4x4x4)", "dcn.data=2,fsdp=64", ["data"], 6.25),
    ("v4:2x(4x4x4)", "dcn.data=2,fsdp=64", ["fsdp"], 270),
  ],
)
def test_the_bandwidth_of_axes(text, mesh, axes, expected):
  where = target.parse(text)
  spec = meshes.MeshSpec.parse(mesh).resolve(where.num_devices)
  sizes = {name: spec.ici[name] * spec.dcn[name] for name in spec.ici}
  placement = network.place_mesh(where, spec)
  members = network.group(sizes, axes)
  assert len(members) == math.prod(sizes[axis] for axis in axes)
  device = network.links(where.hardware)
  assert device is not None
  found = network.bandwidth(members, placement, device)
  assert found == pytest.approx(expected * 1e9)


@pytest.mark.parametrize("text", ["v5e:2x4", "v4:2x2x2", "v7x:2x2x1"])
def test_a_mesh_without_a_compiler_is_placed_as_with_one(text):
  where = target.parse(text)
  if topology.missing(where):
    pytest.skip("needs libtpu")
  devices = topology.devices(where)
  spec = meshes.MeshSpec.parse("data=2,fsdp=2,tensor=-1")
  mesh = meshes.make_mesh(spec, devices=devices)
  real = network.place(where, list(mesh.devices.flat))
  assert network.place_mesh(where, spec) == real


def test_the_placement_of_a_slice():
  # As JAX shows them: chips of two dimensions have a third coordinate, 0.
  devices = [
    types.SimpleNamespace(coords=[x, y, 0])
    for x, y in itertools.product(range(16), range(4))
  ]
  found = network.place(target.parse("v5e:8x8"), devices)
  assert found.coordinates[:5] == (
    (0, 0, 0),
    (0, 1, 0),
    (0, 2, 0),
    (0, 3, 0),
    (1, 0, 0),
  )
  assert (found.shape, found.wraps) == ((16, 4, 1), (True, False, False))


def test_the_placement_of_gpus_is_their_hosts():
  # The numbers of a real job may have gaps.
  devices = [types.SimpleNamespace(id=3 * number) for number in range(16)]
  found = network.place(target.parse("h200:2x8"), devices)
  assert found == _hosts(2, 8)


@pytest.mark.parametrize(
  ("text", "domains"),
  [
    # Racks of up to 18 hosts, as few and as equal as possible.
    ("gb200:18x4", [72]),
    ("gb200:32x4", [64, 64]),
    ("gb300:27x4", [56, 52]),
    ("cpu:16", [16]),
    ("b200:2x8", [8, 8]),
    # Sixteen chips of four devices.
    ("trn2:2x16", [64, 64]),
  ],
)
def test_the_fast_network_joins_the_hosts_of_a_rack(text, domains):
  where = target.parse(text)
  placement = network.place_mesh(where, meshes.MeshSpec.parse("fsdp=-1"))
  assert [placement.domains.count(n) for n in range(len(domains))] == domains
  assert set(placement.domains) == set(range(len(domains)))


def test_racks_are_joined_by_the_adapters_of_all_their_devices():
  where = target.parse("gb200:36x4")
  placement = network.place_mesh(where, meshes.MeshSpec.parse("fsdp=144"))
  device = network.Links(fast=900e9, count=1, network=50e9)
  # 72 adapters of 50 GB/s for 72 devices are faster than NVLink.
  assert network.bandwidth(range(144), placement, device) == 900e9
  # Eight hosts of one rack; one device in each of two racks.
  assert network.bandwidth(range(32), placement, device) == 900e9
  assert network.bandwidth((0, 72), placement, device) == 50e9
