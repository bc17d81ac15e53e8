"""What a plan found out, as `plan.json` holds it.

The file is `{"version": 1, "plans": [PLAN, ...]}`; each plan has the fields of
`Plan`. Bytes are per device, FLOPs are of all devices together, times are in
seconds for one training step.
"""

from collections.abc import Mapping
import dataclasses
import enum
import json
from typing import Any, Final

VERSION: Final = 1

# Above this share of what may be used, a program that fits today may not fit
# with another compiler.
TIGHT: Final = 0.9


class Fit(enum.Enum):
  """Whether a program fits into the memory of a device."""

  FITS = "fits"
  TIGHT = "fits tightly"
  DOES_NOT_FIT = "does not fit"
  UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Bytes of one device.

  Attributes:
    parameters: Variables that are trained.
    other_variables: The model's other variables.
    optimizer: State of the optimizer, and what else a checkpoint holds.
    batch: One batch.
    gradients: All gradients in float32, if they are all there at once; they are
      part of the temporaries.
    arguments: What the step is given, as the compiler lays it out.
    temporaries: What lives only during the step.
    peak: The most that is used at once, arguments included.
    usable: What a program may use; `None` where that is not known.
    capacity: The memory of the device.
    refusal: What the compiler said when it found that the program does not fit.
  """

  parameters: int
  other_variables: int
  optimizer: int
  batch: int
  gradients: int
  arguments: int | None = None
  temporaries: int | None = None
  peak: int | None = None
  usable: float | None = None
  capacity: float | None = None
  refusal: str | None = None

  @property
  def state_and_batch(self) -> int:
    """What the step is given, by arithmetic."""
    return self.parameters + self.other_variables + self.optimizer + self.batch

  @property
  def fit(self) -> Fit:
    """Whether the program fits."""
    if self.refusal is not None:
      return Fit.DOES_NOT_FIT
    if self.usable is None:
      return Fit.UNKNOWN
    # Without a compiler one thing is certain: what does not fit by itself.
    known = self.state_and_batch if self.peak is None else self.peak
    if known > self.usable:
      return Fit.DOES_NOT_FIT
    if self.peak is None:
      return Fit.UNKNOWN
    return Fit.TIGHT if known > TIGHT * self.usable else Fit.FITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
  """FLOPs of one step on all devices.

  Attributes:
    model: Without recomputation, every key of every query counted.
    causal_model: Without what a causal mask hides; `None` where rows have no
      length.
    hardware: All that is executed, recomputation included.
    recomputed: The recomputation.
    by_part: `hardware` by the path of the linen module.
    by_kind: `hardware` by kind of operation.
    by_dtype: `hardware` by dtype of the operands.
  """

  model: int
  causal_model: float | None
  hardware: int
  recomputed: int
  by_part: Mapping[str, int]
  by_kind: Mapping[str, int]
  by_dtype: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectives:
  """All collectives of one kind along the same axes, loops multiplied out.

  Attributes:
    kind: HLO's name.
    axes: Mesh axes.
    link: `fast` (NVLink, ICI) or `network` (between hosts, between slices).
    count: Executions in a step.
    asynchronous: How many of them are split into a start and a done.
    payload_bytes: Of all executions, of one device.
    wire_bytes: Sent by one device.
    seconds: The least time that the link needs for them.
    gathers: Whether these all-reduces are gathers of padded parts.
  """

  kind: str
  axes: tuple[str, ...]
  link: str
  count: int
  asynchronous: int
  payload_bytes: int
  wire_bytes: float
  seconds: float | None
  gathers: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
  """What a step takes at least, at the rates of the data sheet.

  Attributes:
    compute: Matrix products at peak rates.
    memory: Reading the arguments and writing the results, once each.
    fast_link: Collectives inside a host or a slice.
    network: Collectives between them.
    step: The largest: everything else perfectly hidden.
    tokens_per_second: Of all devices, at that time.
    mfu: Model FLOPs (causal where known) at that time over the peak rate.
  """

  compute: float
  memory: float | None
  fast_link: float | None
  network: float | None
  step: float
  tokens_per_second: float | None
  mfu: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """One experiment on one target.

  Attributes:
    experiment: Its name.
    overrides: The assignments of the command line.
    target: As it was written.
    device_kind: Our name of the hardware.
    num_devices: As JAX counts them.
    num_chips: As they are sold.
    mesh: Size of each mesh axis in use.
    batch: Shape of each array of a global batch.
    compiled: Whether the target's compiler made the program; if not, only what
      follows from shapes is here.
    memory: Of a device.
    flops: Of a step.
    collectives: Largest first; empty if not compiled.
    kernels: Executions of each custom call in a step.
    bound: `None` where the hardware's rates are not known (cpu).
    fit: Whether it fits.
    advice: The first things to change if it does not.
    findings: What the sharding lint warns of.
    notes: What is not known, and what to do about it.
    fingerprint: sha256 of the compiled program without names of source files.
    versions: Of the libraries that made it.
    compile_seconds: How long the compiler took.
  """

  experiment: str
  overrides: tuple[str, ...]
  target: str
  device_kind: str
  num_devices: int
  num_chips: int
  mesh: Mapping[str, int]
  batch: Mapping[str, tuple[int, ...]]
  compiled: bool
  memory: Memory
  flops: Flops
  collectives: tuple[Collectives, ...]
  kernels: Mapping[str, int]
  bound: Bound | None
  fit: str
  advice: tuple[str, ...]
  findings: tuple[str, ...]
  notes: tuple[str, ...]
  fingerprint: str | None
  versions: Mapping[str, str]
  compile_seconds: float | None


def to_json(plans: tuple[Plan, ...]) -> str:
  """Returns the text of `plan.json`."""
  content = {
    "version": VERSION,
    "plans": [dataclasses.asdict(plan) for plan in plans],
  }
  return json.dumps(content, indent=2) + "\n"


def from_json(text: str) -> tuple[Plan, ...]:
  """Reads `plan.json`.

  Raises:
    ValueError: It was written by another version.
  """
  content = json.loads(text)
  if content.get("version") != VERSION:
    raise ValueError(
      f"This plan has version {content.get('version')}; this program reads"
      f" version {VERSION}. Make the plan again."
    )
  return tuple(_plan(plan) for plan in content["plans"])


def _plan(fields: dict[str, Any]) -> Plan:
  bound = fields["bound"]
  return Plan(
    **fields
    | {
      "memory": Memory(**fields["memory"]),
      "flops": Flops(**fields["flops"]),
      "bound": None if bound is None else Bound(**bound),
      "batch": {k: tuple(v) for k, v in fields["batch"].items()},
      "collectives": tuple(
        Collectives(**entry | {"axes": tuple(entry["axes"])})
        for entry in fields["collectives"]
      ),
      **{
        name: tuple(fields[name])
        for name in ("overrides", "advice", "findings", "notes")
      },
    }
  )
