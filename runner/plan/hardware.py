"""Rates, memory and links of the devices that programs are planned for.

One table. Every figure is the vendor's, for one *device* as JAX shows it,
dense (no structured sparsity); a TPU v7x chip is two devices, every other kind
is one device a chip. Sources, by the letter in the table:

A   NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM and, from its first
    edition, 40GB SXM; DGX A100 datasheet, eight 200 Gb/s adapters.
AG  NVIDIA A10G datasheet for Amazon EC2 G5; g5.48xlarge, 100 Gb/s for eight.
H   NVIDIA H100 Tensor Core GPU datasheet, H100 SXM, PCIe (first edition) and
    NVL, half of the rates "with sparsity"; DGX H100 datasheet, eight 400 Gb/s
    adapters.
H2  NVIDIA H200 Tensor Core GPU datasheet, H200 SXM; DGX H200 datasheet.
H20 NVIDIA publishes no datasheet; these are the figures that it gave to
    manufacturers of servers and that they print. The board is that of an H100
    SXM, so its adapters are taken to be the same.
B   NVIDIA HGX platform page (B200, B300), half of the rates with sparsity, 2.1
    TB for eight B300; DGX B200 datasheet, 1,440 GB and 64 TB/s for eight GPUs;
    DGX B300 datasheet, eight 800 Gb/s adapters. The INT8 rates of B300 and
    GB300, far below those of B200, differ between pages and are left out.
GB  NVIDIA GB200 NVL72 and GB300 NVL72 pages, figures of a rack over 72: 360
    PFLOP/s (bfloat16) and 720 (FP8) with sparsity, 13.4 and 20 TB, 576 and 576
    TB/s, 130 TB/s of NVLink; one 400 or 800 Gb/s adapter for each GPU. Boards
    of GB200 in smaller NVLink domains (NVL4) have the same name in JAX.
L   NVIDIA L40S datasheet; Amazon EC2 g6e.48xlarge, 400 Gb/s for eight GPUs.
R   NVIDIA RTX Blackwell GPU Architecture, whitepaper, GeForce RTX 5090; NVIDIA
    RTX PRO Blackwell GPU Architecture, whitepaper, RTX PRO 6000 Workstation
    Edition. Both with FP32 accumulation, which halves GeForce's rates.
M   AMD Instinct MI300X and MI355X datasheets: seven Infinity Fabric links, of
    64 and 76.8 GB/s in one direction. The adapters are those of AMD's
    reference clusters, 400 Gb/s for each GPU.
N   AWS Neuron documentation, "Trainium2 Architecture"; Amazon EC2
    trn2.48xlarge, 16 chips and 3.2 Tb/s. The NeuronLink is half of the figure,
    as if that were both directions. A chip is four devices, because two cores
    are one by default (LNC=2).
T   Google Cloud, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x
    (Ironwood)", https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}.
    The interconnect is half of the bidirectional figure. Of v4 the page says
    1.1 PB/s of all-reduce for 4,096 chips: 268 GB/s, six links of 45.

The fast link of cards without NVLink is PCIe: half of the bidirectional 64
GB/s (4.0) or 128 GB/s (5.0). Bridges between two H100 PCIe or NVL are not
counted. Where no vendor says which adapter belongs to a GPU, its network is not
known.

Hosts of GPUs are reached by PCIe, 16 lanes, or by a Grace's NVLink-C2C of 900
GB/s in both directions for two GPUs; those of TPUs at 16 and, from v6e on, 32
GB/s a chip, by "How to scale your model", https://jax-ml.github.io/scaling-book.

The memory that a program may use is less than what is soldered on. Of TPUs it
is what the compiler says when a program does not fit; of GPUs and Trainium,
where no compiler says it, 0.9 of the memory: what the driver, CUDA and NCCL
take is not the program's.
"""

from collections.abc import Mapping
import dataclasses
import enum
import re
from typing import Final

import numpy as np
from numpy.typing import DTypeLike

_GIB: Final = 2.0**30
_GB: Final = 1e9
_TERA: Final = 1e12
_GPU_USABLE: Final = 0.9
# GB/s of 16 lanes, in one direction.
_PCIE_4: Final = 32.0
_PCIE_5: Final = 64.0
# Half of a Grace's link of 450 GB/s, which two GPUs share.
_C2C: Final = 225.0


