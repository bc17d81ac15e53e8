"""Calibration files: achieved fractions of datasheet rates.

A calibration is a JSON file:

  {
    "version": 1,
    "hardware": ["h100", "h200"],
    "measured": true,
    "date": "2026-01-31",
    "source": "microbenchmarks on one NVIDIA H200",
    "versions": {"jax": "0.10.2"},
    "band": [0.9, 1.1],
    "kernel_overhead": 1.5e-06,
    "efficiency": {
      "matmul": {"bfloat16": 0.8, "default": 0.8},
      "attention": 0.5,
      "memory": 0.9,
      "fast_link": 0.8,
      "network": 0.8
    },
    "rates": null
  }

Efficiencies are shares of the figures in `paxon.runner.plan.hardware`. Where
that table has none, as for CPUs, `rates` states what the shares are of:

    "rates": {"flops": {"float32": 1e11}, "memory": 1e10,
              "fast_link": 1e9, "network": null}

Nothing is taken from a program's published speed: a table of such speeds can
only be compared with what was not fitted to it.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any, Final

from paxon.runner import user_error
from paxon.runner.plan import hardware
from paxon.runner.plan.estimate import field_reader

VERSION: Final = 1
DEFAULT: Final = "default"
# Names the file to take in place of the package's own.
VARIABLE: Final = "PAXON_PLAN_CALIBRATION"

_FOLDER: Final = pathlib.Path(__file__).parent / "calibrations"
_FIELDS: Final = (
  "version",
  "hardware",
  "measured",
  "date",
  "source",
  "versions",
  "band",
  "kernel_overhead",
  "efficiency",
  "rates",
)
_SHARES: Final = ("attention", "memory", "fast_link", "network")
_RATES: Final = ("flops", "memory", "fast_link", "network")

# A data sheet may be a little too modest; twice it is a mistake in units.
_MOST: Final = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRates:
  """What stands in for a data sheet; bytes and FLOPs per second of a device.

  Attributes:
    flops: Of products, by dtype.
    memory: Of the memory.
    fast_link: To the other devices of a host or slice.
    network: To those of others; `None` if there are none.
  """

  flops: Mapping[str, float]
  memory: float
  fast_link: float
  network: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
  """Shares of the rates of the data sheet.

  Attributes:
    hardware: Names of the kinds that it is for.
    measured: Whether the figures were measured on this hardware by the command
      that wrote the file.
    date: Of the measurement, or of the decision.
    source: Where the figures are from, one line.
    versions: Of the libraries they were measured with.
    band: Between which multiples of an estimate the truth is expected.
    kernel_overhead: Seconds between two kernels.
    matmul: Share that products reach, by dtype; `default` is for all others.
    attention: Share that attention kernels reach.
    memory: Share of the memory bandwidth.
    fast_link: Share of the links inside a host or slice.
    network: Share of the links between them.
    rates: What the shares are of, where the table of hardware has no rates.
  """

  hardware: tuple[str, ...]
  measured: bool
  date: str
  source: str
  versions: Mapping[str, str]
  band: tuple[float, float]
  kernel_overhead: float
  matmul: Mapping[str, float]
  attention: float
  memory: float
  fast_link: float
  network: float
  rates: DeviceRates | None = None

  @property
  def summary(self) -> str:
    """Where the figures are from, one line for a plan."""
    how = "measured" if self.measured else "not measured by us"
    return f"{how}, {self.date}: {self.source}"

  def whole(self) -> "Calibration":
    """Returns it with all shares 1 and no overhead."""
    return dataclasses.replace(
      self,
      kernel_overhead=0.0,
      matmul={DEFAULT: 1.0},
      **dict.fromkeys(_SHARES, 1.0),
    )

  def slower(self, times: float) -> "Calibration":
    """Returns the calibration with which every estimate is `times` as long."""
    return dataclasses.replace(
      self,
      kernel_overhead=self.kernel_overhead * times,
      matmul={dtype: share / times for dtype, share in self.matmul.items()},
      **{name: getattr(self, name) / times for name in _SHARES},
    )


def chosen(
  kind: hardware.Hardware, environ: Mapping[str, str]
) -> Calibration | None:
  """Returns the calibration to plan with, or None if there is none.

  Args:
    kind: The hardware.
    environ: The environment; `PAXON_PLAN_CALIBRATION` names a file, which is
      taken for the kinds that it is for.

  Raises:
    UserError: Something in that file is wrong.
  """
  file = environ.get(VARIABLE)
  if file:
    own = read(file)
    if kind.name in own.hardware:
      return own
  return for_hardware(kind)


def for_hardware(kind: hardware.Hardware) -> Calibration | None:
  """Returns the calibration that this package has for a kind, or None."""
  found = [
    calibration
    for path in sorted(_FOLDER.glob("*.json"))
    if kind.name in (calibration := read(path)).hardware
  ]
  assert len(found) <= 1, f"{len(found)} calibrations are for {kind.name}"
  return found[0] if found else None


def read(path: str | pathlib.Path) -> Calibration:
  """Reads a calibration.

  Raises:
    UserError: There is no such file, or something in it is wrong; the message
      names the field.
  """
  path = pathlib.Path(path)
  try:
    text = path.read_text()
  except OSError as error:
    raise user_error.UserError(
      f"The calibration {path} cannot be read: {error.strerror}."
    ) from error
  return from_json(text, name=str(path))


def from_json(text: str, *, name: str) -> Calibration:
  """Reads the text of a calibration.

  Args:
    text: JSON.
    name: Of the file, for messages.

  Raises:
    UserError: Something in it is wrong; the message names the field.
  """
  reader = field_reader.FieldReader(name)
  try:
    content = json.loads(text)
  except json.JSONDecodeError as error:
    raise reader.wrong(f"is not JSON ({error})") from error
  version = content.get("version") if isinstance(content, dict) else None
  if version != VERSION:
    raise reader.wrong(
      f"has version {version!r}; version {VERSION} is read. Make it again with"
      " tools/calibrate"
    )
  reader.names(content, _FIELDS, "the file")
  kinds = _kinds(reader, content["hardware"])
  shares = content["efficiency"]
  reader.names(shares, ("matmul", *_SHARES), "efficiency")
  matmul = reader.by_dtype(shares["matmul"], "efficiency.matmul", most=_MOST)
  if DEFAULT not in matmul:
    raise reader.wrong(
      f"needs {DEFAULT!r} in efficiency.matmul, for all dtypes"
    )
  return Calibration(
    hardware=kinds,
    measured=reader.typed(content["measured"], bool, "measured"),
    date=reader.date(content["date"]),
    source=reader.typed(content["source"], str, "source"),
    versions=reader.typed(content["versions"], dict, "versions"),
    band=reader.band(content["band"]),
    kernel_overhead=reader.number(
      content["kernel_overhead"], "kernel_overhead", least=0.0, most=1.0
    ),
    matmul=matmul,
    rates=_rates(reader, content["rates"], kinds),
    **{
      field: reader.number(shares[field], f"efficiency.{field}", most=_MOST)
      for field in _SHARES
    },
  )


def to_json(calibration: Calibration) -> str:
  """Returns the text that `from_json` reads."""
  rates = calibration.rates
  content = {
    "version": VERSION,
    "hardware": list(calibration.hardware),
    "measured": calibration.measured,
    "date": calibration.date,
    "source": calibration.source,
    "versions": dict(calibration.versions),
    "band": list(calibration.band),
    "kernel_overhead": calibration.kernel_overhead,
    "efficiency": {
      "matmul": dict(calibration.matmul),
      **{name: getattr(calibration, name) for name in _SHARES},
    },
    "rates": None if rates is None else dataclasses.asdict(rates),
  }
  return json.dumps(content, indent=2) + "\n"


def _kinds(reader: field_reader.FieldReader, value: Any) -> tuple[str, ...]:
  known = hardware.names()
  if not isinstance(value, list) or not value:
    raise reader.wrong(f"needs a list of names as hardware, not {value!r}")
  for kind in value:
    if kind not in known:
      raise reader.wrong(
        f"is for the hardware {kind!r}; known are {', '.join(known)}"
      )
  return tuple(value)


def _rates(
  reader: field_reader.FieldReader, value: Any, kinds: tuple[str, ...]
) -> DeviceRates | None:
  bare = [k for k in kinds if not hardware.named(k).flops]
  if value is None:
    for kind in bare:
      raise reader.wrong(
        f"needs rates, because no data sheet states those of {kind}"
      )
    return None
  for kind in (kind for kind in kinds if kind not in bare):
    raise reader.wrong(
      f"has rates, but those of {kind} are its data sheet's; write null"
    )
  reader.names(value, _RATES, "rates")
  limit = 1e18
  network = value["network"]
  return DeviceRates(
    flops=reader.by_dtype(value["flops"], "rates.flops", most=limit),
    memory=reader.number(value["memory"], "rates.memory", most=limit),
    fast_link=reader.number(value["fast_link"], "rates.fast_link", most=limit),
    network=None
    if network is None
    else reader.number(network, "rates.network", most=limit),
  )
