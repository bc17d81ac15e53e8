"""Contents of a plan's report: tables and sentences, as text.

`report` prints them in a terminal; `plan_page` shows them in a browser.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Final

from paxon.runner import units
from paxon.runner.plan import hardware, result

MEMORY: Final = "memory per device"
MODULES: Final = "executed FLOPs by module"
BOUND: Final = "roofline lower bound on the step time (datasheet rates)"
ESTIMATE: Final = "estimated step time (simulation)"

_SECONDS_PER_DAY: Final = 86_400
# JAX preallocates this share of a GPU's memory by default.
_PREALLOCATED: Final = 0.75
# FLOPs that compilers move between matmuls stay within these ratios.
_SAME_FLOPS: Final = (0.999, 1.02)
# Seconds. The host, which is not simulated, limits shorter steps, so they have
# no throughput.
SHORTEST_STEP: Final = 1e-3
_LARGEST_OVERHEAD: Final = 0.5
_DECODE_TITLES: Final = (
  *("sequences", "slots", "parameters", "cache", "read per step", "peak", ""),
  *("at most", "limited by", "estimate"),
)
# The one platform whose programs a distribution compiles.
_COMPILERS: Final = {
  "libtpu": hardware.Platform.TPU,
  "jax-cuda13-plugin": hardware.Platform.CUDA,
}


@dataclasses.dataclass(frozen=True)
class Section:
  """A titled table, followed by sentences.

  Attributes:
    title: Heading.
    rows: Cells; the first names the row.
    titles: Column headings; empty if the rows are names and values.
    lines: Sentences.
    most: Number of rows that a terminal shows.
  """

  title: str
  rows: Sequence[Sequence[str]] = ()
  titles: Sequence[str] = ()
  lines: Sequence[str] = ()
  most: int | None = None


def make_sections(plan: result.Plan) -> Iterator[Section]:
  """Yields the sections of a plan that have contents."""
  sections = [
    _summary(plan),
    _memory(plan),
    _buffers(plan),
    _other_programs(plan),
    _decode_steps(plan),
    _flops(plan),
    _flops_by_module(plan),
    _collectives(plan),
    _collectives_by_module(plan),
    _kernels(plan),
    _custom_calls(plan),
    _merge_matmuls(plan),
    _make_bound(plan),
    _estimate(plan),
    _origin(plan),
  ]
  yield from (s for s in sections if s.rows or s.lines)


def verdict(plan: result.Plan) -> str:
  """Returns whether the program fits, and its speed if that is known."""
  found, known = plan.memory, plan.estimate
  if found.peak is not None and found.usable:
    share = units.share(found.peak / found.usable)
    text = f"{plan.fit}, {share} of usable memory"
  elif found.fit is not result.Fit.UNKNOWN:
    text = plan.fit
  else:
    text = "unknown whether it fits"
    if found.peak is None:
      text += " (not compiled)"
    if found.usable:
      share = units.share(found.state_and_batch / found.usable)
      text += f"; state and batch take {share} of usable memory"
  if known is not None and found.fit is not result.Fit.DOES_NOT_FIT:
    text += f"; estimated step time {units.seconds(known.step)}"
    mfu = f", MFU {units.share(known.mfu)}"
    text += mfu if is_meaningful(known) else " (a guess)"
  return text


def make_answer(plan: result.Plan) -> Section:
  """Returns the three numbers that are asked first: memory, time, throughput.

  Without an estimate, time and throughput are bounds.
  """
  memory, estimate, bound = plan.memory, plan.estimate, plan.bound
  rows = []
  if memory.peak is not None:
    text = units.size(memory.peak)
    if memory.usable:
      text += f" of {units.size(memory.usable)}"
    rows.append(("peak memory per device", text))
  if estimate is not None:
    low, high = (units.seconds(estimate.step * f) for f in estimate.band)
    step = f"{units.seconds(estimate.step)}, from {low} to {high}"
    rows.append(("time per step", step))
  elif bound is not None:
    rows.append(("time per step", f"at least {units.seconds(bound.step)}"))
  found, limit = (estimate, "") if estimate else (bound, "at most ")
  if found is not None and is_meaningful(found):
    text = f"MFU {limit}{units.share(found.mfu)}"
    if (speed := found.tokens_per_second) is not None:
      per_day = f"{speed * _SECONDS_PER_DAY / 1e9:,.2f} B a day"
      text = f"{limit}{speed:,.0f} tokens/s, {per_day}, {text}"
    rows.append(("throughput", text))
  return Section("answer", rows)


def devices(plan: result.Plan) -> str:
  """Returns the number of devices and of chips.

  Args:
    plan: A plan for hardware in the table.
  """
  kind = hardware.find_kind(plan.device_kind)
  text = f"{plan.num_devices:,} devices on {plan.num_chips:,} chips"
  if kind.platform is hardware.Platform.CPU:
    text = f"{plan.num_devices:,} CPU devices"
  elif kind.platform in (hardware.Platform.CUDA, hardware.Platform.ROCM):
    text = text.replace("chips", "GPUs")
  elif kind.devices_per_chip > 1:
    text += f" ({kind.devices_per_chip} per chip)"
  elif kind.name == "v4":
    # Without megacore, each of its two cores would be a device.
    text += " (megacore: one device per chip)"
  singular = re.sub(r"\b1 (devices|GPUs|chips)\b", lambda m: m[0][:-1], text)
  mesh = " x ".join(f"{a}={n}" for a, n in plan.mesh.items())
  return f"{singular}, mesh {mesh or 'of one device'}"


def _summary(plan: result.Plan) -> Section:
  shapes = ("x".join(map(str, shape)) for shape in plan.batch.values())
  tokens = plan.tokens_per_batch
  batch = ", ".join(dict.fromkeys(shapes))
  if tokens is not None:
    batch += f", {tokens:,} tokens"
  rows = [("devices", devices(plan)), *([("batch", batch)] if batch else [])]
  if plan.num_parameters is not None:
    rows.append(("parameters", f"{plan.num_parameters:,}"))
  cost = plan.training_cost
  if cost is not None:
    text = f"{cost.days:,.1f} days, {cost.device_hours:,.0f} device-hours"
    if cost.money is not None:
      text += f", price {cost.money:,.0f}"
    if cost.is_lower_bound:
      text = f"at least {text}"
    rows.append((f"training on {cost.tokens:,.0f} tokens", text))
  return Section("summary", rows)


def _memory(plan: result.Plan) -> Section:
  """Returns the memory of one device."""
  found = plan.memory
  variables = [
    ("parameters", found.parameters),
    ("optimizer", found.optimizer),
    ("optimizer, in host memory", found.host_optimizer or None),
    ("other variables", found.other_variables or None),
    ("batch", found.batch),
  ]
  # A planned function has arguments instead.
  sizes = [
    *(found.inputs.items() or variables),
    ("all of the above, as allocated", found.arguments),
    ("temporaries", found.temporaries),
    ("gradients (upper bound)", found.gradients or None),
    *((f"saved: {name} (estimate)", n) for name, n in found.saved.items()),
    ("peak", found.peak),
    ("usable", found.usable),
    ("capacity", found.capacity),
    ("host memory", found.host or None),
    ("HBM traffic per step", plan.hbm_bytes),
  ]
  lines = [_capacity(plan)]
  if found.compiler_error is not None:
    lines.append(f"compiler error: {found.compiler_error}")
  rows = [(name, units.size(n)) for name, n in sizes if n is not None]
  return Section(MEMORY, rows, lines=lines)


def _buffers(plan: result.Plan) -> Section:
  """Returns the largest temporary buffers."""
  rows = [
    (
      units.size(found.num_bytes),
      f"{found.count:,}",
      found.type,
      found.module or "(no module name)",
      found.reason,
    )
    for found in plan.memory.at_peak
  ]
  titles = ("bytes", "buffers", "each", "module", "why")
  title = "largest temporary buffers at the peak, per device"
  return Section(title, rows, titles)


def _capacity(plan: result.Plan) -> str:
  """Returns who limits the memory of a program."""
  found = plan.memory
  if found.usable is None or found.capacity is None:
    return "The program may use all memory of the host, which is not checked."
  if hardware.find_kind(plan.device_kind).platform is hardware.Platform.TPU:
    return "The TPU compiler rejects programs that need more than is usable."
  text = (
    "The CUDA compiler enforces no limit; the plan compares the peak with 90 %"
    " of the capacity."
  )
  if found.peak is not None and (
    _PREALLOCATED * found.capacity < found.peak <= found.usable
  ):
    text += (
      " JAX preallocates 75 % of a GPU by default: run with"
      " XLA_PYTHON_CLIENT_MEM_FRACTION=0.9."
    )
  return text


def _other_programs(plan: result.Plan) -> Section:
  """Returns the memory of evaluation, decoding and saving."""
  rows = [
    (
      program.name,
      *(
        "-" if size is None else units.size(size)
        for size in (program.temporaries, program.peak, program.host)
      ),
      program.note,
    )
    for program in plan.other_programs
  ]
  titles = ("program", "temporaries", "peak", "host memory", "note")
  return Section("memory of other programs, per device", rows, titles)


def _decode_steps(plan: result.Plan) -> Section:
  """Returns the sizes and speeds of the decoding steps that were asked for."""
  rows, lines = [], []
  for step in plan.decode_steps:
    name = f"{step.batch:,}", f"{step.length:,}"
    if step.note:
      lines.append(f"{name[0]} sequences of {name[1]} slots: {step.note}")
    if step.read is None:
      continue
    sizes = (step.parameters, step.cache, step.read, step.peak)
    rows.append(
      (
        *name,
        *("-" if n is None else units.size(n) for n in sizes),
        step.fit,
        *_speed(step),
      )
    )
  title = "decoding, one token per sequence; bytes per device"
  return Section(title, rows, _DECODE_TITLES, lines)


def _speed(step: result.DecodeStep) -> tuple[str, str, str]:
  """Returns the bound of tokens per second, its limit, and the estimate."""
  most, limit, rate = "-", "-", "-"
  if step.bound is not None:
    bound = step.bound
    times = {
      "compute": bound.compute,
      "memory": bound.memory,
      "fast link": bound.fast_link,
      "network": bound.network,
    }
    limit = max(times, key=lambda name: times[name] or 0.0)
    most = f"{step.batch / bound.step:,.0f} tokens/s"
  if step.estimate is not None:
    rate = f"{step.batch / step.estimate.step:,.0f} tokens/s"
  return most, limit, rate


def _flops(plan: result.Plan) -> Section:
  """Returns the FLOPs of a step."""
  found = plan.flops
  numbers: list[tuple[str, float | None]] = [
    ("model", found.model),
    ("  without masked attention (causal)", found.causal_model),
    ("recomputed", found.recomputed),
    ("pipeline bubble", found.bubble or None),
    ("executed", found.hardware),
    *((f"  {d or 'no dtype'}", n) for d, n in found.by_dtype.items()),
    ("executed (compiled program)", plan.compiled_flops),
  ]
  lines = []
  whole = max(found.hardware, 1)
  if found.bubble:
    share = units.share(found.bubble / whole)
    lines.append(f"The pipeline bubble is {share} of the executed FLOPs.")
  ratio = (plan.compiled_flops or whole) / whole
  if not _SAME_FLOPS[0] <= ratio <= _SAME_FLOPS[1]:
    lines.append(
      f"The compiled program executes {ratio:.3f}x the traced FLOPs."
    )
  return Section(
    "FLOPs per step, all devices",
    [(name, units.flops(n)) for name, n in numbers if n is not None],
    lines=lines,
  )


def _flops_by_module(plan: result.Plan) -> Section:
  """Returns the executed FLOPs by module."""
  whole = max(plan.flops.hardware, 1)
  rows = [
    (module or "(outside any module)", units.share(n / whole), units.flops(n))
    for module, n in plan.flops.by_module.items()
  ]
  return Section(MODULES, rows, most=8)


def _collectives(plan: result.Plan) -> Section:
  if not plan.compiled:
    return Section("")
  rows = [
    (
      c.kind + (" (padded shards)" if c.gathers else ""),
      ",".join(c.axes) or "-",
      c.link,
      f"{c.count:,}",
      f"{c.asynchronous:,}",
      units.size(c.payload_bytes),
      units.size(c.wire_bytes),
      "-" if c.seconds is None else units.seconds(c.seconds),
      _dtypes(c.dtype_bytes),
    )
    for c in plan.collectives
  ]
  titles = ("kind", "axes", "link", "count", "async", "payload", "sent")
  return Section(
    "collectives per step, per device",
    rows,
    (*titles, "at least", "dtypes"),
    () if rows else find_unread(plan) or ("none",),
    most=12,
  )


def find_unread(plan: result.Plan) -> list[str]:
  """Returns why the collectives are unknown; empty if they are known."""
  readers = ("Communication", "The compiled program")
  texts = tuple(f"{reader} could not be read" for reader in readers)
  return [note for note in plan.notes if note.startswith(texts)]


def _dtypes(found: Mapping[str, int]) -> str:
  ordered = sorted(found, key=lambda dtype: -found[dtype])
  if len(ordered) < 2:
    return "".join(ordered) or "-"
  return ", ".join(f"{d} {units.size(found[d])}" for d in ordered)


def _collectives_by_module(plan: result.Plan) -> Section:
  sums: dict[tuple[str, str, str], int] = {}
  for c in plan.collectives:
    for module, size in c.module_bytes.items():
      key = module or "(no module name)", c.kind, ",".join(c.axes) or "-"
      sums[key] = sums.get(key, 0) + size
  ordered = sorted(sums.items(), key=lambda item: -item[1])
  rows = [(*key, units.size(size)) for key, size in ordered]
  titles = ("module", "kind", "axes", "payload")
  return Section("collectives by module", rows, titles, most=8)


def _kernels(plan: result.Plan) -> Section:
  rows = []
  for choice in plan.kernel_choices:
    # Plain attention has no kernel of its own.
    is_matmul = choice.kernel == "plain" or "matmuls" in choice.part
    unit = "matmuls" if is_matmul else "calls"
    final = "as in the run" if choice.is_final else "autotuned at run time"
    count = f"{choice.count:,} {unit}"
    rows.append((choice.part, choice.kernel, final, choice.dtype, count))
  return Section("kernels per step", rows)


def _custom_calls(plan: result.Plan) -> Section:
  rows = [(name, f"{n:,}") for name, n in sorted(plan.kernels.items())]
  return Section("custom calls and named fusions per step", rows, most=8)


def _merge_matmuls(plan: result.Plan) -> Section:
  """Merges matmuls of a module that use the same kernel."""
  if not plan.quantized_matmuls:
    return Section("")
  groups: dict[tuple[str, ...], list[result.QuantizedMatmul]] = {}
  for each in plan.quantized_matmuls:
    key = each.module, each.traced_dtype, _runs_as(each), each.reason
    groups.setdefault(key, []).append(each)
  rows = [
    (
      module,
      ", ".join(m.role for m in members),
      traced,
      runs_as,
      f"{sum(m.count for m in members):,}",
      units.flops(sum(m.flops for m in members)),
      reason,
    )
    for (module, traced, runs_as, reason), members in groups.items()
  ]
  whole = max(plan.flops.hardware, 1)
  covered = sum(m.flops for m in plan.quantized_matmuls)
  low = sum(m.flops for m in plan.quantized_matmuls if m.is_quantized)
  line = (
    f"{units.share(covered / whole)} of the executed FLOPs are covered by the"
    f" recipe, {units.share(low / whole)} run in low precision."
  )
  titles = ("module", "matmul", "operands", "runs as", "count", "FLOPs", "why")
  title = "quantized matmuls per step"
  return Section(title, rows, titles, [line], most=12)


def _runs_as(matmul: result.QuantizedMatmul) -> str:
  """Returns the kernel and the dtype, such as `cublas fp8`."""
  dtype = "fp8" if matmul.dtype.startswith("float8") else matmul.dtype
  if not matmul.kernel:
    return dtype or "not found"
  name = matmul.kernel
  text = name if name.endswith(dtype) else f"{name} {dtype}"
  return text if matmul.is_final else f"{text} (may change by autotuning)"


def _make_bound(plan: result.Plan) -> Section:
  """Returns the roofline bound."""
  found = plan.bound
  if found is None:
    return Section("")
  without = "" if has_communication(found) else ", without communication"
  times = [
    ("matmuls", found.compute),
    ("memory", found.memory),
    ("fast link", found.fast_link),
    ("network", found.network),
    (f"step, all overlapped{without}", found.step),
  ]
  rows = [(name, units.seconds(s)) for name, s in times if s is not None]
  lines = []
  if not is_meaningful(found):
    lines.append(
      f"Below {units.seconds(SHORTEST_STEP)} the host limits the step:"
      " tokens/s and MFU would mean nothing."
    )
  else:
    if found.tokens_per_second is not None:
      rows.append(("tokens/s at most", f"{found.tokens_per_second:,.0f}"))
    lines.append(f"MFU is at most {units.share(found.mfu)}.")
  return Section(BOUND, rows, lines=lines)


def _estimate(plan: result.Plan) -> Section:
  """Returns the estimated step time, with its range."""
  found = plan.estimate
  if found is None:
    return Section("")
  low, high = found.band
  times = [
    ("matmuls", found.compute),
    ("memory", found.memory),
    ("kernel launch gaps", found.overhead),
    *(
      (_name_waiting(axes), seconds) for axes, seconds in found.exposed.items()
    ),
  ]
  rows: list[Sequence[str]] = [
    (name, units.seconds(s), "", "") for name, s in times
  ]
  steps = (units.seconds(found.step * f) for f in (1, low, high))
  rows.append(("step", *steps))
  lines = [f"Efficiency factors: {found.source}"]
  if found.slowdown != 1.0:
    lines.append(
      f"All times include the factor {found.slowdown:.3f} for load, slow hosts"
      " and casts, which the simulation lacks."
    )
  if is_meaningful(found):
    if (speed := found.tokens_per_second) is not None:
      speeds = (f"{speed / f:,.0f}" for f in (1, high, low))
      rows.append(("tokens/s", *speeds))
    rows.append(("MFU", *(units.share(found.mfu / f) for f in (1, high, low))))
  else:
    lines.insert(
      0,
      "Kernel launches and the host limit this step: its time is a guess, and"
      " tokens/s and MFU would mean nothing.",
    )
  lines.append(
    f"At datasheet rates a step takes {units.seconds(found.datasheet_step)},"
    f" MFU {units.share(found.datasheet_mfu)}; if only matmuls took time, MFU"
    f" is {units.share(found.ceiling_mfu)}."
  )
  titles = ("", "expected", "from", "to")
  return Section(ESTIMATE, rows, titles, lines)


def _name_waiting(axes: str) -> str:
  """Returns the name of waiting for collectives, or for the host."""
  if axes == result.HOST:
    return "exposed copies to and from the host"
  return f"exposed collectives ({axes or '-'})"


def has_communication(bound: result.Bound) -> bool:
  """Returns whether collectives are part of a bound, or unknown."""
  return bound.fast_link is not None


def is_meaningful(
  found: result.Estimate | result.Bound,
) -> bool:
  """Returns whether tokens/s and MFU of a time mean anything.

  Args:
    found: The time of a step, of which the host and, in an estimate, kernel
      launches may be the larger part.
  """
  if isinstance(found, result.Bound):
    return found.step >= SHORTEST_STEP
  is_launching = found.overhead > _LARGEST_OVERHEAD * found.step
  return found.step >= SHORTEST_STEP and not is_launching


def tokens_per_second(plan: result.Plan) -> float | None:
  """Returns the throughput by the estimate, or by the bound without one.

  Args:
    plan: A plan; there is no throughput if the host limits its step.
  """
  basis = plan.estimate or plan.bound
  if basis is None or not is_meaningful(basis):
    return None
  return basis.tokens_per_second


def _origin(plan: result.Plan) -> Section:
  platform = hardware.find_kind(plan.device_kind).platform
  versions = ", ".join(
    f"{name} {number}"
    for name, number in plan.versions.items()
    if _COMPILERS.get(name, platform) is platform
  )
  if plan.compile_seconds is None:
    text = "traced, not compiled"
  elif plan.compiled:
    text = f"compiled in {plan.compile_seconds:.1f} s"
  else:
    text = f"rejected by the compiler after {plan.compile_seconds:.1f} s"
  if plan.made_at:
    text += f" on {plan.made_at}"
  if plan.is_from_cache:
    text = f"from cache, {text}"
  rows = [("plan", f"{text} by {versions}")]
  if plan.fingerprint is not None:
    rows.append(("fingerprint", plan.fingerprint))
  rows += plan.compiler_options.items()
  return Section("generated", rows)
