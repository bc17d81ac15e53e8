"""Tests for communication and cost by analytical estimate."""

import numpy as np
import pytest

from paxon.runner.plan import hardware
from paxon.runner.plan.search import communication, cost
from paxon.sharding import axes, rules, variables
from paxon.sharding import mesh as mesh_lib

_LAYERS, _D, _F = 3, 64, 256
_BATCH = (32, 128)


def _spec(name, shape, names, **fields):
  return variables.VariableSpec(
    name=name,
    shape=shape,
    dtype=np.dtype("float32"),
    axes=names,
    **fields,
  )


_STACKED = {"stacked": ((axes.LAYERS, 1),)}
_UP = _spec(
  "up", (_LAYERS, _D, _F), (axes.LAYERS, axes.EMBED, axes.MLP), **_STACKED
)
_DOWN = _spec(
  "down", (_LAYERS, _F, _D), (axes.LAYERS, axes.MLP, axes.EMBED), **_STACKED
)
_KERNEL = 2 * _LAYERS * _D * _F  # Bytes of each in bfloat16.


def _layout(text, number=8, kind="h200"):
  return communication.Layout(
    mesh=mesh_lib.MeshSpec.parse(text).resolve(number),
    kind=hardware.named(kind),
    rules=rules.DEFAULT_RULES,
  )


def _traffic(text, *, specs=(_UP, _DOWN), number=8, kind="h200", **options):
  return communication.traffic(
    specs,
    _layout(text, number, kind),
    batch_shape=_BATCH,
    itemsize=2,
    **options,
  )


def test_one_device_sends_nothing():
  assert _traffic("", number=1).total == 0


def test_fsdp_gathers_twice_and_scatters_once():
  assert _traffic("fsdp=8").fast == 2 * 3 * _KERNEL * 7 / 8


def test_a_quantized_kernel_is_gathered_as_one_byte_an_element():
  up = _spec("params/stack/up", _UP.shape, _UP.axes, **_STACKED)
  specs = (up, _DOWN)
  sent = _traffic("fsdp=8", specs=specs, narrow={"stack/up"}).fast
  # Two gathers at half of the bytes, and a scatter; the other as before.
  assert sent == (2 * 0.5 + 1 + 3) * _KERNEL * 7 / 8
  assert _traffic("data=8", specs=specs, narrow={"stack/up"}) == _traffic(
    "data=8"
  )


def test_data_reduces_gradients():
  assert _traffic("data=8").fast == 2 * 2 * _KERNEL * 7 / 8


def test_both_share():
  # Gradients are scattered over fsdp first, so data reduces a quarter.
  expected = 3 * _KERNEL * 3 / 4 + 2 * (_KERNEL / 4) / 2
  assert _traffic("data=2,fsdp=4").fast == pytest.approx(2 * expected)


def test_tensor_reduces_activations_of_kernels_that_end_in_embed():
  activation = 2 * _BATCH[0] * _BATCH[1] * _D
  passes = 2 * 2 * _LAYERS * activation * 7 / 8
  assert _traffic("tensor=8").fast == passes
  assert _traffic("tensor=8", specs=[_UP]).fast == 0
  assert _traffic("tensor=8", recomputed=1.0).fast == 1.5 * passes


def test_a_microbatch_gathers_and_reduces_anew():
  one = _traffic("data=2,fsdp=4")
  four = _traffic("data=2,fsdp=4", num_microbatches=4)
  assert four.fast == 4 * one.fast
  one, four = (
    _traffic("tensor=8", num_microbatches=number) for number in (1, 4)
  )
  assert four == one


def test_variables_that_are_not_optimized_are_not_sent():
  fixed = _spec(
    "scale",
    (_D, _F),
    (axes.EMBED, axes.MLP),
    update=variables.UpdateRule.REPLACE,
  )
  assert _traffic("fsdp=8", specs=[fixed]).total == 0


@pytest.mark.parametrize(
  ("mesh", "number", "kind", "on_network"),
  [
    ("fsdp=8", 8, "h200", set()),
    ("data=2,fsdp=8", 16, "h200", {"data"}),
    ("fsdp=16", 16, "h200", {"fsdp"}),
    ("data=2,fsdp=4,tensor=2", 16, "h200", {"data"}),
    ("fsdp=4,tensor=4", 16, "h200", {"fsdp"}),
    ("data=4,fsdp=64", 256, "v4", set()),
    ("fsdp=64,dcn.data=2", 128, "v4", {"data"}),
  ],
)
def test_which_axes_leave_a_host_or_a_slice(mesh, number, kind, on_network):
  layout = _layout(mesh, number, kind)
  assert {
    axis
    for axis in axes.MESH_AXES
    if layout.size(axis) > 1 and layout.is_network(axis)
  } == on_network


def test_the_network_has_its_own_sum():
  found = _traffic("data=2,fsdp=8", number=16)
  assert found.fast == 2 * 3 * _KERNEL * 7 / 8
  assert found.network == 2 * 2 * (_KERNEL / 8) / 2
  assert found.total == found.fast + found.network


def test_cost_at_the_rates_of_the_data_sheet():
  h200 = hardware.named("h200")
  traffic = communication.Traffic(fast=450e9, network=25e9)
  flops = {"bfloat16": 8 * 989.4e12, "float32": 8 * 494.7e12, "": 1.0}
  found = cost.of(flops, traffic, kind=h200, num_devices=8)
  assert (found.compute, found.fast, found.network) == (2.0, 1.0, 0.5)
  assert (found.total, found.bound) == (3.5, 2.0)


def test_cost_of_hardware_without_rates():
  with pytest.raises(ValueError, match="The rates of cpu are not known"):
    cost.of(
      {},
      communication.Traffic(),
      kind=hardware.named("cpu"),
      num_devices=1,
    )
