"""Result of a plan, as stored in `plan.json`.

The file is `{"version": 3, "plans": [PLAN, ...], "failures": [FAILURE, ...]}`;
each plan has the fields of `Plan`, each failure those of `Failure`. Bytes are
per device, FLOPs are of all devices together, times are in seconds for one
training step.
"""

from collections.abc import Mapping
import dataclasses
import enum
import json
from typing import Any, Final

VERSION: Final = 3

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
    saved: What is held from the forward pass for the backward pass, by closed
      form and by remat name; `layer inputs` is what a loop of layers carries,
      `unnamed` the rest.
    forecast: `peak`, by analytical estimate.
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
  saved: Mapping[str, int] = dataclasses.field(default_factory=dict)
  forecast: int | None = None

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
    dtype_bytes: `payload_bytes` by dtype of the elements.
    wire_bytes: Sent by one device.
    seconds: The least time that the link needs for them.
    gathers: Whether these all-reduces are gathers (padded shards).
  """

  kind: str
  axes: tuple[str, ...]
  link: str
  count: int
  asynchronous: int
  payload_bytes: int
  wire_bytes: float
  seconds: float | None
  dtype_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  gathers: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resharding:
  """Collectives of one kind that move activations inside the loop of layers.

  What tensor parallelism needs is among them: sums over its axis. Over an axis
  that splits the batch there should be none.

  Attributes:
    kind: HLO's name.
    axes: Mesh axes.
    part: Path of the linen module.
    count: Executions in a step.
    payload_bytes: Of the activations in all executions, of one device.
  """

  kind: str
  axes: tuple[str, ...]
  part: str
  count: int
  payload_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
  """Lower bound on the step time, at datasheet rates.

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
class Estimate:
  """What a step takes by simulation, with factors of a calibration.

  `step` is the sum of `compute`, `memory`, `overhead` and all of `exposed`.

  Attributes:
    step: Seconds.
    compute: Of that, in instructions that products bound.
    memory: In instructions that the memory bounds.
    overhead: Between kernels.
    exposed: Waiting for communication, by mesh axes with commas between.
    tokens_per_second: Of all devices.
    mfu: Model FLOPs (causal where known) at that time over the peak rate.
    band: The step is expected between these two multiples of `step`.
    source: Where the factors are from.
    data_sheet_step: The same simulation at datasheet rates.
    data_sheet_mfu: The MFU at that time.
    ceiling_mfu: The MFU if only matmuls took time, at peak rates; only
      recomputation, and dtypes with lower rates, are in it.
  """

  step: float
  compute: float
  memory: float
  overhead: float
  exposed: Mapping[str, float]
  tokens_per_second: float | None
  mfu: float
  band: tuple[float, float]
  source: str
  data_sheet_step: float
  data_sheet_mfu: float
  ceiling_mfu: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
  """Assignments for the command line, and what they do to a plan.

  Attributes:
    overrides: To add to the command line, such as `--fdl.mesh=fsdp=8`.
    words: The same for a reader.
    compiled: Whether the figures are those of the compiled program; if not,
      they are analytical estimates.
    fit: Whether the changed program fits.
    peak_before: Bytes of one device; `None` where it is not known.
    peak_after: The same with the change.
    recomputed_share: Of all FLOPs of the changed program.
    bound_before: `Bound.step`; by analytical estimate it counts what the mesh
      communicates by arithmetic.
    bound_after: The same with the change.
    estimate_before: Seconds of a step by the estimate, if there is one.
    estimate_after: The same with the change.
  """

  overrides: tuple[str, ...]
  words: str
  compiled: bool
  fit: str
  peak_before: int | None
  peak_after: int | None
  recomputed_share: float
  bound_before: float | None
  bound_after: float | None
  estimate_before: float | None = None
  estimate_after: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
  """Which kernel computes a part of the step.

  Attributes:
    part: What it computes: `attention forward`, `attention backward`,
      `matmuls`, `quantized matmuls` (which are among the others too), or
      `other` for kernels of the model's own.
    kernel: Our name of it, such as `cudnn`; see
      `settings.expected_kernels.KERNELS`.
    is_decided: Whether the run will have it too. What is not decided is left to
      the autotuning of the run.
    count: Executions in a step, loops multiplied out, recomputation included;
      of `plain` attention each product counts, two in a forward pass.
    dtype: Of its widest operand; empty where it is not known.
  """

  part: str
  kernel: str
  is_decided: bool
  count: int
  dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedProduct:
  """What a product that a quantization recipe covers runs as.

  Attributes:
    part: Path of the linen module that asks for it.
    product: `forward`, `forward again` (recomputed), `input gradient` or
      `weight gradient`.
    traced_dtype: Of its wider operand, in the program that is compiled.
    dtype: Of its wider operand in the compiled program; if not compiled, what
      the hardware can do.
    kernel: As of `KernelChoice`; empty if not compiled.
    is_decided: Whether the run will have it too.
    count: Executions in a step; 0 if not compiled.
    flops: Of a step, of all devices, by the program that is compiled.
    is_quantized: Whether it is multiplied in few bits, fp8 or int8.
    reason: Why it is not.
  """

  part: str
  product: str
  traced_dtype: str
  dtype: str
  kernel: str
  is_decided: bool
  count: int
  flops: int
  is_quantized: bool
  reason: str = ""


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
    kernels: Executions of each custom call, and of each fusion of a named kind,
      in a step.
    hbm_bytes: What one device reads from and writes to its memory in a step, at
      the borders of the compiled instructions; `None` if not compiled.
    compiled_flops: FLOPs of the products in the compiled text, of all devices;
      what exceeds `flops.hardware` the compiler recomputes or replicates.
    resharding: Activations that are moved between devices inside loops, the
      largest first.
    warnings: What in the compiled program costs more than it needs to.
    kernel_choices: Which kernels compute attention and matmuls.
    quantized_products: What those run as that a quantization recipe covers, in
      the order of the program.
    compiler_options: With which the run is compiled; how the plan differs, its
      notes say.
    bound: `None` where the hardware's rates are not known (cpu).
    estimate: `None` where it cannot be made; `notes` say why.
    fit: Whether it fits.
    advice: The first things to change if it does not.
    verified_changes: Of a program that does not fit, the changes that were
      compiled, the smallest that fits first; then those that do not.
    search: Of `--plan_search`, the Pareto front of time and memory, the fastest
      first.
    findings: What the sharding lint warns of.
    notes: What is not known, and what to do about it.
    fingerprint: sha256 of the compiled program without names of source files.
    versions: Of the libraries that made it.
    compile_seconds: How long the compiler took.
    made_at: When the plan was made, UTC, such as `2026-11-21T10:41:09Z`.
    is_from_cache: Whether it was taken from the cache of plans.
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
  verified_changes: tuple[Change, ...] = ()
  search: tuple[Change, ...] = ()
  estimate: Estimate | None = None
  kernel_choices: tuple[KernelChoice, ...] = ()
  quantized_products: tuple[QuantizedProduct, ...] = ()
  compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
  hbm_bytes: int | None = None
  compiled_flops: int | None = None
  resharding: tuple[Resharding, ...] = ()
  warnings: tuple[str, ...] = ()
  made_at: str = ""
  is_from_cache: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """A target of which there is no plan.

  Attributes:
    target: As it was written.
    message: Why.
  """

  target: str
  message: str


