"""Analytical estimates of layouts, by arithmetic on shapes and shardings.

A layout is a mesh, a remat level, a number of microbatches and a kind of
attention kernel. The bytes of its state are exact. Its step time and its memory
only put layouts in order for a search: the compiler decides what fits.

  step    = compute + exposed communication
  compute = FLOPs at datasheet rates, with recomputation, without the half that
            a causal kernel skips, plus reading and writing the logits where no
            fused kernel keeps them out of memory
  fsdp, data      hidden behind up to 90 % of the compute: a kernel is gathered
                  in the forward and in the backward pass, and its gradient is
                  scattered; a replicated kernel's gradient is reduced
  tensor, expert,
  sequence        exposed: activations are reduced or exchanged in each layer
                  before the next matmul can start

Of n devices each sends (n - 1) / n of what it gathers or scatters and twice
that of what it reduces, in each microbatch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import enum
import functools
import math
from typing import Final, TypeVar

from paxon.runner.plan import network
from paxon.runner.plan import target as targets
from paxon.sharding import axes, lint, rule_sets, variables
from paxon.sharding import mesh as mesh_lib
from paxon.sharding import rules as rules_lib

_HIDDEN: Final = 0.9
# Share of asynchronous communication that is exposed at the ends of loops.
_ENDS: Final = 0.05
# Estimates within this factor are equal; then the smaller memory wins.
_EQUAL: Final = 1.02
_ROWS: Final = (axes.BATCH, axes.LENGTH)
# Largest share of padding in the work of an axis that a search considers.
_MOST_PADDING: Final = 0.02
# Slots of an exchange of tokens, divided by the choices (`Dropless.bound`).
BOUND: Final = 1.5


class Remat(enum.Enum):
  """Values that a layer saves for its backward pass, besides its input."""

  ALL = "everything"
  PROJECTIONS_AND_RESIDUALS = "outputs of matmuls with kernels, and residuals"
  PROJECTIONS = "outputs of matmuls with kernels"
  INPUTS_AND_RESIDUALS = "inputs and residuals of a fused attention kernel"
  ATTENTION = "inputs and outputs of attention"
  CONTEXT = "outputs of attention"
  RESIDUALS = "residuals of a fused attention kernel"
  NOTHING = "nothing"


class Attention(enum.Enum):
  """Kinds of attention kernels by their FLOPs and memory."""

  PLAIN = "all logits, in memory"
  FUSED = "all logits, in registers"
  CAUSAL = "unmasked logits, in registers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Layout of a job: the values that a search varies.

  Attributes:
    mesh: As it is typed.
    remat: Policy of the values that layers save.
    microbatches: Gradient accumulation: microbatches of a batch.
    attention: The kind of kernel.
    rules: Name of a rule set; empty for the rules of the job.
    is_exchanged: Whether tokens reach sharded experts by all-to-all, instead of
      being gathered.
    is_offloaded: Whether the optimizer state is in host memory.
  """

  mesh: str
  remat: Remat = Remat.NOTHING
  microbatches: int = 1
  attention: Attention = Attention.FUSED
  rules: str = ""
  is_exchanged: bool = False
  is_offloaded: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """Analytical estimates of a layout, for an order.

  Attributes:
    step: Seconds; bytes sent where the hardware's rates are not known.
    state: Bytes of state and batch on a device; exact.
    peak: Bytes in use at most.
  """

  step: float
  state: int
  peak: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """FLOPs of a step without recomputation, of all devices.

  Attributes:
    model: All, every key of every query counted.
    attention: FLOPs between queries and keys.
    itemsize: Bytes of an element as it is computed with.
    loss_chunk: Tokens of a sequence whose logits are computed at once; 0 for
      all.
  """

  model: float
  attention: float
  itemsize: int = 2
  loss_chunk: int = 0


_T = TypeVar("_T")


def rank(
  items: Iterable[_T],
  *,
  step: Callable[[_T], float],
  memory: Callable[[_T], float],
) -> list[_T]:
  """Returns items by step time; those within 2 % of each other by memory.

  Args:
    items: Any.
    step: Their step time.
    memory: Their memory.
  """
  rest = sorted(items, key=lambda item: (step(item), memory(item)))
  found: list[_T] = []
  while rest:
    most = _EQUAL * step(rest[0])
    number = sum(1 for item in rest if step(item) <= most)
    found += sorted(rest[:number], key=memory)
    rest = rest[number:]
  return found


