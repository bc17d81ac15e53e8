"""Tests for calibration files."""

import json

import pytest

from paxon.runner import user_error
from paxon.runner.plan import hardware
from paxon.runner.plan.estimate import calibration, rates


def _content(**changes):
  content = {
    "version": 1,
    "hardware": ["h200"],
    "measured": True,
    "date": "2026-01-31",
    "source": "one NVIDIA H200",
    "versions": {"jax": "0.10.2"},
    "band": [0.9, 1.2],
    "kernel_overhead": 2e-6,
    "efficiency": {
      "matmul": {"bfloat16": 0.8, "default": 0.5},
      "attention": 0.4,
      "memory": 0.9,
      "fast_link": 0.7,
      "network": 0.6,
    },
    "rates": None,
  }
  return content | changes


def _efficiency(**changes):
  return {"efficiency": _content()["efficiency"] | changes}


_CPU = {
  "hardware": ["cpu"],
  "rates": {
    "flops": {"float32": 2e11, "float16": 1e11},
    "memory": 1e10,
    "fast_link": 1e9,
    "network": None,
  },
}


def _read(content):
  return calibration.from_json(json.dumps(content), name="x.json")


@pytest.mark.parametrize("changes", [{}, _CPU])
def test_what_is_written_is_what_is_read(changes):
  found = _read(_content(**changes))
  again = calibration.from_json(calibration.to_json(found), name="y.json")
  assert again == found
  assert found.summary == "measured, 2026-01-31: one NVIDIA H200"


def test_shares_multiply_the_data_sheet():
  h200 = hardware.named("h200")
  found = rates.of(h200, _read(_content()))
  assert found is not None
  assert found.flops("bfloat16") == 0.8 * h200.flops["bfloat16"]
  assert found.flops("float32") == 0.5 * h200.flops["float32"]
  assert found.flops("float8_e4m3fn") == 0.5 * h200.flops["float8"]
  assert (
    found.flops("bfloat16", is_attention=True) == 0.4 * h200.flops["bfloat16"]
  )
  assert found.flops("int4") is None
  assert found.memory == 0.9 * 4.8e12
  assert found.links.fast == 0.7 * 450e9
  assert found.links.network == 0.6 * 50e9
  assert found.kernel_overhead == 2e-6
  # An MFU is of the peak, whatever is reached.
  assert found.peak == h200.flops["bfloat16"]


def test_one_link_of_a_chip_is_a_part_of_all():
  found = rates.of(
    hardware.named("v4"), _read(_content(hardware=["v4"])).whole()
  )
  assert found is not None
  assert (found.links.fast, found.links.count) == (270e9, 6)


def test_a_cpu_has_the_rates_that_the_file_states():
  cpu = hardware.named("cpu")
  found = rates.of(cpu, _read(_content(**_CPU)))
  assert found is not None
  assert found.flops("float32") == 0.5 * 2e11
  assert (found.peak, found.memory) == (2e11, 0.9 * 1e10)
  assert found.links.network is None
  assert found.flops("bfloat16") is None


def test_slower_makes_all_rates_slower():
  found = _read(_content())
  slower = found.slower(2.0)
  h200 = hardware.named("h200")
  before, after = rates.of(h200, found), rates.of(h200, slower)
  assert before is not None
  assert after is not None
  for is_attention in (False, True):
    was = before.flops("bfloat16", is_attention=is_attention)
    assert after.flops("bfloat16", is_attention=is_attention) == was / 2
  assert after.memory == before.memory / 2
  assert after.links.fast == before.links.fast / 2
  assert after.links.network == before.links.network / 2
  assert after.kernel_overhead == 2 * before.kernel_overhead


def test_each_kind_but_the_cpu_has_one_calibration():
  for name in hardware.names():
    found = calibration.for_hardware(hardware.named(name))
    assert (found is None) == (name == "cpu"), name
    if found is not None:
      # Nobody measured here, and the file says so.
      assert not found.measured
      assert found.summary.startswith("not measured by us, 20")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"version": 2}, r"x\.json has version 2; version 1 is read"),
    ({"hardware": ["h300"]}, r"hardware 'h300'; known are cpu, a100"),
    ({"hardware": []}, r"needs a list of names as hardware, not \[\]"),
    ({"date": "31.1.2026"}, r"has date = '31\.1\.2026'; write it as 2026-"),
    ({"measured": "yes"}, r"needs a bool as measured, not 'yes'"),
    ({"source": None}, r"needs a str as source, not None"),
    ({"band": [0.9]}, r"needs two numbers as band, not \[0\.9\]"),
    ({"band": [1.1, 1.2]}, r"band\[0\] = 1\.1; it must be .* at most 1"),
    ({"band": [0.9, 0.95]}, r"band\[1\] = 0\.95; it must be at least 1"),
    ({"kernel_overhead": -1.0}, r"kernel_overhead = -1\.0; .* at least 0"),
    ({"efficiency": {}}, r"lacks 'matmul' in efficiency"),
    ({"efficiency": 3}, r"needs an object as efficiency, not 3"),
    (_efficiency(memory=90), r"efficiency\.memory = 90; .* at most 1\.5"),
    (_efficiency(memory=True), r"efficiency\.memory = True; it must be"),
    (_efficiency(memory=0), r"efficiency\.memory = 0; it must be more than 0"),
    (_efficiency(memory=float("nan")), r"efficiency\.memory = nan"),
    (_efficiency(links=0.5), r"has 'links' in efficiency; known are matmul"),
    (_efficiency(matmul={"bfloat16": 1.0}), r"needs 'default' in effi"),
    (_efficiency(matmul=0.8), r"needs a dict as efficiency\.matmul, not 0\.8"),
    ({"extra": 1}, r"has 'extra' in the file; known are version"),
    ({"hardware": ["cpu"]}, r"needs rates, because no data sheet .* cpu"),
    ({"rates": _CPU["rates"]}, r"has rates, but those of h200 are its data"),
    (
      _CPU | {"rates": _CPU["rates"] | {"flops": {}}},
      r"needs a number by dtype as rates\.flops, not \{\}",
    ),
    (
      _CPU | {"rates": _CPU["rates"] | {"memory": 0}},
      r"rates\.memory = 0; it must be more than 0",
    ),
  ],
)
def test_a_wrong_file_names_its_field(changes, message):
  with pytest.raises(user_error.UserError, match=message):
    _read(_content(**changes))


def test_a_file_that_is_no_calibration(tmp_path):
  with pytest.raises(user_error.UserError, match=r"is not JSON \(Expecting"):
    calibration.from_json("{", name="x.json")
  with pytest.raises(user_error.UserError, match="has version None; version 1"):
    calibration.from_json("[]", name="x.json")
  missing = tmp_path / "missing.json"
  with pytest.raises(user_error.UserError, match=r"missing\.json cannot be re"):
    calibration.read(missing)


def test_a_file_that_lacks_a_field():
  content = _content()
  del content["band"]
  with pytest.raises(user_error.UserError, match=r"lacks 'band' in the file"):
    _read(content)