def to_json(plans: tuple[Plan, ...], failures: tuple[Failure, ...] = ()) -> str:
  """Returns the text of `plan.json`."""
  content = {
    "version": VERSION,
    "plans": [dataclasses.asdict(plan) for plan in plans],
    "failures": [dataclasses.asdict(failure) for failure in failures],
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
  bound, estimate = fields["bound"], fields["estimate"]
  return Plan(
    **fields
    | {
      "memory": Memory(**fields["memory"]),
      "flops": Flops(**fields["flops"]),
      "bound": None if bound is None else Bound(**bound),
      "estimate": None
      if estimate is None
      else Estimate(**estimate | {"band": tuple(estimate["band"])}),
      "batch": {k: tuple(v) for k, v in fields["batch"].items()},
      "collectives": tuple(
        Collectives(**entry | {"axes": tuple(entry["axes"])})
        for entry in fields["collectives"]
      ),
      "kernel_choices": tuple(
        KernelChoice(**entry) for entry in fields["kernel_choices"]
      ),
      "quantized_products": tuple(
        QuantizedProduct(**entry) for entry in fields["quantized_products"]
      ),
      **{
        name: tuple(fields[name])
        for name in ("overrides", "advice", "findings", "notes", "warnings")
      },
      "resharding": tuple(
        Resharding(**entry | {"axes": tuple(entry["axes"])})
        for entry in fields["resharding"]
      ),
      **{
        name: tuple(
          Change(**entry | {"overrides": tuple(entry["overrides"])})
          for entry in fields[name]
        )
        for name in ("verified_changes", "search")
      },
    }
  )