class Layouts:
  """The layouts of one job on one target."""

  def __init__(
    self,
    *,
    specs: Iterable[variables.VariableSpec],
    state: Iterable[variables.VariableSpec],
    batch: Mapping[str, Sequence[int]],
    rules: rules_lib.Rules,
    target: targets.Target,
    work: Work | None = None,
    choices: int = 2,
    optimizer: Iterable[variables.VariableSpec] = (),
  ) -> None:
    """Reads shapes.

    Args:
      specs: Of the model's variables.
      state: Of all arrays of the training state; those in host memory do not
        count.
      batch: Shapes of a global batch; arrays have four bytes an element.
      rules: From logical axes to mesh axes.
      target: The devices.
      work: FLOPs of a step, if they are known; by default they follow from the
        kernels' shapes.
      choices: Experts of a token.
      optimizer: The part of `state` that can be in host memory.
    """
    self.specs = list(specs)
    self.kernels = [s for s in self.specs if _is_kernel(s)]
    self.state = [spec for spec in state if not spec.on_host]
    self.batch = {name: tuple(shape) for name, shape in batch.items()}
    self.rows = max(self.batch.values(), key=len)[:2]
    self.rules = rules
    self.target = target
    self.choices = choices
    self.optimizer = [spec for spec in optimizer if not spec.on_host]
    self.work = work or self._estimate_work()
    # Only some hundred of thousands of layouts differ in the mesh.
    self._of_mesh = functools.cache(functools.partial(_Mesh, self))

  @property
  def usable_axes(self) -> tuple[str, ...]:
    """Mesh axes that split some work and that a search may vary."""
    named = {name for spec in self.specs for name in spec.axes}
    found = {axes.DATA, axes.FSDP, axes.TENSOR, axes.SEQUENCE}
    if axes.EXPERTS in named:
      found.add(axes.EXPERT)
    return tuple(a for a in self.working_axes if a in found)

  @property
  def working_axes(self) -> tuple[str, ...]:
    """Mesh axes that split some work of the model."""
    named = {name for spec in self.specs for name in spec.axes}
    wanted = {
      axis
      for logical, entry in self.rules
      for axis in rules_lib.as_tuple(entry)
      if logical in (*_ROWS, *named)
    }
    return tuple(a for a in axes.MESH_AXES if a in wanted)

  def is_possible(
    self, mesh: str, *, microbatches: int, rules: str = ""
  ) -> bool:
    """Whether all sizes divide and every axis splits some work."""
    found = self._of_mesh(mesh, rules)
    return found.is_sound and not self.rows[0] % (
      found.shards(axes.BATCH) * microbatches
    )

  def state_bytes(self, mesh: str, rules: str = "") -> int:
    """Returns the bytes of state and batch on a device."""
    return self._of_mesh(mesh, rules).state

  def optimizer_bytes(self, mesh: str, rules: str = "") -> int:
    """Returns the bytes of state on a device that can be in host memory."""
    return self._of_mesh(mesh, rules).optimizer

  def whole_state_bytes(self) -> int:
    """Returns the bytes of the state, not split."""
    return sum(_bytes(spec) for spec in self.state)

  def predict(self, layout: Layout) -> Prediction:
    """Returns the analytical estimates of a layout."""
    mesh, work = self._of_mesh(layout.mesh, layout.rules), self.work
    kind = self.target.hardware
    again = _RECOMPUTED[layout.remat]
    compute = 0.0
    peak_rate = kind.peak_flops()
    is_plain = layout.attention is Attention.PLAIN
    if peak_rate is not None:
      visible = 0.5 if layout.attention is Attention.CAUSAL else 1.0
      attention_again = again.plain if is_plain else again.fused
      matmuls = (work.model - work.attention) * (1 + again.matmuls / 3)
      attention = visible * work.attention * (1 + attention_again / 3)
      compute = (matmuls + attention) / mesh.workers / peak_rate
      if is_plain and kind.memory_bandwidth is not None:
        passes = 8 + 4 * attention_again
        compute += passes * mesh.logits / kind.memory_bandwidth
    overlapped = layout.microbatches * mesh.overlapped
    # The recomputed forward pass ends before its last matmul.
    exposed = mesh.exposed
    exposed += mesh.exchanged if layout.is_exchanged else mesh.routed
    exposed *= 2 + again.matmuls * 0.75
    offloaded = mesh.optimizer if layout.is_offloaded else 0
    if kind.host_bandwidth is not None:
      exposed += 2 * offloaded / kind.host_bandwidth
    late = max(overlapped - _HIDDEN * compute, _ENDS * overlapped)
    return Prediction(
      step=compute + exposed + late,
      state=mesh.state - offloaded,
      peak=mesh.state - offloaded + mesh.temporaries(layout),
    )

  def _estimate_work(self) -> Work:
    """FLOPs by the shapes of the kernels: 6 a weight and token."""
    tokens = math.prod(self.rows)
    length = self.rows[1] if len(self.rows) > 1 else 1
    weights = attention = 0.0
    for spec in self.kernels:
      share = 1.0
      if axes.EXPERTS in spec.axes:
        experts = spec.shape[spec.axes.index(axes.EXPERTS)]
        share = min(1.0, self.choices / experts)
      weights += share * math.prod(spec.shape)
      if axes.HEADS in spec.axes and _is_output(spec):
        # The width of all heads, once a layer.
        attention += _layers(spec) * _width_in(spec) * 2 * length
    dense = 6.0 * tokens * weights
    attention = 6.0 * tokens * attention
    return Work(model=dense + attention, attention=attention)


