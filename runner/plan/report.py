"""Plans as text, for a terminal."""

from collections.abc import Iterable, Sequence
from typing import Final

from paxon.runner import units
from paxon.runner.plan import comparison, result, search_table, sentences

_MAX_PARTS: Final = 8
_MAX_COLLECTIVES: Final = 12
_MAX_QUANTIZED: Final = 12
_FINGERPRINT_DIGITS: Final = 16
# FLOPs that compilers move between products lie within these ratios.
_SAME: Final = (0.999, 1.02)


def to_text(plan: result.Plan) -> str:
  """Returns the whole plan as several lines of text."""
  sections = [
    _head(plan),
    _memory(plan),
    _flops(plan),
    _collectives(plan) if plan.compiled else [],
    _resharding(plan),
    _kernels(plan),
    _quantized(plan),
    _bound(plan),
    _estimate(plan),
    _made(plan),
    [
      *(f"warning: {text}" for text in (*plan.findings, *plan.warnings)),
      *(f"note: {text}" for text in plan.notes),
    ],
    _verdict(plan),
  ]
  return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def to_table(
  plans: Sequence[result.Plan], failures: Sequence[result.Failure] = ()
) -> str:
  """Returns one line a target, to compare them; `*` marks the best."""
  compared = comparison.compare(plans, failures)
  rows = [compared.titles]
  for row in compared.rows:
    rows.append(tuple(c.text + ("*" if c.is_best else "") for c in row))
  lines = [line.rstrip() for line in _aligned(rows)]
  width = max(len(row[0]) for row in rows)
  for failure in compared.failures:
    lines.append(f"{failure.target.ljust(width)}  no plan: {failure.message}")
  return "\n".join([*lines, f"* best. {compared.legend}"])


def _head(plan: result.Plan) -> list[str]:
  mesh = " x ".join(f"{a}={n}" for a, n in plan.mesh.items()) or "one device"
  batch = ", ".join(
    "x".join(map(str, shape)) for shape in dict.fromkeys(plan.batch.values())
  )
  lines = [f"plan: {plan.experiment} on {plan.target}"]
  lines += [f"  {override}" for override in plan.overrides]
  lines.append(f"  {sentences.devices(plan)} as {mesh}, batch {batch}")
  return lines


def _memory(plan: result.Plan) -> list[str]:
  memory = plan.memory
  is_compiled = memory.temporaries is not None
  saved = [(f"  saved: {name}", n) for name, n in memory.saved.items()]
  lines = [
    "memory per device",
    *_sizes(
      ("parameters", memory.parameters),
      ("optimizer", memory.optimizer),
      ("other variables", memory.other_variables or None),
      ("batch", memory.batch),
      ("all of the above, as allocated", memory.arguments),
      ("temporaries", memory.temporaries),
    ),
    f"  {'  of which' if is_compiled else 'temporaries'} (analytical estimate)",
    *_sizes(
      ("  gradients (upper bound)", memory.gradients),
      *saved,
      ("peak", memory.peak),
      ("usable", memory.usable),
      ("HBM traffic per step", plan.hbm_bytes),
    ),
    f"  {sentences.capacity(plan)}",
  ]
  if memory.compiler_error is not None:
    lines.append(f"  compiler error: {memory.compiler_error}")
  return lines


def _sizes(*rows: tuple[str, float | int | None]) -> list[str]:
  return [
    f"  {name:<44}{units.size(size):>12}"
    for name, size in rows
    if size is not None
  ]


def _flops(plan: result.Plan) -> list[str]:
  flops = plan.flops
  rows: list[tuple[str, float | None]] = [
    ("model", flops.model),
    ("  excluding masked attention (causal)", flops.causal_model),
    ("recomputed", flops.recomputed),
    ("executed", flops.hardware),
    ("executed (compiled program)", plan.compiled_flops),
  ]
  lines = ["FLOPs per step, all devices"]
  for name, number in rows:
    if number is not None:
      lines.append(f"  {name:<44}{units.flops(number):>18}")
  ratio = (plan.compiled_flops or flops.hardware) / max(flops.hardware, 1)
  if not _SAME[0] <= ratio <= _SAME[1]:
    lines.append(
      f"  the compiled program executes {ratio:.3f}x the traced FLOPs"
    )
  lines.append("executed FLOPs by module")
  parts = list(flops.by_module.items())
  for part, number in parts[:_MAX_PARTS]:
    share = units.share(number / max(flops.hardware, 1))
    lines.append(f"  {share:>6}  {part or '(outside any module)'}")
  if len(parts) > _MAX_PARTS:
    lines.append(f"  and {len(parts) - _MAX_PARTS} more modules")
  return lines


def _collectives(plan: result.Plan) -> list[str]:
  titles = ("kind", "axes", "link", "count", "payload", "sent", "at least")
  rows = [("", *titles, "dtypes")]
  for entry in plan.collectives[:_MAX_COLLECTIVES]:
    time = "-" if entry.seconds is None else units.seconds(entry.seconds)
    rows.append(
      (
        "",
        entry.kind + (" (padded shards)" if entry.gathers else ""),
        ",".join(entry.axes) or "-",
        entry.link,
        f"{entry.count:,}",
        units.size(entry.payload_bytes),
        units.size(entry.wire_bytes),
        time,
        sentences.dtypes(entry),
      )
    )
  more = len(plan.collectives) - _MAX_COLLECTIVES
  return [
    "collectives per step, per device",
    *(_aligned(rows) if plan.collectives else ["  none"]),
    *([f"  and {more} more kinds"] if more > 0 else []),
  ]