class Platform(enum.Enum):
  """Platforms, each with a compiler; JAX's names."""

  CPU = "cpu"
  CUDA = "cuda"
  NEURON = "neuron"
  ROCM = "rocm"
  TPU = "tpu"

  @property
  def needs_device(self) -> bool:
    """Whether its compiler runs on machines with such devices only."""
    return self in (Platform.NEURON, Platform.ROCM)

  @property
  def has_hosts(self) -> bool:
    """Whether a target of it is hosts of some devices, not a slice."""
    return self in (Platform.CUDA, Platform.NEURON, Platform.ROCM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """One kind of device. Bandwidths are bytes per second, in one direction.

  Attributes:
    name: Our name, as targets are written: `h200`, `v5e`.
    platform: Platform whose compiler makes its programs.
    device_kinds: All known values of `jax.Device.device_kind`. Boards that are
      not named here have other rates.
    flops: Peak FLOP/s of matrix multiplication, by the name of the operands'
      dtype; empty where no vendor states it (cpu).
    memory_bytes: Memory of a device; `None` where it is the machine's.
    usable_bytes: Bytes of it that a program may use.
    memory_bandwidth: Of that memory.
    link_bandwidth: Of one device to the fast network (NVLink, or all ICI links
      of a chip together).
    links: Number of links that `link_bandwidth` is the sum of; 1 for a switch.
    network_bandwidth: Of one device to the network between hosts (NIC) or
      slices (DCN).
    host_bandwidth: Of one device to the memory of its host; `None` if not
      known.
    devices_per_chip: How many devices one chip is.
    devices_per_host: How many devices are on one full host.
    hosts_per_domain: How many hosts the fast network joins: 18 for the racks of
      72 GPUs, one for other GPUs. Not used for TPUs, whose slices are domains.
  """

  name: str
  platform: Platform
  device_kinds: tuple[str, ...]
  flops: Mapping[str, float]
  memory_bytes: float | None
  usable_bytes: float | None
  memory_bandwidth: float | None
  link_bandwidth: float | None
  links: int = 1
  network_bandwidth: float | None
  host_bandwidth: float | None = None
  devices_per_chip: int = 1
  devices_per_host: int
  hosts_per_domain: int = 1

  def peak_flops(self, dtype: DTypeLike = "bfloat16") -> float | None:
    """Returns the peak FLOP/s of matmuls of two such operands.

    float32 is the rate of JAX's default precision: TF32 on NVIDIA GPUs, one
    bfloat16 pass on TPUs, and float32 elsewhere.

    Args:
      dtype: Of the operands.

    Returns:
      FLOP/s, or `None` where the table has no figure.
    """
    # By name: numpy alone does not know the text "bfloat16".
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name.startswith("float8"):
      name = "float8"
    return self.flops.get(name)


def names() -> tuple[str, ...]:
  """Returns the names of all kinds."""
  return tuple(_TABLE)


def find_kind(name: str) -> Hardware:
  """Returns the kind with this name.

  Raises:
    ValueError: There is none.
  """
  if name not in _TABLE:
    raise ValueError(
      f"There is no device kind {name!r}; known are {', '.join(_TABLE)}."
    )
  return _TABLE[name]


def find_by_device_kind(kind: str) -> Hardware | None:
  """Returns the kind that JAX calls `kind`, or that we do.

  Args:
    kind: A `jax.Device.device_kind` such as "NVIDIA H200" or "TPU v5 lite", or
      a name of this table.

  Returns:
    The kind, or `None` for a device that the table does not have.
  """
  wanted = _normalize(kind)
  for hardware in _TABLE.values():
    known = (hardware.name, *hardware.device_kinds)
    if wanted in map(_normalize, known):
      return hardware
  return None


def _normalize(kind: str) -> str:
  return re.sub(r"[\s_-]+", " ", kind).strip().lower()


def _rates(
  *, bfloat16: float, float32: float, **others: float
) -> Mapping[str, float]:
  """FLOP/s by dtype from TFLOP/s."""
  rates = {"float16": bfloat16, "bfloat16": bfloat16, "float32": float32}
  return {k: v * _TERA for k, v in (rates | others).items()}


def _gpu(
  name: str,
  *kinds: str,
  flops: Mapping[str, float],
  memory: float,
  bandwidth: float,
  link: float,
  nic: float | None,
  host: float = _PCIE_5,
  platform: Platform = Platform.CUDA,
  devices_per_host: int = 8,
  hosts_per_domain: int = 1,
) -> Hardware:
  """A kind of GPU; memory in GB, bandwidths in GB/s."""
  return Hardware(
    name=name,
    platform=platform,
    device_kinds=kinds,
    flops=flops,
    memory_bytes=memory * _GB,
    usable_bytes=_GPU_USABLE * memory * _GB,
    memory_bandwidth=bandwidth * _GB,
    link_bandwidth=link * _GB,
    network_bandwidth=None if nic is None else nic * _GB,
    host_bandwidth=host * _GB,
    devices_per_host=devices_per_host,
    hosts_per_domain=hosts_per_domain,
  )


def _tpu(
  name: str,
  *kinds: str,
  flops: Mapping[str, float],
  memory_gib: float,
  usable_gib: float,
  memory_bandwidth: float,
  ici: float,
  links: int,
  dcn: float,
  host: float = 16.0,
  devices_per_chip: int = 1,
  chips_per_host: int = 4,
) -> Hardware:
  """A kind from the figures of a chip."""
  n = devices_per_chip
  return Hardware(
    name=name,
    platform=Platform.TPU,
    device_kinds=kinds,
    flops={dtype: rate / n for dtype, rate in flops.items()},
    memory_bytes=memory_gib * _GIB / n,
    usable_bytes=usable_gib * _GIB / n,
    memory_bandwidth=memory_bandwidth / n,
    link_bandwidth=ici / n,
    links=links,
    network_bandwidth=dcn / n,
    host_bandwidth=host * _GB / n,
    devices_per_chip=n,
    devices_per_host=chips_per_host * n,
  )


_CPU: Final = Hardware(
  name="cpu",
  platform=Platform.CPU,
  device_kinds=("cpu",),
  flops={},
  memory_bytes=None,
  usable_bytes=None,
  memory_bandwidth=None,
  link_bandwidth=None,
  network_bandwidth=None,
  devices_per_host=8,
)

_AMPERE: Final = _rates(bfloat16=312.0, float32=156.0, int8=624.0)
_HOPPER: Final = _rates(
  bfloat16=989.4, float32=494.7, float8=1978.9, int8=1978.9
)
_NVL72: Final = _rates(bfloat16=2500.0, float32=1250.0, float8=5000.0)

_KINDS: Final = (
  _CPU,
  # A.
  _gpu(
    "a100",
    "NVIDIA A100-SXM4-80GB",
    flops=_AMPERE,
    memory=80.0,
    bandwidth=2039.0,
    link=300.0,
    nic=25.0,
    host=_PCIE_4,
  ),
  _gpu(
    "a100-40gb",
    "NVIDIA A100-SXM4-40GB",
    flops=_AMPERE,
    memory=40.0,
    bandwidth=1555.0,
    link=300.0,
    nic=25.0,
    host=_PCIE_4,
  ),
  # AG.
  _gpu(
    "a10g",
    "NVIDIA A10G",
    flops=_rates(bfloat16=70.0, float32=35.0, int8=140.0),
    memory=24.0,
    bandwidth=600.0,
    link=_PCIE_4,
    nic=1.5625,
    host=_PCIE_4,
  ),
  # H.
  _gpu(
    "h100",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H100",
    flops=_HOPPER,
    memory=80.0,
    bandwidth=3350.0,
    link=450.0,
    nic=50.0,
  ),
  _gpu(
    "h100-pcie",
    "NVIDIA H100 PCIe",
    flops=_rates(bfloat16=756.5, float32=378.0, float8=1513.0, int8=1513.0),
    memory=80.0,
    bandwidth=2000.0,
    link=_PCIE_5,
    nic=None,
  ),
  _gpu(
    "h100-nvl",
    "NVIDIA H100 NVL",
    flops=_rates(bfloat16=835.5, float32=417.5, float8=1670.5, int8=1670.5),
    memory=94.0,
    bandwidth=3900.0,
    link=_PCIE_5,
    nic=None,
  ),
  # H2.
  _gpu(
    "h200",
    "NVIDIA H200",
    flops=_HOPPER,
    memory=141.0,
    bandwidth=4800.0,
    link=450.0,
    nic=50.0,
  ),
  # H20.
  _gpu(
    "h20",
    "NVIDIA H20",
    flops=_rates(bfloat16=148.0, float32=74.0, float8=296.0, int8=296.0),
    memory=96.0,
    bandwidth=4000.0,
    link=450.0,
    nic=50.0,
  ),
  # B.
  _gpu(
    "b200",
    "NVIDIA B200",
    flops=_rates(bfloat16=2250.0, float32=1100.0, float8=4500.0, int8=4500.0),
    memory=180.0,
    bandwidth=8000.0,
    link=900.0,
    nic=50.0,
  ),
  _gpu(
    "b300",
    "NVIDIA B300 SXM6 AC",
    "NVIDIA B300",
    flops=_rates(bfloat16=2250.0, float32=1125.0, float8=4500.0),
    memory=262.5,
    bandwidth=8000.0,
    link=900.0,
    nic=100.0,
  ),
  # GB.
  _gpu(
    "gb200",
    "NVIDIA GB200",
    flops={**_NVL72, "int8": 5000.0 * _TERA},
    memory=186.0,
    bandwidth=8000.0,
    link=900.0,
    nic=50.0,
    devices_per_host=4,
    hosts_per_domain=18,
    host=_C2C,
  ),
  _gpu(
    "gb300",
    "NVIDIA GB300",
    flops=_NVL72,
    memory=277.0,
    bandwidth=8000.0,
    link=900.0,
    nic=100.0,
    devices_per_host=4,
    hosts_per_domain=18,
    host=_C2C,
  ),
  # L.
  _gpu(
    "l40s",
    "NVIDIA L40S",
    flops=_rates(bfloat16=362.05, float32=183.0, float8=733.0, int8=733.0),
    memory=48.0,
    bandwidth=864.0,
    link=_PCIE_4,
    nic=6.25,
    host=_PCIE_4,
  ),
  # R.
  _gpu(
    "rtx5090",
    "NVIDIA GeForce RTX 5090",
    flops=_rates(bfloat16=209.5, float32=104.8, float8=419.0, int8=838.0),
    memory=32.0,
    bandwidth=1792.0,
    link=_PCIE_5,
    nic=None,
  ),
  _gpu(
    "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    flops=_rates(bfloat16=503.8, float32=251.9, float8=1007.6, int8=1007.6),
    memory=96.0,
    bandwidth=1792.0,
    link=_PCIE_5,
    nic=None,
  ),
  # M.
  _gpu(
    "mi300x",
    "AMD Instinct MI300X",
    "AMD Instinct MI300X OAM",
    platform=Platform.ROCM,
    flops=_rates(bfloat16=1307.4, float32=163.4, float8=2614.9, int8=2614.9),
    memory=192.0,
    bandwidth=5300.0,
    link=448.0,
    nic=50.0,
  ),
  _gpu(
    "mi355x",
    "AMD Instinct MI355X",
    platform=Platform.ROCM,
    flops=_rates(bfloat16=2516.6, float32=157.3, float8=5033.2, int8=5033.2),
    memory=288.0,
    bandwidth=8000.0,
    link=537.6,
    nic=50.0,
  ),
  # N.
  Hardware(
    name="trn2",
    platform=Platform.NEURON,
    device_kinds=(),
    flops={
      dtype: rate / 4
      for dtype, rate in _rates(
        bfloat16=667.0, float32=181.0, float8=1299.0
      ).items()
    },
    memory_bytes=96 * _GIB / 4,
    usable_bytes=_GPU_USABLE * 96 * _GIB / 4,
    memory_bandwidth=2900 * _GB / 4,
    link_bandwidth=640 * _GB / 4,
    network_bandwidth=25 * _GB / 4,
    devices_per_chip=4,
    devices_per_host=64,
  ),
  # T. The DCN of v4 is not published; it is taken to be that of v5p.
  _tpu(
    "v4",
    "TPU v4",
    flops=_rates(bfloat16=275.0, float32=275.0, int8=275.0),
    memory_gib=32.0,
    usable_gib=30.75,
    memory_bandwidth=1200 * _GB,
    ici=270 * _GB,
    links=6,
    dcn=6.25 * _GB,
  ),
  _tpu(
    "v5e",
    "TPU v5 lite",
    "TPU v5e",
    flops=_rates(bfloat16=197.0, float32=197.0, int8=393.0),
    memory_gib=16.0,
    usable_gib=15.75,
    memory_bandwidth=819 * _GB,
    ici=200 * _GB,
    links=4,
    dcn=3.125 * _GB,
  ),
  _tpu(
    "v5p",
    "TPU v5p",
    "TPU v5",
    flops=_rates(bfloat16=459.0, float32=459.0, int8=918.0),
    memory_gib=95.74,
    usable_gib=95.74,
    memory_bandwidth=2765 * _GB,
    ici=600 * _GB,
    links=6,
    dcn=6.25 * _GB,
  ),
  _tpu(
    "v6e",
    "TPU v6 lite",
    "TPU v6e",
    flops=_rates(bfloat16=918.0, float32=918.0, int8=1836.0),
    memory_gib=32.0,
    usable_gib=31.25,
    memory_bandwidth=1638 * _GB,
    ici=400 * _GB,
    links=4,
    dcn=12.5 * _GB,
    host=32.0,
  ),
  _tpu(
    "v7x",
    "TPU7x",
    "TPU v7x",
    flops=_rates(bfloat16=2307.0, float32=2307.0, float8=4614.0),
    memory_gib=192.0,
    usable_gib=189.5,
    memory_bandwidth=7380 * _GB,
    ici=600 * _GB,
    links=6,
    dcn=12.5 * _GB,
    devices_per_chip=2,
    host=32.0,
  ),
)

_TABLE: Final[Mapping[str, Hardware]] = {kind.name: kind for kind in _KINDS}
