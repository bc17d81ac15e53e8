"""Rates, memory and links of the devices that programs are planned for.

One table. Every figure is the vendor's, for one *device* as JAX shows it,
dense (no structured sparsity); a TPU v7x chip is two devices, every other kind
is one device a chip. Sources, by the letter in the table:

A   NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM;
    NVIDIA DGX A100 datasheet, eight 200 Gb/s adapters for eight GPUs.
H   NVIDIA H100 Tensor Core GPU datasheet, H100 SXM, half of the rates "with
    sparsity"; NVIDIA DGX H100 datasheet, eight 400 Gb/s adapters.
H2  NVIDIA H200 Tensor Core GPU datasheet, H200 SXM; DGX H200 datasheet.
B   NVIDIA HGX platform page and DGX B200 datasheet, 1,440 GB and 64 TB/s for
    eight GPUs, half of the rates with sparsity.
T   Google Cloud, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x
    (Ironwood)", https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}.
    The interconnect is half of the bidirectional figure. Of v4 the page says
    1.1 PB/s of all-reduce for 4,096 chips: 268 GB/s, six links of 45.

The memory that a program may use is less than what is soldered on. Of TPUs it
is what the compiler says when a program does not fit; of NVIDIA GPUs, where
the compiler never refuses, 0.9 of the memory: what the driver, CUDA and NCCL
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
_CUDA_USABLE: Final = 0.9


class Platform(enum.Enum):
  """Platforms, each with a compiler."""

  CPU = "cpu"
  CUDA = "cuda"
  TPU = "tpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """One kind of device. Bandwidths are bytes per second, in one direction.

  Attributes:
    name: Our name, as targets are written: `h200`, `v5e`.
    platform: Platform whose compiler makes its programs.
    device_kinds: Values of `jax.Device.device_kind`.
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
    devices_per_chip: How many devices one chip is.
    devices_per_host: How many devices are on one full host.
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
  devices_per_chip: int = 1
  devices_per_host: int

  def peak_flops(self, dtype: DTypeLike = "bfloat16") -> float | None:
    """Returns the peak FLOP/s of matmuls of two such operands.

    float32 is the rate of JAX's default precision: TF32 on NVIDIA GPUs, and one
    bfloat16 pass on TPUs.

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
  # NVIDIA's strings add the board and its memory: "NVIDIA H100 80GB HBM3".
  for hardware in _TABLE.values():
    if hardware.platform is Platform.CUDA and re.search(
      rf"\bnvidia\b.*\b{hardware.name}\b", wanted
    ):
      is_other_board = re.search(r"\b(pcie|nvl|mig|40gb)\b", wanted)
      return None if is_other_board else hardware
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
  *,
  flops: Mapping[str, float],
  memory_gb: float,
  memory_bandwidth: float,
  nvlink: float,
  nic: float,
) -> Hardware:
  return Hardware(
    name=name,
    platform=Platform.CUDA,
    device_kinds=(f"NVIDIA {name.upper()}",),
    flops=flops,
    memory_bytes=memory_gb * _GB,
    usable_bytes=_CUDA_USABLE * memory_gb * _GB,
    memory_bandwidth=memory_bandwidth,
    link_bandwidth=nvlink,
    network_bandwidth=nic,
    devices_per_host=8,
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

_HOPPER: Final = _rates(
  bfloat16=989.4, float32=494.7, float8=1978.9, int8=1978.9
)

_KINDS: Final = (
  _CPU,
  # A.
  _gpu(
    "a100",
    flops=_rates(bfloat16=312.0, float32=156.0, int8=624.0),
    memory_gb=80.0,
    memory_bandwidth=2039 * _GB,
    nvlink=300 * _GB,
    nic=25 * _GB,
  ),
  # H.
  _gpu(
    "h100",
    flops=_HOPPER,
    memory_gb=80.0,
    memory_bandwidth=3350 * _GB,
    nvlink=450 * _GB,
    nic=50 * _GB,
  ),
  # H2.
  _gpu(
    "h200",
    flops=_HOPPER,
    memory_gb=141.0,
    memory_bandwidth=4800 * _GB,
    nvlink=450 * _GB,
    nic=50 * _GB,
  ),
  # B.
  _gpu(
    "b200",
    flops=_rates(bfloat16=2250.0, float32=1100.0, float8=4500.0, int8=4500.0),
    memory_gb=180.0,
    memory_bandwidth=8000 * _GB,
    nvlink=900 * _GB,
    nic=50 * _GB,
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
  ),
)

_TABLE: Final[Mapping[str, Hardware]] = {kind.name: kind for kind in _KINDS}
