"""Tests for what is made of a plan's figures: bound, advice."""

import dataclasses

import pytest

from paxon.runner.plan import (
  advice,
  flops,
  hardware,
  network,
  result,
  roofline,
  sample_plan,
)
from paxon.runner.plan.program_text import collectives

_GIB = 2**30
_H200 = hardware.find_kind("h200")


def _collective(members, **fields):
  base = {
    "kind": "all-gather",
    "axes": ("fsdp",),
    "whole_axes": True,
    "group_size": len(members),
    "count": 3,
    "payload_bytes": 800,
    "wire_bytes": 700.0,
    "members": tuple(members),
  }
  return collectives.Collective(**base | fields)


def _flops(forward=0, backward=0, remat=0, attention=0):
  def key(phase, kind=flops.Kind.MATMUL):
    return flops.Key(phase=phase, kind=kind, part="m", dtype="bfloat16")

  return flops.Flops(
    {
      key(flops.Phase.FORWARD): forward,
      key(flops.Phase.BACKWARD): backward,
      key(flops.Phase.REMAT): remat,
      key(flops.Phase.FORWARD, flops.Kind.ATTENTION): attention,
    }
  )


def test_sums_collectives_by_link():
  # Two hosts of four: the first group stays inside, the others do not.
  hosts = network.Placement(domains=(0, 0, 0, 0, 1, 1, 1, 1))
  inside, across, flat = roofline.summarize(
    [
      _collective([0, 1, 2, 3], wire_bytes=1e9),
      _collective([0, 4], axes=("data",), wire_bytes=1e8),
      _collective(range(8), axes=("data", "fsdp"), wire_bytes=1e7),
    ],
    kind=_H200,
    placement=hosts,
  )
  assert (inside.link, across.link, flat.link) == ("fast", "network", "network")
  assert inside.seconds == pytest.approx(3 * 1e9 / 450e9)
  # One member a host has one adapter; four have four.
  assert across.seconds == pytest.approx(3 * 1e8 / 50e9)
  assert flat.seconds == pytest.approx(3 * 1e7 / 200e9)


def test_sums_equal_collectives():
  one = _collective([0, 1], is_asynchronous=True)
  (found,) = roofline.summarize(
    [one, dataclasses.replace(one, is_asynchronous=False, count=2)],
    kind=hardware.find_kind("cpu"),
    placement=network.Placement(domains=(0, 0)),
  )
  assert (found.count, found.asynchronous) == (5, 3)
  assert (found.payload_bytes, found.wire_bytes) == (4000, 3500)
  assert found.seconds is None


def test_sums_the_payload_by_module():
  one = _collective([0, 1], name="jit(f)/jvp(Lm)/mlp/up/dot_general")
  (found,) = roofline.summarize(
    [
      one,
      dataclasses.replace(one, name="jit(f)/transpose(jvp(Lm))/mlp/up/dot"),
      dataclasses.replace(one, name="", count=1),
    ],
    kind=_H200,
    placement=network.Placement(domains=(0, 0)),
  )
  up = 2 * one.count * one.payload_bytes
  assert found.module_bytes == {"Lm/mlp/up": up, "": one.payload_bytes}


def test_the_bound_is_the_slowest_part():
  options = {"kind": _H200, "num_devices": 2, "batch_shape": (4, 8)}
  work = _flops(forward=2 * 10**12, backward=4 * 10**12, attention=10**12)
  found = roofline.compute_bound(work, collectives=(), traffic=4.8e9, **options)
  assert found is not None
  assert found.compute == pytest.approx(3.5e12 / 989.4e12)
  assert found.memory == pytest.approx(1e-3)
  assert found.step == found.compute
  assert found.tokens_per_second == pytest.approx(32 / found.step)
  causal = 7e12 - 1e12 * (1 - (1 + 1 / 8) / 2)
  assert found.mfu == pytest.approx(causal / 7e12)

  slow = roofline.summarize(
    [_collective([0, 1], wire_bytes=50e9)],
    kind=_H200,
    placement=network.Placement(domains=(0, 1)),
  )
  found = roofline.compute_bound(work, collectives=slow, traffic=0.0, **options)
  assert found is not None
  assert (found.step, found.network) == (pytest.approx(3.0), found.step)
  assert found.fast_link == 0


def test_unknown_communication_is_not_none_at_all():
  found = roofline.compute_bound(
    _flops(forward=2 * 10**12),
    kind=_H200,
    num_devices=2,
    collectives=None,
    traffic=1.0,
    batch_shape=None,
  )
  assert found is not None
  assert (found.fast_link, found.network) == (None, None)
  assert found.step == found.compute


def test_there_is_no_bound_without_rates():
  assert (
    roofline.compute_bound(
      _flops(forward=1),
      kind=hardware.find_kind("cpu"),
      num_devices=1,
      collectives=(),
      traffic=1.0,
      batch_shape=None,
    )
    is None
  )


def _memory(**fields):
  base = {
    "parameters": 2 * _GIB,
    "other_variables": 0,
    "optimizer": 4 * _GIB,
    "batch": 0,
    "gradients": 2 * _GIB,
    "usable": 10.0 * _GIB,
    "capacity": 16.0 * _GIB,
  }
  return result.Memory(**base | fields)


@pytest.mark.parametrize(
  ("fields", "fit"),
  [
    ({}, result.Fit.UNKNOWN),
    ({"peak": 8 * _GIB}, result.Fit.FITS),
    ({"peak": int(9.5 * _GIB)}, result.Fit.TIGHT),
    # The compiler for CUDA accepts it all the same.
    ({"peak": 11 * _GIB}, result.Fit.DOES_NOT_FIT),
    ({"compiler_error": "RESOURCE_EXHAUSTED"}, result.Fit.DOES_NOT_FIT),
    ({"usable": None, "peak": 11 * _GIB}, result.Fit.UNKNOWN),
    ({"parameters": 7 * _GIB}, result.Fit.DOES_NOT_FIT),
  ],
)
def test_whether_it_fits(fields, fit):
  assert _memory(**fields).fit is fit


@pytest.mark.parametrize(
  ("kind", "platform", "option"),
  [
    ("all-gather", "cuda", "xla_gpu_enable_pipelined_all_gather=True"),
    ("all-gather", "tpu", "xla_enable_async_all_gather=True"),
    ("all-reduce", "cuda", None),
  ],
)
def test_a_mesh_that_waits_long_for_an_axis_gets_advice(kind, platform, option):
  estimate = sample_plan.estimate(
    step=1.0, exposed={"tensor": 0.4, "fsdp": 0.14}
  )
  collectives = roofline.summarize(
    [_collective([0, 1], kind=kind, axes=("tensor",))],
    kind=_H200,
    placement=network.Placement(domains=(0, 0)),
  )
  (text,) = advice.advise_on_waiting(
    estimate, collectives, platform=hardware.Platform(platform)
  )
  assert text.startswith(
    "40 % of the step waits for communication over the mesh axis tensor: make"
    " it smaller in the mesh, or compare other layouts."
  )
  assert ("compiler options" in text) == (option is not None)
  assert option is None or option in text


def test_how_many_devices_a_state_takes():
  text = advice.devices_for(1000 * _GIB, usable=100.0 * _GIB, num_devices=8)
  assert text == (
    "The state takes 1,000.00 GiB; sharded over 8 devices it is 125.00 GiB of"
    " 100.00 GiB on each. At least 10 such devices hold it, 32 leave half of"
    " their memory for activations: use a larger --target, with"
    " --fdl.mesh=fsdp=32."
  )