class _Mesh:
  """Sizes and costs of a job on one mesh.

  Attributes:
    is_sound: Whether the sharding lint has no error, no idle axis and little
      padding, and the mesh can be placed on the target.
    state: Bytes of state and batch on a device.
    workers: Devices that share the work.
    logits: Bytes of all attention logits of a step on a device, in float32.
    overlapped: Seconds of communication of kernels, for each microbatch.
    exposed: Seconds of communication of activations, for each pass of a step.
    routed: Seconds of gathering tokens for experts, for each pass.
    exchanged: The same if tokens are exchanged.
    optimizer: Bytes of the state on a device that can be in host memory.
  """

  def __init__(self, of: Layouts, text: str, rules: str) -> None:
    target, rows = of.target, of.rows
    spec = mesh_lib.MeshSpec.parse(text).resolve(target.num_devices)
    self._rules = rule_sets.find_rules(rules) if rules else of.rules
    self._kernels, self._work = of.kernels, of.work
    self._choices = of.choices
    self.sizes = {a: spec.ici[a] * spec.dcn[a] for a in axes.MESH_AXES}
    found = lint.check(
      of.specs, batch=of.batch, mesh=self.sizes, rules=self._rules
    )
    self.is_sound = not any(
      f.is_error
      or f.rule is lint.Rule.WORK_NOT_SHARED
      or f.padding > _MOST_PADDING
      for f in found
    )
    self._links = network.links(target.hardware)
    self._placement: network.Placement | None = None
    has_errors = any(f.is_error for f in found)
    if not has_errors and self._links is not None:
      try:
        self._placement = network.place_mesh(target, spec)
      except (ValueError, NotImplementedError):
        # JAX cannot lay these axes along the sides of the slice.
        self.is_sound = False
    if has_errors:
      return
    self.state = sum(_bytes(s) // self.shards(*s.axes) for s in of.state)
    self.optimizer = sum(
      _bytes(s) // self.shards(*s.axes) for s in of.optimizer
    )
    self.state += sum(
      4 * math.prod(shape) // self.shards(*_ROWS[: len(shape)])
      for shape in of.batch.values()
    )
    self.workers = math.prod(self.sizes.values())
    self._tokens = math.prod(rows) / self.shards(*_ROWS[: len(rows)])
    self._length = rows[1] if len(rows) > 1 else 1
    self.logits = 4.0 * of.work.attention / 12
    self.logits /= _head_dim(of.kernels) * self.workers
    self.overlapped = self.exposed = self.routed = self.exchanged = 0.0
    for kernel in of.kernels:
      self._add_kernel(kernel)

  def shards(self, *names: str | None) -> int:
    """Returns the number of shards of an array with these axes."""
    return math.prod(
      self.sizes[axis] for split in self._split(names) for axis in split
    )

  def temporaries(self, layout: Layout) -> int:
    """Returns about how many bytes the step adds to its arguments."""
    tokens = self._tokens / layout.microbatches
    size = self._work.itemsize
    gradients = total = block = 0.0
    widths = dict.fromkeys(Remat, 0.0)
    num_layers = max(map(_layers, self._kernels), default=1)
    for kernel in self._kernels:
      gathered, kept = self._split_by_use(kernel)
      local = math.prod(kernel.shape) / math.prod(
        self.sizes[a] for a in (*gathered, *kept)
      )
      gradients += 4 * local
      layers = _layers(kernel)
      if axes.VOCAB in kernel.axes:
        parts = self.shards(axes.VOCAB)
        vocab = kernel.shape[kernel.axes.index(axes.VOCAB)] / parts
        part = self._work.loss_chunk or self._length
        block = max(block, 8 * vocab * tokens * part / self._length)
        continue
      # Two layers' kernels: one in use, one on its way.
      total += (
        2 * size * local / layers * math.prod(self.sizes[a] for a in gathered)
      )
      out = self._width_out(kernel) / (
        1 if _is_output(kernel) else self._parts(kept)
      )
      each = layers * out
      rows = self._spread(kernel, kept, layout)
      widths[Remat.ALL] += 2 * each * rows
      widths[Remat.PROJECTIONS] += each
      widths[Remat.PROJECTIONS_AND_RESIDUALS] += each
      if axes.HEADS in kernel.axes and _is_output(kernel):
        context = layers * _width_in(kernel) / self._parts(kept)
        widths[Remat.CONTEXT] += context
        widths[Remat.RESIDUALS] += context
        widths[Remat.PROJECTIONS_AND_RESIDUALS] += context
        widths[Remat.ATTENTION] += context
        widths[Remat.INPUTS_AND_RESIDUALS] += context
      elif {axes.HEADS, axes.KV_HEADS} & {*kernel.axes}:
        widths[Remat.ATTENTION] += each
        widths[Remat.INPUTS_AND_RESIDUALS] += each
    inputs = _embed(self._kernels) / self.shards(axes.ACTIVATION_EMBED)
    # Tokens between layers may be split more.
    inputs *= self.shards(axes.LENGTH) / self.shards(axes.ACTIVATION_LENGTH)
    saved = widths[layout.remat] + num_layers * inputs
    working = 2 * widths[Remat.ALL] / num_layers
    logits = 0.0
    if layout.attention is Attention.PLAIN:
      logits = self.logits / layout.microbatches
      if layout.remat is not Remat.ALL:
        logits /= num_layers
      logits *= 1.5
    activations = size * tokens * (saved + working) + logits
    accumulators = gradients if layout.microbatches > 1 else 0.0
    return round(
      total + accumulators + max(activations + gradients / 2, gradients) + block
    )

  def _add_kernel(self, kernel: variables.VariableSpec) -> None:
    gathered, kept = self._split_by_use(kernel)
    size, sizes = self._work.itemsize, self.sizes
    sharing = {a for split in self._split(_ROWS) for a in split}
    part = size * math.prod(kernel.shape) / math.prod(sizes[a] for a in kept)
    for axis in gathered:
      # Two gathers, and the scatter of the gradient.
      sent = (2 + (axis in sharing)) * part * _others(sizes[axis])
      self.overlapped += self._seconds(axis, sent)
      part /= sizes[axis]
    for axis in sorted(sharing - {*gathered, *kept}):
      self.overlapped += self._seconds(axis, 2 * part * _others(sizes[axis]))
    layers = _layers(kernel)
    activations = layers * size * self._tokens
    # A table split by words gives each token's sum, too.
    if kernel.axes[-1] == axes.EMBED:
      for axis in kept:
        n = sizes[axis]
        width = _embed([kernel])
        if axis == axes.EXPERT:
          # To the experts and back; sums of gathered tokens are in float32.
          sent = (1 + 4 / size) * (n - 1) * activations * width
          self.routed += self._seconds(axis, sent)
          sent = 2 * BOUND * self._choices * activations * width * _others(n)
          self.exchanged += self._seconds(axis, sent)
        else:
          sent = 2 * activations * width * _others(n)
          self.exposed += self._seconds(axis, sent)
    if axes.KV_HEADS in kernel.axes:
      for axis in self._split((axes.BATCH, axes.LENGTH))[1]:
        width = self._width_out(kernel) / self._parts(kept)
        sent = (sizes[axis] - 1) * activations * width
        self.exposed += self._seconds(axis, sent)

  def _spread(
    self, kernel: variables.VariableSpec, kept: Iterable[str], layout: Layout
  ) -> float:
    """Returns rows that a kernel has room for, divided by those it uses."""
    if axes.EXPERTS not in kernel.axes or axes.EXPERT not in kept:
      return 1.0
    if layout.is_exchanged:
      return BOUND
    devices = self.sizes[axes.EXPERT]
    experts = kernel.shape[kernel.axes.index(axes.EXPERTS)] // devices
    return devices * min(1.0, experts / self._choices)

  def _width_out(self, spec: variables.VariableSpec) -> int:
    """Elements of a token that a kernel gives."""
    if _is_output(spec):
      return _embed([spec])
    return (self._choices if axes.EXPERTS in spec.axes else 1) * _width_in(spec)

  def _parts(self, kept: Iterable[str]) -> int:
    """Shards of a kernel's activation, without those of tokens."""
    return math.prod(self.sizes[a] for a in kept if a != axes.EXPERT)

  def _seconds(self, axis: str, sent: float) -> float:
    """Seconds; the bytes themselves where rates are not known."""
    if self._links is None:
      return sent
    if self._placement is None:
      return sent / self._links.fast
    members = network.group(self.sizes, (axis,))
    rate = network.bandwidth(members, self._placement, self._links)
    return sent / (rate or self._links.fast)

  def _split(self, names: Sequence[str | None]) -> list[tuple[str, ...]]:
    """Mesh axes in use that split each dimension."""
    spec = rules_lib.to_partition_spec(names, rules=self._rules)
    return [
      tuple(a for a in rules_lib.as_tuple(entry) if self.sizes[a] > 1)
      for entry in spec
    ]

  def _split_by_use(
    self, spec: variables.VariableSpec
  ) -> tuple[list[str], list[str]]:
    """Mesh axes along which a kernel is gathered to be used, and the others.

    It stays split where its activation is split alike.
    """
    gathered: list[str] = []
    kept: list[str] = []
    wanted: Mapping[str, rules_lib.MeshAxes] = dict(reversed(self._rules))
    for name, split in zip(spec.axes, self._split(spec.axes), strict=True):
      activation = rules_lib.as_tuple(wanted.get(f"activation_{name}"))
      for axis in split:
        (kept if axis in activation else gathered).append(axis)
    return gathered, kept


@dataclasses.dataclass(frozen=True)
class _Recomputed:
  """Shares of a forward pass that are computed again.

  Attributes:
    matmuls: Of those with kernels.
    plain: Of plain attention.
    fused: Of a fused attention kernel.
  """

  matmuls: float
  plain: float
  fused: float


_RECOMPUTED: Final = {
  Remat.ALL: _Recomputed(0.0, 0.0, 0.0),
  Remat.PROJECTIONS: _Recomputed(0.0, 1.0, 1.0),
  Remat.INPUTS_AND_RESIDUALS: _Recomputed(0.8, 1.0, 0.0),
  Remat.ATTENTION: _Recomputed(0.8, 1.0, 1.0),
  Remat.CONTEXT: _Recomputed(1.0, 1.0, 1.0),
  Remat.RESIDUALS: _Recomputed(1.0, 1.0, 0.0),
  Remat.PROJECTIONS_AND_RESIDUALS: _Recomputed(0.0, 1.0, 0.0),
  Remat.NOTHING: _Recomputed(1.0, 1.0, 1.0),
}


def _is_kernel(spec: variables.VariableSpec) -> bool:
  return (
    spec.update is variables.UpdateRule.OPTIMIZER
    and len(spec.layer_shape) > 1
    and axes.EMBED in spec.axes
  )


def _is_output(spec: variables.VariableSpec) -> bool:
  """Whether a kernel ends in the residual stream."""
  return spec.axes[-1] == axes.EMBED and axes.VOCAB not in spec.axes


def _layers(spec: variables.VariableSpec) -> int:
  return math.prod(spec.shape[: len(spec.stacked)])


def _embed(specs: Iterable[variables.VariableSpec]) -> int:
  return max((s.shape[s.axes.index(axes.EMBED)] for s in specs), default=0)


def _width_in(spec: variables.VariableSpec) -> int:
  """Elements of a token that an output kernel multiplies."""
  names = spec.axes[len(spec.stacked) :]
  return math.prod(
    n
    for name, n in zip(names, spec.layer_shape, strict=True)
    if name not in (axes.EMBED, axes.EXPERTS, axes.STAGES)
  )


def _head_dim(kernels: Iterable[variables.VariableSpec]) -> int:
  for spec in kernels:
    for name in (axes.HEADS, axes.KV_HEADS):
      if name in spec.axes and axes.HEAD_DIM in spec.axes:
        return spec.shape[spec.axes.index(axes.HEAD_DIM)]
  return 128


def _bytes(spec: variables.VariableSpec) -> int:
  return math.prod(spec.shape) * spec.dtype.itemsize


def _others(size: int) -> float:
  return (size - 1) / size
