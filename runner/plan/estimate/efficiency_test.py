"""Tests for efficiency factors and the rates that they give."""

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
