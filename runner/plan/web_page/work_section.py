"""The parts of the page on work: FLOPs, collectives, kernels."""

from typing import Final

from paxon.runner import units
from paxon.runner.plan import result, sentences
from paxon.runner.plan.web_page import bars, markup

_MODEL, _RECOMPUTED = 0, 6
_MAX_BARS: Final = 12


def flops(plan: result.Plan) -> list[str]:
  """Returns the HTML of the FLOPs of a step."""
  found = plan.flops
  parts = list(found.by_module.items())
  rows = [
    bars.Row(
      part or "(outside any module)",
      (bars.Segment("executed", number, _MODEL),),
      text=f"{units.flops(number)}, {_share(number, found.hardware)}",
    )
    for part, number in parts[:_MAX_BARS]
  ]
  if found.recomputed:
    again = bars.Segment("recomputed", found.recomputed, _RECOMPUTED)
    share = _share(found.recomputed, found.hardware)
    text = f"{units.flops(found.recomputed)}, {share}"
    rows.append(bars.Row("of all: recomputed", (again,), text=text))
  totals: list[tuple[str, float | None]] = [
    ("of the model", found.model),
    ("of the model, excluding masked attention (causal)", found.causal_model),
    ("recomputed", found.recomputed),
    ("executed by idle pipeline stages (bubble)", found.bubble or None),
    ("executed", found.hardware),
    ("executed (compiled program)", plan.compiled_flops),
    *((f"executed: {kind}", n) for kind, n in found.by_kind.items()),
    *((f"executed in {d or 'no dtype'}", n) for d, n in found.by_dtype.items()),
    *((f"executed: {part}", n) for part, n in parts[_MAX_BARS:]),
  ]
  table = markup.table(
    ("", "FLOPs"),
    [(name, units.flops(n)) for name, n in totals if n is not None],
  )
  return [
    "<h3>FLOPs of a step, all devices</h3>",
    bars.draw(rows, title="Executed FLOPs by part", form=units.flops),
    markup.details("All figures of FLOPs", table),
  ]


def communication(plan: result.Plan) -> list[str]:
  """Returns the HTML of what a device sends; nothing if not compiled."""
  if not plan.compiled:
    return []
  rows = [
    (
      c.kind + (" (padded shards)" if c.gathers else ""),
      ", ".join(c.axes) or "-",
      c.link,
      f"{c.count:,}",
      f"{c.asynchronous:,}",
      units.size(c.payload_bytes),
      units.size(c.wire_bytes),
      "-" if c.seconds is None else units.seconds(c.seconds),
      ", ".join(
        f"{d}: {units.size(n)}"
        for d, n in (*c.dtype_bytes.items(), *c.module_bytes.items())
      ),
    )
    for c in plan.collectives
  ]
  titles = ("kind", "axes", "link", "count", "asynchronous", "payload")
  parts = ["<h3>Collectives of a step, one device</h3>"]
  if not rows:
    parts.append("<p>None.</p>")
  parts.append(
    markup.table(
      (*titles, "sent", "at least", "payload by dtype"),
      rows,
      caption="Loops are multiplied out.",
    )
  )
  moved = [
    (
      c.kind,
      ", ".join(c.axes) or "-",
      f"{c.count:,}",
      units.size(c.payload_bytes),
      c.module or "-",
    )
    for c in plan.resharding
  ]
  parts.append(
    markup.table(
      ("kind", "axes", "count", "bytes", "part"),
      moved,
      caption="Of these, activations moved inside the layer loop:",
    )
  )
  return parts


def kernels(plan: result.Plan) -> list[str]:
  """Returns the HTML of the kernels of a step; nothing if none is known."""
  choices = [
    (c.part, c.kernel, sentences.decision(c), c.dtype, sentences.executions(c))
    for c in plan.kernel_choices
  ]
  calls = [(name, f"{n:,}") for name, n in sorted(plan.kernels.items())]
  if not choices and not calls:
    return []
  return [
    "<h3>Kernels of a step</h3>",
    markup.table(("part", "kernel", "", "dtype", "count"), choices),
    markup.table(("custom call", "count"), calls),
  ]


def quantized(plan: result.Plan) -> list[str]:
  """Returns the HTML of what quantized matmuls run as; nothing without."""
  if not plan.quantized_matmuls:
    return []
  rows = [
    (
      p.module,
      p.role,
      p.traced_dtype,
      sentences.runs_as(p),
      f"{p.count:,}",
      units.flops(p.flops),
      p.reason,
    )
    for p in plan.quantized_matmuls
  ]
  titles = ("part", "product", "asked for", "runs as", "count", "FLOPs", "why")
  summary = markup.escape(sentences.quantized(plan))
  return [
    "<h3>Quantized matmuls of a step</h3>",
    f"<p>{summary[:1].upper()}{summary[1:]}.</p>",
    markup.table(titles, rows),
  ]


def _share(part: float | int, whole: float | int) -> str:
  return units.share(part / max(whole, 1))
