"""A plan as text, for a terminal."""

from collections.abc import Sequence

from paxon.runner.plan import result

_MAX_PARTS = 8
_MAX_COLLECTIVES = 12


def to_text(plan: result.Plan) -> str:
  """Returns the whole plan, several lines."""
  mesh = " x ".join(f"{a}={n}" for a, n in plan.mesh.items()) or "one device"
  batch = ", ".join(
    "x".join(map(str, shape)) for shape in dict.fromkeys(plan.batch.values())
  )
  lines = [
    f"plan of {plan.experiment} on {plan.target}: {plan.num_devices} devices"
    f" ({plan.num_chips} chips) as {mesh}, batch {batch}",
    *(f"  {override}" for override in plan.overrides),
    "",
    *_memory(plan),
    "",
    *_flops(plan),
  ]
  if plan.compiled:
    lines += ["", *_collectives(plan.collectives)]
  if plan.kernels:
    lines.append("kernels per step")
    for name, number in sorted(plan.kernels.items()):
      lines.append(f"  {number:>8}  {name}")
  if plan.bound is not None:
    lines += ["", *_bound(plan.bound)]
  if plan.findings or plan.notes:
    lines.append("")
  lines += [f"warning: {text}" for text in plan.findings]
  lines += [f"note: {text}" for text in plan.notes]
  lines += ["", _verdict(plan)]
  return "\n".join(lines)


def to_table(plans: Sequence[result.Plan]) -> str:
  """Returns one line a plan, to compare targets."""
  rows = [("target", "devices", "peak", "usable", "bound", "MFU <=", "fit")]
  for plan in plans:
    memory, bound = plan.memory, plan.bound
    rows.append(
      (
        plan.target,
        str(plan.num_devices),
        "-" if memory.peak is None else _bytes(memory.peak),
        "-" if memory.usable is None else _bytes(memory.usable),
        "-" if bound is None else _seconds(bound.step),
        "-" if bound is None else f"{100 * bound.mfu:.0f} %",
        plan.fit,
      )
    )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(w) for cell, w in zip(row, widths, strict=True)
    ).rstrip()
    for row in rows
  )


def _memory(plan: result.Plan) -> list[str]:
  memory = plan.memory
  rows: list[tuple[str, float | None]] = [
    ("parameters", memory.parameters),
    ("other variables", memory.other_variables or None),
    ("optimizer", memory.optimizer),
    ("batch", memory.batch),
    ("arguments, laid out", memory.arguments),
    ("temporaries", memory.temporaries),
    ("  of which gradients, at most", memory.gradients),
    ("peak", memory.peak),
    ("usable", memory.usable),
  ]
  lines = ["memory per device"]
  for name, size in rows:
    if size is not None:
      lines.append(f"  {name:<30}{_bytes(size):>12}")
  if memory.refusal is not None:
    lines.append(f"  the compiler says: {memory.refusal}")
  return lines


def _flops(plan: result.Plan) -> list[str]:
  flops = plan.flops
  lines = [f"FLOPs per step, all devices: {_count(flops.model)} of the model"]
  if flops.causal_model is not None:
    lines.append(f"  {_count(flops.causal_model)} without what is masked")
  if flops.recomputed:
    share = 100 * flops.recomputed / flops.hardware
    lines.append(
      f"  {_count(flops.recomputed)} are recomputation, {share:.0f} % of all"
    )
  for part, number in list(flops.by_part.items())[:_MAX_PARTS]:
    share = 100 * number / max(flops.hardware, 1)
    lines.append(f"  {share:5.1f} %  {part or '(outside of modules)'}")
  return lines


def _collectives(collectives: Sequence[result.Collectives]) -> list[str]:
  lines = ["collectives per step and device"]
  for entry in collectives[:_MAX_COLLECTIVES]:
    axes = ",".join(entry.axes) or "-"
    time = "" if entry.seconds is None else f"  >= {_seconds(entry.seconds)}"
    remark = "  (a gather of padded parts)" if entry.gathers else ""
    lines.append(
      f"  {entry.count:>7} {entry.kind:<19}{axes:<14}{entry.link:<8}"
      f"{_bytes(entry.payload_bytes):>11}, {_bytes(entry.wire_bytes)} sent"
      f"{time}{remark}"
    )
  if not collectives:
    lines.append("  none")
  elif len(collectives) > _MAX_COLLECTIVES:
    lines.append(f"  and {len(collectives) - _MAX_COLLECTIVES} kinds more")
  return lines


def _bound(bound: result.Bound) -> list[str]:
  rows = [
    ("matrix products", bound.compute),
    ("memory", bound.memory),
    ("fast links", bound.fast_link),
    ("network", bound.network),
  ]
  lines = ["a step takes at least (rates of the data sheet, not an estimate)"]
  for name, seconds in rows:
    if seconds is not None:
      lines.append(f"  {name:<18}{_seconds(seconds):>12}")
  rate = bound.tokens_per_second
  tokens = "" if rate is None else f", at most {rate:,.0f} tokens/s"
  lines.append(f"  all overlapped    {_seconds(bound.step):>12}{tokens}")
  lines.append(f"  so the MFU is at most {100 * bound.mfu:.0f} %")
  return lines


def _verdict(plan: result.Plan) -> str:
  memory = plan.memory
  if memory.fit is not result.Fit.DOES_NOT_FIT:
    share = ""
    if memory.peak is not None and memory.usable:
      share = f": {100 * memory.peak / memory.usable:.0f} % of what is usable"
    return f"{plan.target}: {plan.fit}{share}"
  lines = [f"{plan.target}: does not fit"]
  for number, change in enumerate(plan.advice, start=1):
    lines.append(f"  {number}. {change}")
  return "\n".join(lines)


def _bytes(size: float | int) -> str:
  for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if size >= scale:
      return f"{size / scale:.2f} {unit}"
  return f"{size:.0f} B"


def _count(number: float | int) -> str:
  for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
    if number >= scale:
      return f"{number / scale:.3f} {unit}FLOP"
  return f"{number / 1e6:.3f} MFLOP"


def _seconds(seconds: float) -> str:
  if seconds >= 1:
    return f"{seconds:.2f} s"
  return (
    f"{1e3 * seconds:.3g} ms"
    if seconds >= 1e-3
    else (f"{1e6 * seconds:.3g} us")
  )
