"""Tests for efficiency factors and the rates that they give."""

import dataclasses

import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.plan import hardware
from paxon.runner.plan.estimate import efficiency

_H200 = hardware.find_kind("h200")


@pytest.mark.parametrize("name", hardware.names())
def test_every_kind_but_cpu_has_factors(name):
  kind = hardware.find_kind(name)
  found = efficiency.choose(kind, {})
  if name == "cpu":
    assert found is None
    return
  assert found is not None
  assert found.band[0] < 1 < found.band[1]
  assert efficiency.rates(kind, found) is not None


def test_rates_are_shares_of_the_data_sheet():
  # NVIDIA's H200: 989.4 TFLOP/s, 4.8 TB/s, NVLink 450 GB/s, 400 Gbit/s.
  environ = {
    efficiency.VARIABLE: "matmul=0.5, matmul.float8=0.25,attention=0.4,"
    "memory=0.8,fast_link=0.7,network=0.6"
  }
  given = efficiency.choose(_H200, environ)
  assert given is not None
  assert "PAXON_PLAN_EFFICIENCY=matmul=0.5" in given.source
  found = efficiency.rates(_H200, given)
  assert found is not None
  assert found.flops("bfloat16") == 0.5 * 989.4e12
  assert found.flops("float8_e4m3fn") == 0.25 * 1978.9e12
  assert found.flops("bfloat16", is_attention=True) == 0.4 * 989.4e12
  assert found.flops("complex64") is None
  assert found.memory == 0.8 * 4800e9
  assert found.links.fast == 0.7 * 450e9
  assert found.links.network == 0.6 * 50e9
  assert found.peak == 989.4e12


def test_there_are_no_rates_without_a_data_sheet():
  cpu = hardware.find_kind("cpu")
  assert efficiency.rates(cpu, efficiency.DATASHEET) is None


@pytest.mark.parametrize(
  "text",
  [
    *("matmul", "matmul=", "matmul=0", "matmul=74", "matmul=nan", "x=0.5"),
    "matmul.bf16=0.5",
  ],
)
def test_other_factors_are_rejected(text):
  with pytest.raises(user_error.UserError, match=r"must be NAME=FACTOR"):
    efficiency.choose(_H200, {efficiency.VARIABLE: text})


@pytest.mark.parametrize("name", hardware.names())
def test_more_devices_and_hosts_are_never_faster(name):
  found = efficiency.choose(hardware.find_kind(name), {})
  if found is None:
    return
  before = 0.0
  for num_devices, num_hosts in ((1, 1), (8, 1), (16, 2), (64, 8), (4096, 512)):
    slowdown = found.slowdown(
      num_devices=num_devices, num_hosts=num_hosts, low_precision=0.0
    )
    assert slowdown >= max(before, 1.0)
    before = slowdown
    few = found.slowdown(
      num_devices=num_devices, num_hosts=num_hosts, low_precision=0.5
    )
    assert few >= slowdown


def test_one_device_takes_the_simulated_time():
  # The rates were measured on one H200.
  given = efficiency.choose(_H200, {})
  assert given is not None
  alone = given.slowdown(num_devices=1, num_hosts=1, low_precision=0.0)
  assert alone == 1.0


def test_the_slowest_of_many_hosts_is_late():
  # The mean of the largest of n normal deviates, by drawing them, is at most
  # sqrt(2 log n) and comes near it.
  found = dataclasses.replace(efficiency.DATASHEET, stragglers=0.05)
  draws = np.random.default_rng(0).normal(size=(2000, 512))
  for num_hosts in (8, 64, 512):
    late = draws[:, :num_hosts].max(axis=1).mean()
    slowdown = found.slowdown(
      num_devices=8, num_hosts=num_hosts, low_precision=0.0
    )
    assert 0.6 < 0.05 * late / np.log(slowdown) <= 1.0


def test_our_fp8_step_takes_what_was_measured():
  # docs/plan_accuracy.md: 284.7 ms for 262 ms; 0.7 to 0.9 of the FLOPs of a
  # decoder are in fp8.
  given = efficiency.choose(_H200, {})
  assert given is not None
  for share in (0.7, 0.9):
    slowdown = given.slowdown(num_devices=1, num_hosts=1, low_precision=share)
    assert slowdown == pytest.approx(284.7 / 262, rel=0.02)
