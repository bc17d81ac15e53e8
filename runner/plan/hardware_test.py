"""Tests for the table of hardware."""

import pytest

from paxon.runner.plan import hardware

_NAMES = (
  "cpu",
  "a100",
  "a100-40gb",
  "a10g",
  "h100",
  "h100-pcie",
  "h100-nvl",
  "h200",
  "h20",
  "b200",
  "b300",
  "gb200",
  "gb300",
  "l40s",
  "rtx5090",
  "rtx-pro-6000",
  "mi300x",
  "mi355x",
  "trn2",
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
    ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
    ("NVIDIA A10G", "a10g"),
    ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA H20", "h20"),
    ("NVIDIA B300 SXM6 AC", "b300"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GB300", "gb300"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA GeForce RTX 5090", "rtx5090"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ("AMD Instinct MI300X", "mi300x"),
    ("AMD Instinct MI355X", "mi355x"),
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
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA A10",
    "NVIDIA GH200 480GB",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H200 NVL",
    "NVIDIA H20-3e",
    "NVIDIA L40",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "AMD Instinct MI300A",
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
  # Every network is slower than the one inside it.
  assert kind.link_bandwidth < kind.memory_bandwidth
  if kind.network_bandwidth is not None:
    assert kind.network_bandwidth < kind.link_bandwidth
  bfloat16 = kind.peak_flops("bfloat16")
  assert bfloat16 is not None
  assert kind.peak_flops("float16") == bfloat16
  # A machine that is not memory-bound at 30 FLOPs a byte is a typing error.
  assert 30 < bfloat16 / kind.memory_bandwidth < 600


# Multiprocessors, dense bfloat16 FLOPs of one in a clock (vendors' whitepapers,
# with FP32 accumulation) and boost clock in GHz; bits of the memory bus and
# their Gbit/s; links and GB/s of one, one way (NVLink, PCIe lanes).
_PARTS = {
  "a100": (108, 2048, 1.41, 5120, 3.19, 12, 25),
  "a100-40gb": (108, 2048, 1.41, 5120, 2.43, 12, 25),
  "a10g": (80, 512, 1.71, 384, 12.5, 16, 2),
  "h100": (132, 4096, 1.83, 5120, 5.23, 18, 25),
  "h100-pcie": (114, 4096, 1.62, 5120, 3.19, 16, 4),
  "h100-nvl": (132, 4096, 1.55, 6016, 5.23, 16, 4),
  "h200": (132, 4096, 1.83, 6144, 6.25, 18, 25),
  "b200": (148, 8192, 1.85, 8192, 8.0, 18, 50),
  "b300": (158, 8192, 1.835, 8192, 8.0, 18, 50),
  "gb200": (152, 8192, 1.926, 8192, 8.0, 18, 50),
  "gb300": (152, 8192, 1.933, 8192, 8.0, 18, 50),
  "l40s": (142, 1024, 2.52, 384, 18.0, 16, 2),
  "rtx5090": (170, 512, 2.407, 512, 28.0, 16, 4),
  "rtx-pro-6000": (188, 1024, 2.617, 512, 28.0, 16, 4),
  "mi300x": (304, 2048, 2.1, 8192, 5.2, 7, 64),
  "mi355x": (256, 4096, 2.4, 8192, 8.0, 7, 76.8),
}


@pytest.mark.parametrize("name", _PARTS)
def test_figures_follow_from_the_parts_of_the_chip(name):
  cores, flops, clock, bits, rate, links, link = _PARTS[name]
  kind = hardware.find_kind(name)
  assert kind.peak_flops() == pytest.approx(
    cores * flops * clock * 1e9, rel=0.06
  )
  assert kind.memory_bandwidth == pytest.approx(bits / 8 * rate * 1e9, rel=0.03)
  assert kind.link_bandwidth == pytest.approx(links * link * 1e9)


def test_racks_join_hosts():
  for name in ("gb200", "gb300"):
    kind = hardware.find_kind(name)
    # NVL72.
    assert kind.hosts_per_domain * kind.devices_per_host == 72
  assert hardware.find_kind("b200").hosts_per_domain == 1


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


@pytest.mark.parametrize(
  ("names", "transfers", "lanes"),
  [
    # PCIe 4.0 and 5.0: 16 and 32 GT/s of each lane, 8 bits of a byte.
    (("a100", "a100-40gb", "a10g", "l40s"), 16, 16),
    (("h100", "h200", "b200", "rtx5090"), 32, 16),
  ],
)
def test_the_link_to_the_host_is_that_of_pcie(names, transfers, lanes):
  for name in names:
    kind = hardware.find_kind(name)
    assert kind.host_bandwidth == transfers * 1e9 * lanes / 8


def test_every_kind_with_a_compiler_has_a_link_to_its_host():
  for name in hardware.names():
    kind = hardware.find_kind(name)
    if not kind.platform.needs_device and name != "cpu":
      assert 10e9 < kind.host_bandwidth < kind.memory_bandwidth
