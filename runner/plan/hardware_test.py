"""Tests for the table of hardware."""

import pytest

from paxon.runner.plan import hardware

_NAMES = (
  "cpu",
  "a100",
  "h100",
  "h200",
  "b200",
  "v4",
  "v5e",
  "v5p",
  "v6e",
  "v7x",
)


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA B200", "b200"),
    ("TPU v4", "v4"),
    ("TPU v5 lite", "v5e"),
    ("TPU v5p", "v5p"),
    ("TPU v5", "v5p"),
    ("TPU v6 lite", "v6e"),
    ("TPU7x", "v7x"),
    ("cpu", "cpu"),
    *((name, name) for name in _NAMES),
  ],
)
def test_finds_what_jax_calls_a_device(kind, name):
  found = hardware.find_by_device_kind(kind)
  assert found is not None
  assert found.name == name


@pytest.mark.parametrize(
  "kind",
  [
    "NVIDIA L4",
    "TPU v3",
    "",
    # Other boards of a known chip have other rates.
    "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA GH200 480GB",
  ],
)
def test_does_not_guess(kind):
  assert hardware.find_by_device_kind(kind) is None


def test_lists_every_kind_once():
  assert sorted(hardware.names()) == sorted(_NAMES)
  with pytest.raises(ValueError, match=r"no device kind 'h300'; known are cpu"):
    hardware.find_kind("h300")


@pytest.mark.parametrize("name", _NAMES[1:])
def test_figures_are_whole_and_in_order(name):
  kind = hardware.find_kind(name)
  assert kind.memory_bytes is not None
  assert kind.usable_bytes is not None
  assert 0.85 * kind.memory_bytes < kind.usable_bytes <= kind.memory_bytes
  assert kind.memory_bandwidth is not None
  assert kind.link_bandwidth is not None
  assert kind.network_bandwidth is not None
  # Every network is slower than the one inside it.
  assert kind.network_bandwidth < kind.link_bandwidth < kind.memory_bandwidth
  bfloat16 = kind.peak_flops("bfloat16")
  assert bfloat16 is not None
  assert kind.peak_flops("float16") == bfloat16
  # A machine that is not memory-bound at 100 FLOPs a byte is a typing error.
  assert 100 < bfloat16 / kind.memory_bandwidth < 600


def test_known_figures():
  h200, v4, v7x = map(hardware.find_kind, ("h200", "v4", "v7x"))
  assert h200.peak_flops() == pytest.approx(989.4e12)
  assert h200.peak_flops("float32") == pytest.approx(494.7e12)
  assert h200.peak_flops("float8_e4m3fn") == pytest.approx(1978.9e12)
  assert v4.usable_bytes == 30.75 * 2**30
  assert v4.peak_flops("float8_e4m3fn") is None
  # Two devices share a chip.
  assert v7x.peak_flops() == pytest.approx(2307e12 / 2)
  assert v7x.devices_per_host == 8


def test_has_no_figures_for_this_machine():
  assert hardware.find_kind("cpu").peak_flops() is None
  assert hardware.find_kind("cpu").usable_bytes is None
