"""Tables of a plan's report that take several lines to make."""

from collections.abc import Sequence
from typing import TypeAlias

from paxon.runner import units
from paxon.runner.plan import result

_TITLES = (
  *("sequences", "slots", "parameters", "cache", "read per step", "peak", ""),
  *("at most", "limited by", "estimate"),
)

# Titles, rows and sentences.
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]


def other_programs(plan: result.Plan) -> Table:
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
  return ("program", "temporaries", "peak", "host memory", "note"), rows, ()


def decode_steps(plan: result.Plan) -> Table:
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
  return _TITLES, rows, lines


def _speed(step: result.DecodeStep) -> tuple[str, str, str]:
  """Returns tokens per second at most, what limits them, and as estimated."""
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


def quantized_matmuls(plan: result.Plan) -> Table:
  """Returns the quantized matmuls; those of a module that run alike merged."""
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
  return titles, rows, [line]


def _runs_as(matmul: result.QuantizedMatmul) -> str:
  """Returns the kernel and the dtype, such as `cublas fp8`."""
  dtype = "fp8" if matmul.dtype.startswith("float8") else matmul.dtype
  if not matmul.kernel:
    return dtype or "not found"
  name = matmul.kernel
  text = name if name.endswith(dtype) else f"{name} {dtype}"
  return text if matmul.is_final else f"{text} (may change by autotuning)"
