"""Tests of the simulation on programs as compilers print them."""

import dataclasses
import functools
import itertools

import pytest

from paxon.runner.plan import hardware, network, testing
from paxon.runner.plan.estimate import efficiency, simulation
from paxon.runner.plan.program_text import collectives, costs, hlo


@dataclasses.dataclass(frozen=True)
class _Stored:
  """A stored text and where its devices are."""

  file: str
  kind: str
  dcn: tuple[str, ...]
  where: network.Placement

  @functools.cached_property
  def program(self):
    return hlo.parse(testing.read_text(self.file))

  @functools.cached_property
  def operations(self):
    return costs.read(self.program).operations

  @functools.cached_property
  def communication(self):
    mesh = {"fsdp": 8} if self.kind == "h200" else {"data": 2, "fsdp": 4}
    return collectives.find(self.program, mesh=mesh, dcn=self.dcn).collectives

  @functools.cached_property
  def given(self):
    return efficiency.choose(hardware.find_kind(self.kind), {})

  def simulate(self, given):
    rates = efficiency.rates(hardware.find_kind(self.kind), given)
    return simulation.simulate(
      self.program,
      operations=self.operations,
      transfers={
        (c.computation, c.instruction): network.transfer(
          c, self.where, rates.links
        )
        for c in self.communication
      },
      rates=rates,
    )


def _chips(*shape, slices=1):
  cells = tuple(itertools.product(*map(range, shape)))
  return network.Placement(
    domains=tuple(s for s in range(slices) for _ in cells),
    coordinates=cells * slices,
    shape=shape,
    wraps=(False,) * len(shape),
  )


_H200 = network.Placement(domains=(0,) * 8)
_ALL = (
  pytest.param(_Stored("h200_1x8.txt", "h200", (), _H200), id="h200"),
  pytest.param(_Stored("v5e_2x4.txt", "v5e", (), _chips(2, 4)), id="v5e"),
  pytest.param(
    _Stored("v4_2_slices.txt", "v4", ("data",), _chips(2, 2, 1, slices=2)),
    id="v4 slices",
  ),
)


@pytest.mark.parametrize("stored", _ALL)
def test_nothing_is_left_out_and_nothing_counts_twice(stored):
  rates = efficiency.rates(
    hardware.find_kind(stored.kind), efficiency.DATASHEET
  )
  total = costs.read(stored.program)
  products = total.flops / rates.flops("bfloat16")
  memory = total.hbm_bytes / rates.memory
  slowest = min(rates.links.fast / rates.links.count, rates.links.network)
  wires = sum(c.count * c.wire_bytes for c in stored.communication) / slowest
  found = stored.simulate(efficiency.DATASHEET)
  # Products are never hidden; at most all there is happens in turn.
  assert max(products, memory) <= found.total <= products + memory + wires
  assert found.exposed
  axes = {",".join(c.axes) for c in stored.communication}
  assert set(found.exposed) <= axes


@pytest.mark.parametrize("stored", _ALL)
@pytest.mark.parametrize(
  "what", ["attention", "fast_link", "matmul", "memory", "network"]
)
def test_a_faster_machine_is_never_slower(stored, what):
  share = getattr(stored.given, what)

  def times(factor):
    changed = dataclasses.replace(stored.given, **{what: factor * share})
    return stored.simulate(changed).total

  found = [times(factor) for factor in (0.25, 0.5, 1.0, 2.0)]
  assert found == sorted(found, reverse=True)


def test_slices_wait_for_the_network():
  stored = _ALL[2].values[0]
  network = dataclasses.replace(stored.given, network=0.1)
  before, after = stored.simulate(stored.given), stored.simulate(network)
  assert after.exposed["data"] > before.exposed["data"] > 0
