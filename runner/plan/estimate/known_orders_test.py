"""Pairs of layouts whose order in step time is known from theory.

The programs are train steps of Llama 2 7B with three layers on h200:2x8, by jax
0.10.2 of 2026-11-22: 16 sequences of 4,096 tokens, packed cuDNN attention, all
residuals saved and `fsdp=16`, but for what the name says. The simulation must
order all pairs; the roofline alone cannot.
"""

import dataclasses
import functools
import gzip
import pathlib

import pytest

from paxon.runner.plan import hardware, network
from paxon.runner.plan.estimate import efficiency, simulation
from paxon.runner.plan.program_text import collectives, costs, hlo

_DATA = pathlib.Path(__file__).parent.parent / "testdata" / "layouts"
_H200 = hardware.find_kind("h200")
_AXES = ("stage", "data", "fsdp", "expert", "sequence", "tensor")
_HOSTS = network.Placement(domains=(0,) * 8 + (1,) * 8)
# Neighbors along `tensor` are on different hosts.
_ALTERNATING = network.Placement(domains=(0, 1) * 8)


@dataclasses.dataclass(frozen=True)
class _Layout:
  """A compiled step.

  Attributes:
    file: Its text.
    mesh: Sizes of the axes in use.
    petaflops: Executed matmul FLOPs of all devices, in units of 10^15.
    gigabytes: Arguments and results of one device.
    attention_share: Share of pairs that the attention kernels compute.
    placement: Of the mesh.
  """

  file: str
  mesh: tuple[tuple[str, int], ...]
  petaflops: float
  gigabytes: float
  attention_share: float = 1.0
  placement: network.Placement = _HOSTS

  @functools.cached_property
  def _parsed(self):
    with gzip.open(_DATA / f"{self.file}.txt.gz", "rt") as file:
      return hlo.parse(file.read())

  @functools.cached_property
  def _collectives(self):
    mesh = {axis: dict(self.mesh).get(axis, 1) for axis in _AXES}
    return collectives.find(self._parsed, mesh=mesh).collectives

  @functools.cached_property
  def simulated(self):
    """Seconds of a step."""
    factors = efficiency.choose(_H200, {})
    assert factors is not None
    rates = efficiency.rates(_H200, factors)
    assert rates is not None
    return simulation.simulate(
      self._parsed,
      operations=costs.read(self._parsed).operations,
      transfers={
        (c.computation, c.instruction): network.transfer(
          c, self.placement, rates.links
        )
        for c in self._collectives
      },
      rates=rates,
      attention_share=self.attention_share,
    ).total

  @functools.cached_property
  def bound(self):
    """Seconds of the roofline: matmuls, memory or links."""
    links = {False: 0.0, True: 0.0}
    for each in self._collectives:
      found = network.transfer(each, self.placement, network.links(_H200))
      assert found.seconds is not None
      links[found.is_network] += each.count * found.seconds
    compute = 1e15 * self.petaflops / 16 / 989.4e12
    return max(compute, self.gigabytes / 4800, *links.values())


_FSDP16 = (("fsdp", 16),)
_FSDP2 = (("fsdp", 2), ("tensor", 8))
_FSDP = _Layout("fsdp", _FSDP16, 0.3365, 1.3)
_TENSOR = _Layout("tensor", (("tensor", 16),), 0.3365, 1.31)
_FSDP2_TENSOR8 = _Layout("fsdp2_tensor8", _FSDP2, 0.3365, 1.31)
_REMAT = _Layout("remat", _FSDP16, 0.4115, 1.3)
_CUDNN = _Layout("cudnn", _FSDP16, 0.3134, 1.3, 0.5001)
_MICROBATCHES = _Layout("microbatches", _FSDP16, 1.346, 1.3)
_BATCH64 = _Layout("batch64", _FSDP16, 1.346, 1.3)
_DATA_SHORT = _Layout("data_short", (("data", 16),), 0.01832, 20.9)
_FSDP_SHORT = _Layout("fsdp_short", _FSDP16, 0.01832, 1.3)
_FSDP8_TENSOR2 = _Layout(
  "fsdp8_tensor2", (("fsdp", 8), ("tensor", 2)), 0.3365, 1.3
)
_ACROSS = dataclasses.replace(_FSDP2_TENSOR8, placement=_ALTERNATING)

_PAIRS = {
  # Activations are reduced over hosts in each layer.
  "fsdp, tensor over hosts": (_FSDP, _TENSOR),
  "tensor in a host, over hosts": (_FSDP2_TENSOR8, _TENSOR),
  "tensor of 8 in a host, of 8 over hosts": (_FSDP2_TENSOR8, _ACROSS),
  # 4,096 tokens a device: gathers of weights are smaller than activations.
  "fsdp, tensor in a host": (_FSDP, _FSDP2_TENSOR8),
  "tensor of 2, of 8": (_FSDP8_TENSOR2, _FSDP2_TENSOR8),
  "no remat, full remat": (_FSDP, _REMAT),
  "causal cuDNN, with a bias": (_CUDNN, _FSDP),
  # Weights are gathered for each microbatch.
  "one batch, four microbatches": (_BATCH64, _MICROBATCHES),
  # 256 tokens a device: the optimizer's memory traffic is 16 times as much.
  "short sequences: fsdp, data": (_FSDP_SHORT, _DATA_SHORT),
}


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("name", _PAIRS)
def test_the_simulation_knows_which_layout_is_faster(name):
  faster, slower = _PAIRS[name]
  assert faster.simulated < 0.99 * slower.simulated


def test_the_roofline_alone_does_not():
  right = [
    name
    for name, (faster, slower) in _PAIRS.items()
    if faster.bound < 0.99 * slower.bound
  ]
  assert len(right) == 5, right


def test_no_simulated_step_is_shorter_than_its_bound():
  for pair in _PAIRS.values():
    for layout in pair:
      assert layout.simulated > layout.bound
