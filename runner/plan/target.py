"""Targets: hardware and its size, parsed from text.

cpu:8             eight CPU devices
h200:64x8         64 hosts of 8 GPUs (a100, h100, b200, ...)
gb200:18x4        18 hosts of 4 GPUs, one NVLink domain (gb300)
trn2:4x16         4 hosts of 16 chips
v5e:16x16         one TPU slice, chips along each dimension (v4, v5e, ...)
v4:2x(4x4x4)      two such slices
"""

import dataclasses
import math
import re
from typing import Final

from paxon.runner.plan import hardware
from paxon.sharding import suggestions

FORMS: Final = (
  "cpu:8, h200:HOSTSxGPUS such as h200:64x8, or v4:SHAPE such as v4:4x4x4,"
  " v5e:16x16 or, for two slices, v4:2x(4x4x4)"
)
_FLAT: Final = (
  (1, 1),
  (2, 2),
  (2, 4),
  (4, 4),
  (4, 8),
  (8, 8),
  (8, 16),
  (16, 16),
)
_SMALL: Final = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
# Chips of the largest slice that is sold; larger ones are cubes of 4x4x4.
_MAX_CHIPS: Final = {"v4": 4096, "v5p": 6144, "v7x": 9216}


@dataclasses.dataclass(frozen=True)
class Target:
  """A number of devices of one kind.

  Attributes:
    text: As it was written.
    hardware: The kind.
    shape: Chips along each dimension of a slice; (hosts, chips of each) for
      GPUs and Trainium.
    slices: Number of slices, or 1.
  """

  text: str
  hardware: hardware.Hardware
  shape: tuple[int, ...]
  slices: int = 1

  @property
  def num_chips(self) -> int:
    """Number of chips, GPUs or CPU devices."""
    return self.slices * math.prod(self.shape)

  @property
  def num_devices(self) -> int:
    """Number of devices as JAX counts them."""
    return self.num_chips * self.hardware.devices_per_chip

  @property
  def devices_per_host(self) -> int:
    """Number of devices of a host; TPU slices may be smaller."""
    kind = self.hardware
    if kind.platform is hardware.Platform.TPU:
      return kind.devices_per_host
    return self.shape[-1] * kind.devices_per_chip

  def __str__(self) -> str:
    return self.text


def parse(text: str) -> Target:
  """Reads a target.

  Raises:
    ValueError: It has another form, or there is no such hardware; the message
      lists what there is.
  """
  name, colon, size = text.strip().partition(":")
  kind = hardware.find_by_device_kind(name)
  if kind is None or not colon or not size:
    known = ", ".join(hardware.names())
    close = suggestions.find_closest(name, hardware.names(), count=3)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    raise ValueError(
      f"--target={text} is not a target: {'' if kind else hint}use {FORMS};"
      f" kinds are {known}."
    )
  match = re.fullmatch(r"(?:(\d+)x\((\d+(?:x\d+)*)\)|(\d+(?:x\d+)*))", size)
  if match is None:
    raise ValueError(f"--target={text} has no size {size!r}: write {FORMS}.")
  shape = tuple(int(n) for n in (match[2] or match[3]).split("x"))
  slices = int(match[1] or 1)
  if 0 in shape or not slices:
    raise ValueError(f"--target={text}: sizes must be positive.")
  problem = _problem(kind, shape, is_sliced=match[1] is not None)
  if problem:
    raise ValueError(f"--target={text}: {problem}.")
  return Target(text.strip(), kind, shape, slices)


def parse_all(text: str) -> tuple[Target, ...]:
  """Reads several targets with commas between them.

  Raises:
    ValueError: One of them has another form, is empty or is named twice.
  """
  found: dict[str, Target] = {}
  for part in text.split(","):
    if not part.strip():
      raise ValueError(
        f"--target={text} has an empty entry; write targets with one comma"
        " between them, such as h200:1x8,v5e:4x4."
      )
    target = parse(part)
    if target.text in found:
      raise ValueError(f"--target={text} names {target} twice.")
    found[target.text] = target
  return tuple(found.values())


def _problem(
  kind: hardware.Hardware, shape: tuple[int, ...], *, is_sliced: bool
) -> str:
  """Returns the problem of a size; empty if there is none."""
  if kind.platform is hardware.Platform.CPU:
    right = len(shape) == 1 and not is_sliced
    return "" if right else "the cpu takes one number, such as cpu:8"
  if kind.platform.has_hosts:
    return _hosts_problem(kind, shape, is_sliced=is_sliced)
  return _tpu_problem(kind, shape)


def _hosts_problem(
  kind: hardware.Hardware, shape: tuple[int, ...], *, is_sliced: bool
) -> str:
  most = kind.devices_per_host // kind.devices_per_chip
  chips = "chips" if kind.devices_per_chip > 1 else "GPUs"
  if is_sliced or len(shape) != 2:
    return f"write hosts and {chips} of each, such as {kind.name}:64x{most}"
  sizes = [2**n for n in range(most.bit_length())]
  if shape[1] not in sizes:
    *first, last = map(str, sizes)
    return f"a host has {', '.join(first)} or {last} {chips}, not {shape[1]}"
  if shape[0] > 1 and shape[1] != most:
    return f"of several hosts each has all its {most} {chips}"
  return ""


def _tpu_problem(kind: hardware.Hardware, shape: tuple[int, ...]) -> str:
  size = "x".join(map(str, shape))
  most = _MAX_CHIPS.get(kind.name)
  if most is None:
    if shape in _FLAT:
      return ""
    known = ", ".join("x".join(map(str, flat)) for flat in _FLAT)
    return f"there is no {kind.name} slice of {size}; there are {known}"
  is_cubes = len(shape) == 3 and not any(n % 4 for n in shape)
  if shape in _SMALL or (is_cubes and math.prod(shape) <= most):
    return ""
  known = ", ".join("x".join(map(str, small)) for small in _SMALL)
  return (
    f"there is no {kind.name} slice of {size}; there are {known}, and three"
    f" multiples of 4 such as 4x4x8, up to {most} chips"
  )