def _resharding(plan: result.Plan) -> list[str]:
  if not plan.resharding:
    return []
  rows = [
    (
      "",
      entry.kind,
      ",".join(entry.axes) or "-",
      f"{entry.count:,}",
      units.size(entry.payload_bytes),
      entry.module or "-",
    )
    for entry in plan.resharding
  ]
  return [
    "of which activation resharding inside the layer loop",
    *_aligned(rows),
  ]


def _kernels(plan: result.Plan) -> list[str]:
  rows = [
    (
      "",
      c.part,
      c.kernel,
      sentences.decision(c),
      c.dtype,
      sentences.executions(c),
    )
    for c in plan.kernel_choices
  ]
  lines = _aligned(rows)
  lines += [
    f"  {number:>9,}  {name}" for name, number in sorted(plan.kernels.items())
  ]
  return ["kernels per step", *lines] if lines else []


def _quantized(plan: result.Plan) -> list[str]:
  """Returns one line per module; matmuls that run alike are grouped."""
  if not plan.quantized_matmuls:
    return []
  parts: dict[str, dict[str, list[str]]] = {}
  for each in plan.quantized_matmuls:
    alike = parts.setdefault(each.module, {})
    alike.setdefault(sentences.runs_as(each), []).append(each.role)
  rows = [
    ("", part, "; ".join(f"{k}: {', '.join(v)}" for k, v in alike.items()))
    for part, alike in parts.items()
  ]
  more = len(rows) - _MAX_QUANTIZED
  return [
    f"quantized matmuls: {sentences.quantized(plan)}",
    *_aligned(rows[:_MAX_QUANTIZED]),
    *([f"  and {more} more modules"] if more > 0 else []),
  ]


def _bound(plan: result.Plan) -> list[str]:
  bound = plan.bound
  if bound is None:
    return []
  rows = [
    ("matmuls", bound.compute),
    ("memory", bound.memory),
    ("fast link", bound.fast_link),
    ("network", bound.network),
    ("step, all overlapped", bound.step),
  ]
  lines = ["roofline lower bound on the step time (datasheet rates)"]
  lines += _times(rows)
  if bound.tokens_per_second is not None:
    lines.append(f"  at most {bound.tokens_per_second:,.0f} tokens/s")
  return [*lines, f"  MFU at most {units.share(bound.mfu)}"]


def _estimate(plan: result.Plan) -> list[str]:
  found = plan.estimate
  if found is None:
    return []
  low, high = found.band
  rows = [
    ("matmuls", found.compute),
    ("memory", found.memory),
    ("kernel launch gaps", found.overhead),
    *(
      (f"exposed collectives ({axes or '-'})", s)
      for axes, s in found.exposed.items()
    ),
    ("step", found.step),
  ]
  lines = ["estimated step time (calibrated, independent of the bound)"]
  lines += _times(rows)
  lines.append(
    f"  range {units.seconds(low * found.step)} to"
    f" {units.seconds(high * found.step)}"
  )
  if found.tokens_per_second is not None:
    lines.append(
      f"  {found.tokens_per_second:,.0f} tokens/s, from"
      f" {found.tokens_per_second / high:,.0f} to"
      f" {found.tokens_per_second / low:,.0f}"
    )
  lines.append(
    f"  MFU: {units.share(found.ceiling_mfu)} if only matmuls took time;"
    f" {units.share(found.datasheet_mfu)} at datasheet rates;"
    f" {units.share(found.mfu)} estimated, from"
    f" {units.share(found.mfu / high)} to {units.share(found.mfu / low)}"
  )
  return [*lines, f"  factors: {found.source}"]


def _made(plan: result.Plan) -> list[str]:
  options = [f"  {k}={v}" for k, v in plan.compiler_options.items()]
  lines = [f"generated: {sentences.origin(plan)}"]
  if plan.fingerprint is not None:
    lines.append(f"  fingerprint {plan.fingerprint[:_FINGERPRINT_DIGITS]}")
  return lines + options


def _verdict(plan: result.Plan) -> list[str]:
  memory = plan.memory
  lines = [f"{plan.target}: {sentences.verdict(plan)}"]
  changes = search_table.verified(plan)
  if memory.fit is result.Fit.DOES_NOT_FIT and not changes:
    for number, change in enumerate(plan.advice, start=1):
      lines.append(f"  {number}. {change}")
  return [*lines, *changes, *search_table.layouts(plan)]


def _times(rows: Iterable[tuple[str, float | None]]) -> list[str]:
  return [
    f"  {name:<34}{units.seconds(seconds):>12}"
    for name, seconds in rows
    if seconds is not None
  ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
  """Returns lines with aligned columns; numbers are right-aligned."""
  columns = list(zip(*rows, strict=True))
  widths = [max(map(len, column)) for column in columns]
  is_figure = [
    all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) and i > 0
    for i, column in enumerate(columns)
  ]
  return [
    "  ".join(
      cell.rjust(width) if figure else cell.ljust(width)
      for cell, width, figure in zip(row, widths, is_figure, strict=True)
    ).rstrip()
    for row in rows
  ]
