"""Warnings about avoidable costs in a compiled program.

Each names the part of the model, sizes and counts of one device and step, and
what to change. Small things are silent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses

from paxon.runner import units
from paxon.runner.plan.program_text import (
  collectives,
  costs,
  dataflow,
  gathers,
  hlo,
  kernels,
  movements,
  name_stack,
)
from paxon.sharding import axes

# Below this many bytes in a step, and this share of all that collectives move,
# a finding is not worth a line.
_SMALL = 2.0**20
_LITTLE = 0.001
# Shares of all FLOPs below which an odd dtype is not worth one.
_FEW = 0.01
# Share of the memory traffic below which copies of a loop are not worth one.
_COPIED = 0.05
# Ratio of compiled FLOPs to the jaxpr's. Below, matmuls are missing in one of
# them; above, the compiler recomputes much, or the text was misread.
RATIO = (0.999, 1.02)
_TWICE = 1.5
# How to have a compiler for GPUs recompute nothing.
_KEEP_ALL = (
  " If memory is left, try compiler_options="
  '{"xla_disable_hlo_passes": "rematerialization"}.'
)

_SLICES = ("/dynamic_slice", "/dynamic_update_slice")

_Activations = dataflow.Data.ACTIVATIONS
_Gradients = dataflow.Data.GRADIENTS
_Weights = dataflow.Data.WEIGHTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """Program to lint.

  Attributes:
    program: The compiled training step of one device.
    moved: Movements of its collectives.
    total: Its costs.
    kernels: Executions of each kernel.
    batch_axes: Mesh axes over which the batch is split.
    platform: `cpu`, `cuda` or `tpu`.
  """

  program: hlo.Program
  moved: Sequence[movements.Movement]
  total: costs.Costs
  kernels: Mapping[str, int]
  batch_axes: Sequence[str]
  platform: str

  @property
  def least(self) -> float:
    """Bytes in a step that are worth a warning."""
    return max(_SMALL, _LITTLE * _total(self.moved))


def check(subject: Subject) -> tuple[str, ...]:
  """Returns all warnings, those on communication first."""
  # The compiler for CPUs splits no collective and scatters no gradient, and it
  # computes bfloat16 in float32; that says nothing about the experiment.
  rules = _RULES if subject.platform == "cpu" else (*_RULES, *_FOR_HARDWARE)
  return tuple(text for rule in rules for text in rule(subject))


def recomputation(
  compiled: Mapping[str, int],
  traced: Mapping[str, int],
  *,
  stages: int = 1,
  platform: str = "",
) -> str | None:
  """Returns a warning if the compiled program does not do what was traced.

  Args:
    compiled: FLOPs of its matmuls on all devices, by part of the model.
    traced: The same of the jaxpr.
    stages: Stages of a pipeline.
    platform: `cpu`, `cuda` or `tpu`.

  Returns:
    The warning, or None if the ratio of the sums is within `RATIO`.
  """
  if not sum(traced.values()):
    return None
  ratio = sum(compiled.values()) / sum(traced.values())
  if RATIO[0] <= ratio <= RATIO[1]:
    return None
  if ratio < 1:
    return (
      f"The compiled program has {ratio:.3f} of the FLOPs that were traced: the"
      " compiler rewrote some matmuls, or a kernel's FLOPs are"
      " not known. Do not trust times."
    )
  excess = {part: compiled.get(part, 0) - traced[part] for part in traced}
  worst = max(excess, key=excess.__getitem__)
  where = ""
  if excess[worst] > 0:
    times = compiled[worst] / traced[worst]
    if stages > 1 and RATIO[0] <= times / stages <= RATIO[1]:
      return (
        f"The compiled program does {ratio:.3f} of the FLOPs that were traced:"
        f" each of the {stages} stages computes {worst or 'the rest'}"
        f" ({excess[worst] / 1e12:.3g} TFLOP more). Set stream_io=True, which"
        " splits batches over the stages outside of the pipeline."
      )
    where = f", {worst or 'code outside any module'} {times:.2f} times"
  if ratio < _TWICE:
    option = _KEEP_ALL if platform == "cuda" else ""
    return (
      f"The compiled program does {ratio:.3f} of the FLOPs that were traced"
      f"{where}: the compiler recomputes to fit into the memory, or devices do"
      " the same work. Save less, split over more devices, or shard that part."
      f"{option}"
    )
  return (
    f"The compiled program does {ratio:.2f} of the FLOPs that were traced"
    f"{where}: devices do the same work. An axis of the mesh splits neither the"
    " batch nor the weights there; change the mesh or the axis rules."
  )


def _resharding(subject: Subject) -> Iterable[str]:
  found = [
    m
    for m in subject.moved
    if m.is_in_loop
    and m.data is _Activations
    and m.collective.kind != "all-to-all"
    and not _is_pipeline(m.collective)
    and not name_stack.is_expert_parallel(m.collective.name)
    and set(m.collective.axes) & set(subject.batch_axes)
  ]
  for part, group in _group_by_part(found, subject):
    kinds = ", ".join(dict.fromkeys(m.collective.kind for m in group))
    yield (
      f"{part}: activations cross the axis {_axes(group)}, which splits the"
      " batch:"
      f" {_figures(group)} ({kinds}) in the loop of layers. Constrain what goes"
      " in and out of this part by its logical axes."
    )


def _is_pipeline(collective: collectives.Collective) -> bool:
  """Whether it passes microbatches on from stage to stage."""
  is_permute = collective.kind == "collective-permute"
  return is_permute and axes.STAGE in collective.axes


def _find_padded(subject: Subject) -> Iterable[str]:
  found = [m for m in subject.moved if m.collective.gathers]
  for part, group in _group_by_part(found, subject):
    yield (
      f"{part}: weights are gathered as all-reduces (padded shards):"
      f" {_figures(group)}, about twice what gathers send. Another size of"
      f" {_axes(group)}, or splitting another dimension, avoids it."
    )


def _reduced_gradients(
  subject: Subject, *, is_gathered: bool
) -> list[movements.Movement]:
  """All-reduces of gradients over axes of which weights are gathered or not."""
  gathered = {
    axis
    for m in subject.moved
    if m.data is _Weights and m.collective.kind == "all-gather"
    for axis in m.collective.axes
  }
  return [
    m
    for m in subject.moved
    if m.data is _Gradients
    and m.collective.kind == "all-reduce"
    and bool(set(m.collective.axes) & gathered) is is_gathered
  ]


def _find_unscattered(subject: Subject) -> Iterable[str]:
  found = _reduced_gradients(subject, is_gathered=True)
  for part, group in _group_by_part(found, subject):
    yield (
      f"{part}: gradients are all-reduced over {_axes(group)}, along which the"
      f" weights are split: {_figures(group)}, twice what scatters send. Local"
      " parts that are multiples of 128 or 256 are scattered more often; try"
      f" another size of {_axes(group)}."
    )


def _find_repeated(subject: Subject) -> Iterable[str]:
  found = [
    m
    for m in _reduced_gradients(subject, is_gathered=False)
    if m.loop_depth > 1 and set(m.collective.axes) & set(subject.batch_axes)
  ]
  if _total(found) >= subject.least:
    yield (
      f"{movements.largest_part(found)}: gradients, here and in other modules,"
      f" are all-reduced over {_axes(found)} inside nested loops, in each layer"
      f" and each microbatch: {_figures(found)}. One all-reduce after the loops"
      " would be enough, but the compiler does not move it there. Use fewer"
      f" microbatches, or a smaller {_axes(found)} and more of another mesh"
      " axis."
    )


def _weight_gathers(subject: Subject) -> list[movements.Movement]:
  return [
    m
    for m in subject.moved
    if m.is_in_loop and m.data is _Weights and m.collective.kind == "all-gather"
  ]


def _duplicates(subject: Subject) -> Iterable[str]:
  extra: dict[str, list[movements.Movement]] = {}
  find = gathers.Finder(subject.program)
  seen: set[gathers.Source] = set()
  for movement in _weight_gathers(subject):
    sources = find.sources(movement.collective)
    if sources and seen.issuperset(sources):
      extra.setdefault(movement.part, []).append(movement)
    seen.update(sources)
  for part, group in extra.items():
    if _total(group) >= subject.least:
      yield (
        f"{part or 'an unnamed module'}: the same weights are gathered again in"
        f" the same pass: {_figures(group)} that could be saved. The pass"
        " recomputes matmuls before it needs their weights again; a remat"
        " policy that saves these matmuls avoids it."
      )


def _invariant(subject: Subject) -> Iterable[str]:
  find = gathers.Finder(subject.program)
  repeated = [
    (m, find.repetitions(m.collective)) for m in _weight_gathers(subject)
  ]
  for part, group in _group_by_part([m for m, n in repeated if n > 1], subject):
    times = max(n for m, n in repeated if m in group)
    yield (
      f"{part}: each of {times} trips of a loop gathers the same weights:"
      f" {_figures(group)}, of which one trip would be enough. The loop is over"
      " chunks of the loss (a larger loss_chunk_length has fewer) or over"
      " microbatches."
    )


def _wide_matmuls(subject: Subject) -> Iterable[str]:
  flops = subject.total.flops
  narrow = subject.total.count_by_dtypes("bfloat16", "float16")
  wide = subject.total.count_by_dtypes("float32")
  if narrow > flops / 2 and wide > _FEW * flops:
    parts = subject.total.count_by_part("float32")
    part = max(parts, key=parts.__getitem__)
    yield (
      f"{part or 'an unnamed module'}: {100 * wide / flops:.0f} % of the FLOPs"
      " are matmuls of float32 operands in a model that computes in 16 bits;"
      " on GPUs at half the rate or less. Cast the operands, or what their"
      " gradient arrives in (preferred_element_type)."
    )


def _copies(subject: Subject) -> Iterable[str]:
  total = subject.total
  sizes: dict[str, int] = {}
  for (computation, _), cost in total.operations.items():
    times = total.runs.get(computation, 0)
    is_copy = cost.kind == costs.COPY and cost.name.endswith(_SLICES)
    if times > 1 and is_copy:
      part = name_stack.part(cost.name)
      sizes[part] = sizes.get(part, 0) + times * cost.hbm_bytes
  for part, size in sizes.items():
    inside = f"{part}/{axes.LAYERS}/"
    is_stack = any(name.startswith(inside) for name, _ in total.counts)
    if is_stack and size > _COPIED * total.hbm_bytes:
      yield (
        f"{part}: the loop over layers copies what each layer saves into arrays"
        f" of all layers, and back: {units.size(size)} a step,"
        f" {100 * size / total.hbm_bytes:.0f} % of the memory traffic."
        " Stack.scan=False unrolls the loop; the program then compiles longer."
      )


def _attention(subject: Subject) -> Iterable[str]:
  forward = backward = 0
  for name, count in subject.kernels.items():
    if kernels.is_attention_backward(name):
      backward += count
    elif kernels.is_attention(name):
      forward += count
  if forward > backward > 0:
    yield (
      f"attention: {forward} forward kernels for {backward} backward ones:"
      f" {forward - backward} are recomputed. The remat policy"
      ' layers.remat.SaveOnly(("attention_residuals",)) saves what they return.'
    )


def _bias(subject: Subject) -> Iterable[str]:
  found = [name for name in subject.kernels if kernels.has_bias(name)]
  flops = sum(subject.total.kernels.get(name, 0) for name in found)
  if flops > _FEW * subject.total.flops:
    count = sum(subject.kernels[name] for name in found)
    yield (
      f"attention: {count} of cuDNN's kernels read their mask as a bias (packed"
      " documents, or a position bias) and have"
      f" {100 * flops / subject.total.flops:.0f} % of the FLOPs. Such a kernel"
      " takes 1.5 to 2 times as long as one without a bias (measured on an"
      " H200). If each sequence is one document, use the attention kernel"
      " layers.attention.cudnn_attention.one_document."
    )


_Rule = Callable[[Subject], Iterable[str]]
_RULES: tuple[_Rule, ...] = (_resharding, _attention, _bias)
_FOR_HARDWARE: tuple[_Rule, ...] = (
  _find_padded,
  _find_unscattered,
  _find_repeated,
  _duplicates,
  _invariant,
  _wide_matmuls,
  _copies,
)


def _group_by_part(
  found: Iterable[movements.Movement], subject: Subject
) -> Iterable[tuple[str, list[movements.Movement]]]:
  """Groups by part, without small ones, the largest first."""
  groups: dict[str, list[movements.Movement]] = {}
  for movement in found:
    groups.setdefault(movement.part or "an unnamed module", []).append(movement)
  large = [item for item in groups.items() if _total(item[1]) >= subject.least]
  return sorted(large, key=lambda item: -_total(item[1]))


def _total(group: Iterable[movements.Movement]) -> int:
  return sum(m.total_bytes for m in group)


def _figures(group: Sequence[movements.Movement]) -> str:
  count = sum(m.collective.count for m in group)
  return f"{count} times, {units.size(_total(group))} a step"


def _axes(group: Sequence[movements.Movement]) -> str:
  found = dict.fromkeys(a for m in group for a in m.collective.axes)
  return ",".join(found) or "-"
