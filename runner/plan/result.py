"""Result of a plan, as stored in `plan.json`.

The file is `{"version": 7, "plans": [PLAN, ...], "failures": [FAILURE, ...]}`;
plans have the fields of `Plan`, failures those of `Failure`. Bytes are per
device, FLOPs are of all devices together, times are in seconds for one
training step. Unknown values are null. Readers reject other versions.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import json
import types
import typing
from typing import Any, Final

VERSION: Final = 7

# In `Estimate.exposed`, for copies between a device and its host.
HOST: Final = "host memory"
# Above this share of usable memory, a program that fits may not fit with
# another compiler version.
TIGHT: Final = 0.9


class Fit(enum.Enum):
  """Whether a program fits in the memory of a device."""

  FITS = "fits"
  TIGHT = "fits tightly"
  DOES_NOT_FIT = "does not fit"
  UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
  """Temporary buffers of one kind that are in use at the peak.

  Attributes:
    type: Dtype and shape of each, such as `bf16[32,8,2048,4096]`.
    module: Path of the linen module; empty if unknown.
    reason: Why they exist, such as `saved for the backward pass`.
    count: How many there are.
    num_bytes: Bytes of all of them.
  """

  type: str
  module: str
  reason: str
  count: int
  num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Bytes of one device.

  Attributes:
    parameters: Trained variables.
    other_variables: The model's other variables.
    optimizer: Optimizer state, and anything else a checkpoint holds, without
      `host_optimizer`.
    batch: One batch.
    gradients: All gradients in float32, as if they existed at the same time;
      they are part of the temporaries.
    arguments: Inputs of the step, as allocated by the compiler.
    temporaries: Buffers that exist only during the step.
    peak: Largest number of bytes in use at once, arguments included.
    usable: Bytes that a program may use.
    capacity: Memory of the device.
    compiler_error: The compiler's message if the program does not fit.
    saved: Activations saved for the backward pass (analytical estimate), by
      remat name; `layer inputs` is the carry of the loop over layers.
    host_optimizer: Optimizer state in the memory of the host.
    host: All memory of the host that the compiled step uses, such as for
      offloaded activations.
    at_peak: Largest temporary buffers at the peak, largest first.
    inputs: Of a planned function, by argument; the sizes of variables, batch
      and gradients are then not known, and 0.
  """

  parameters: int = 0
  other_variables: int = 0
  optimizer: int = 0
  batch: int = 0
  gradients: int = 0
  arguments: int | None = None
  temporaries: int | None = None
  peak: int | None = None
  usable: float | None = None
  capacity: float | None = None
  compiler_error: str | None = None
  saved: Mapping[str, int] = dataclasses.field(default_factory=dict)
  host_optimizer: int = 0
  host: int | None = None
  at_peak: tuple[Buffers, ...] = ()
  inputs: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def state_and_batch(self) -> int:
    """Bytes of the step's inputs, computed from shapes."""
    variables = self.parameters + self.other_variables + self.optimizer
    return variables + self.batch + sum(self.inputs.values())

  @property
  def fit(self) -> Fit:
    """Whether the program fits; without a compiler, only a no is certain."""
    if self.compiler_error is not None:
      return Fit.DOES_NOT_FIT
    if self.usable is None:
      return Fit.UNKNOWN
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
    model: Without recomputation and pipeline bubbles; attention counts every
      key for every query.
    causal_model: `model` without keys that a causal mask hides; `None` if the
      batch has no sequence length.
    hardware: All executed FLOPs, recomputation included.
    recomputed: Recomputed in the backward pass (remat), without bubbles.
    bubble: Executed by pipeline stages that have no microbatch: `hardware`
      without `model` and `recomputed`.
    by_module: `hardware` by path of the linen module.
    by_dtype: `hardware` by dtype of the operands.
  """

  model: int
  causal_model: float | None
  hardware: int
  recomputed: int
  bubble: int = 0
  by_module: Mapping[str, int]
  by_dtype: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectives:
  """All collectives of one kind over the same mesh axes.

  Attributes:
    kind: HLO opcode.
    axes: Mesh axes.
    link: `fast` (NVLink, ICI) or `network` (between hosts or slices).
    count: Executions in a step, loops multiplied out.
    asynchronous: How many of them have separate start and done operations.
    payload_bytes: Full arrays, such as the results of all-gathers, summed over
      all executions.
    wire_bytes: Sent by one device.
    seconds: Least time at the full bandwidth of the link.
    dtype_bytes: `payload_bytes` by dtype.
    module_bytes: `payload_bytes` by path of the linen module.
    gathers: Whether these all-reduces gather padded shards.
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
  module_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  gathers: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
  """Roofline lower bound on the step time, at datasheet rates.

  Attributes:
    compute: Matmuls at peak rates.
    memory: Reading each argument and writing each result once.
    fast_link: Collectives inside a host or a slice; `None` if unknown, so
      `step` is without communication.
    network: Collectives between hosts or slices; `None` like `fast_link`.
    step: The largest of these, as if they fully overlapped.
    tokens_per_second: On all devices.
    mfu: Model FLOPs (causal if known) over the peak rate times `step`.
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
  """Simulated step time, with efficiency factors.

  `step` is the sum of `compute`, `memory`, `overhead` and all of `exposed`.

  Attributes:
    step: Seconds of a step.
    compute: Instructions limited by matmuls.
    memory: Instructions limited by memory bandwidth.
    overhead: Gaps between kernels.
    exposed: Waiting for collectives, by comma-separated mesh axes, and for
      copies between the device and its host (`HOST`).
    tokens_per_second: On all devices.
    mfu: Model FLOPs (causal if known) over the peak rate times `step`.
    band: Expected range of the step, as multiples of `step`.
    source: Source of the efficiency factors.
    slowdown: Multiple that `step` is of the simulated time, for what the
      simulation lacks: load, slow hosts, casts to 8 bits.
    datasheet_step: `step`, simulated at datasheet rates.
    datasheet_mfu: MFU at `datasheet_step`.
    ceiling_mfu: MFU if only matmuls took time, at peak rates; it is below 1
      because of recomputation and of dtypes with lower rates.
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
  slowdown: float
  datasheet_step: float
  datasheet_mfu: float
  ceiling_mfu: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingCost:
  """Time and price of training on a number of tokens (`--plan_tokens`).

  Attributes:
    tokens: Tokens to train on.
    days: Duration.
    device_hours: Chips (GPUs) times hours.
    money: Price, in the currency of `--plan_price`; `None` without a price.
    is_lower_bound: Whether all are computed from `Bound.step`, for lack of an
      estimate.
  """

  tokens: float
  days: float
  device_hours: float
  money: float | None = None
  is_lower_bound: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherProgram:
  """Memory of a part of a run other than the training step.

  Attributes:
    name: `evaluation`, `evaluation of SPLIT`, `decoding` or `saving`.
    temporaries: Temporary bytes of one device; `None` if unknown.
    peak: Peak bytes of one device during training: the program's, and the
      optimizer state that stays in memory.
    host: Bytes in the memory of a host.
    note: Reason for unknown values.
  """

  name: str
  temporaries: int | None = None
  peak: int | None = None
  host: int | None = None
  note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
  """A decoding step, of a token for each sequence; bytes of one device.

  Attributes:
    batch: Number of sequences, over all devices.
    length: Number of slots of the cache of a sequence.
    parameters: The model's variables.
    cache: The cache.
    read: Bytes that a step reads at least: variables, cache, of an embedding
      table only the rows that are looked up.
    peak: Largest number of bytes in use at once; None if not compiled.
    fit: Whether it fits; see `Memory`.
    bound: Roofline lower bound on the step time.
    estimate: Of the step time.
    note: Why there is no plan, or what the compiler rejects.
  """

  batch: int
  length: int
  parameters: int | None = None
  cache: int | None = None
  read: int | None = None
  peak: int | None = None
  fit: str = Fit.UNKNOWN.value
  bound: Bound | None = None
  estimate: Estimate | None = None
  note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
  """Overrides for the command line, and what they make of a program.

  Attributes:
    overrides: To add to the command line, such as `--fdl.mesh=fsdp=8`.
    words: Description of the change.
    compiled: Whether the values are those of a compiled program, not
      analytical estimates.
    fit: Whether the changed program fits.
    peak: Peak bytes of one device.
    recomputed_share: Share of the changed program's FLOPs.
    bound: `Bound.step` of the changed program.
    estimate: `Estimate.step` of the changed program.
    reason: Why it is not the best, such as `does not fit in 118.18 GiB`.
  """

  overrides: tuple[str, ...]
  words: str
  compiled: bool
  fit: str
  peak: int | None
  recomputed_share: float
  bound: float | None
  estimate: float | None = None
  reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
  """Kernel that computes attention or matmuls.

  Attributes:
    part: `attention forward`, `attention backward`, `matmuls`, `quantized
      matmuls` (also counted in the others), `grouped matmuls`, or `other` for
      the model's own.
    kernel: Name, such as `cudnn`; see `settings.expected_kernels.KERNELS`.
    is_final: Whether the run uses the same kernel. If not, autotuning chooses
      it when the run starts.
    count: Executions in a step, loops multiplied out, recomputation included.
      `plain` attention counts its matmuls, two per layer in a forward pass.
    dtype: Dtype of the widest operand; empty if unknown.
  """

  part: str
  kernel: str
  is_final: bool
  count: int
  dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatmul:
  """Compiled form of a matmul that a quantization recipe covers.

  Attributes:
    module: Path of the linen module.
    role: `forward`, `forward again` (recomputed), `input gradient` or
      `weight gradient`.
    traced_dtype: Dtype of its wider operand before compilation.
    dtype: Dtype of its wider operand in the compiled program; if not compiled,
      the widest that the hardware supports.
    kernel: Name, as in `KernelChoice`; empty if not compiled.
    is_final: Whether the run uses the same kernel.
    count: Executions in a step; 0 if not compiled.
    flops: FLOPs of a step on all devices.
    is_quantized: Whether its operands are fp8 or int8.
    reason: Why they are not.
  """

  module: str
  role: str
  traced_dtype: str
  dtype: str
  kernel: str
  is_final: bool
  count: int
  flops: int
  is_quantized: bool
  reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """One experiment on one target.

  Attributes:
    experiment: Name, as in `--exp`.
    overrides: Overrides of the command line.
    target: Target, as in `--target`.
    device_kind: Name in the hardware table.
    num_devices: JAX devices.
    num_chips: Chips (GPUs).
    mesh: Size of each mesh axis larger than 1.
    batch: Shape of each array of a global batch.
    compiled: Whether the program was compiled for the target. If not, only
      what follows from shapes is known.
    memory: Bytes of a device.
    flops: FLOPs of a step.
    collectives: Largest first; empty if not compiled.
    kernels: Executions in a step of each custom call, and of each fusion with
      a named kind.
    bound: `None` if the hardware's rates are unknown (cpu).
    fit: Value of `memory.fit`.
    advice: Changes to try first if the program does not fit.
    findings: Warnings of the sharding lint.
    notes: Unknown or uncertain values, and the reasons.
    fingerprint: sha256 of the compiled program without source file names.
    versions: Versions of JAX and of the compilers.
    compile_seconds: Time of the compiler.
    verified_changes: Compiled changes of a program that does not fit: first
      the smallest that fits, then those that do not.
    search: Result of `--plan_search`: compiled layouts that fit, the best
      first; those that do not; some that were not compiled.
    num_layouts: Layouts that the search chose from.
    estimate: `None` if it cannot be made; `notes` give the reason.
    training_cost: Result of `--plan_tokens`.
    num_parameters: Trained parameters of the whole model; `None` if unknown.
    other_programs: Memory of evaluation, decoding and saving.
    decode_steps: Decoding steps that were asked for.
    kernel_choices: Kernels of attention and matmuls.
    quantized_matmuls: Matmuls covered by a quantization recipe, in program
      order.
    compiler_options: XLA options of the run; `notes` list those that differ in
      the plan.
    hbm_bytes: Bytes that one device reads and writes in a step, at the
      boundaries of compiled instructions; `None` if not compiled.
    compiled_flops: FLOPs of the matmuls in the compiled program, on all
      devices. The compiler recomputes or replicates any excess over
      `flops.hardware`.
    warnings: Avoidable costs in the compiled program.
    made_at: UTC time, such as `2026-11-21T10:41:09Z`.
    is_from_cache: Whether the plan comes from the cache.
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
  num_layouts: int = 0
  estimate: Estimate | None = None
  training_cost: TrainingCost | None = None
  num_parameters: int | None = None
  other_programs: tuple[OtherProgram, ...] = ()
  decode_steps: tuple[DecodeStep, ...] = ()
  kernel_choices: tuple[KernelChoice, ...] = ()
  quantized_matmuls: tuple[QuantizedMatmul, ...] = ()
  compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
  hbm_bytes: int | None = None
  compiled_flops: int | None = None
  warnings: tuple[str, ...] = ()
  made_at: str = ""
  is_from_cache: bool = False

  @property
  def tokens_per_batch(self) -> int | None:
    """Tokens of a global batch; `None` if it has no [batch, length] inputs."""
    shape = self.batch.get("inputs", ())
    return shape[0] * shape[1] if len(shape) == 2 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """A target that could not be planned.

  Attributes:
    target: Target, as in `--target`.
    message: The error.
  """

  target: str
  message: str


def to_json(plans: Sequence[Plan], failures: Sequence[Failure] = ()) -> str:
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
    ValueError: Another version wrote it.
  """
  content = json.loads(text)
  if content.get("version") != VERSION:
    raise ValueError(
      f"This plan has version {content.get('version')}; this program reads"
      f" version {VERSION}. Make the plan again."
    )
  return tuple(decode(Plan, plan) for plan in content["plans"])


def decode(kind: Any, value: Any) -> Any:
  """Returns a value of a type, from JSON.

  Args:
    kind: A dataclass, `tuple[X, ...]`, `tuple[X, Y]`, `Mapping[str, X]`,
      `X | None`, or a type that JSON has.
    value: Output of `json.loads`, for dataclasses the dictionary of
      `dataclasses.asdict`.
  """
  if dataclasses.is_dataclass(kind):
    hints = typing.get_type_hints(kind)
    return kind(**{name: decode(hints[name], v) for name, v in value.items()})
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is tuple:
    kinds = args if args[-1] is not ... else args[:1] * len(value)
    return tuple(map(decode, kinds, value))
  if origin is Mapping:
    return {key: decode(args[1], v) for key, v in value.items()}
  if origin is types.UnionType and value is not None:
    return decode(args[0], value)
  return value
