"""The part of the page on memory: a picture against what is usable, a table."""

from collections.abc import Sequence
from typing import Final

from paxon.runner import units
from paxon.runner.plan import result, sentences
from paxon.runner.plan.web_page import bars, markup

PARAMETERS, OPTIMIZER, OTHERS, BATCH, TEMPORARIES, GRADIENTS, SAVED, REST = (
  range(bars.STYLES)
)

_GRADIENTS: Final = "gradients (upper bound)"

# Below this share of usable memory, that line would leave no room for bars.
_SMALL: Final = 0.05

_LEGEND: Final = {
  "parameters": PARAMETERS,
  "optimizer": OPTIMIZER,
  "other variables": OTHERS,
  "batch": BATCH,
  "layout and padding": REST,
  "temporaries": TEMPORARIES,
  _GRADIENTS: GRADIENTS,
  "saved for the backward pass": SAVED,
}


def section(plan: result.Plan) -> list[str]:
  """Returns the HTML of a plan's memory."""
  parts = ["<h3>Memory of a device</h3>"]
  parts.append(
    f'<p class="soft">{markup.escape(sentences.capacity(plan))}.</p>'
  )
  memory = plan.memory
  rows = [bars.Row(_label(plan), _segments(memory))]
  if memory.saved or memory.peak is not None:
    start = memory.arguments or memory.state_and_batch
    rows.append(
      bars.Row("temporaries (estimate)", _closed(memory), start=start)
    )
  limits = _limits(memory, max(row.end for row in rows))
  picture = bars.draw(
    rows, title="Memory of a device by kind", form=units.size, limits=limits
  )
  if memory.usable is not None and not limits:
    times = memory.usable / max(row.end for row in rows)
    parts.append(
      f'<p class="soft">The bars are 1/{times:,.0f} of usable memory.</p>'
    )
  parts += [picture, legend(rows)]
  if memory.compiler_error is not None:
    words = markup.escape(f"Compiler error: {memory.compiler_error}")
    parts.append(f'<p class="bad">{words}</p>')
  table = markup.table(("", "bytes"), _figures(plan))
  return [*parts, markup.details("All figures of memory", table)]


def shares(plan: result.Plan) -> tuple[bars.Segment, ...]:
  """Returns the parts of the peak as shares of usable memory.

  Args:
    plan: One whose usable memory is known.
  """
  assert plan.memory.usable is not None
  return tuple(
    bars.Segment(s.name, s.value / plan.memory.usable, s.style)
    for s in _segments(plan.memory)
  )


def legend(rows: Sequence[bars.Row]) -> str:
  """Names the colors that are there."""
  styles = {segment.style for row in rows for segment in row.segments}
  return bars.legend(
    [(name, style) for name, style in _LEGEND.items() if style in styles]
  )


def _label(plan: result.Plan) -> str:
  return "peak" if plan.memory.peak is not None else "state and batch"


def _segments(memory: result.Memory) -> tuple[bars.Segment, ...]:
  """What the compiler counts, or the state alone where it did not."""
  rows = [
    ("parameters", memory.parameters),
    ("optimizer", memory.optimizer),
    ("other variables", memory.other_variables),
    ("batch", memory.batch),
  ]
  if memory.arguments is not None and memory.peak is not None:
    padding = memory.arguments - memory.state_and_batch
    rows.append(("layout and padding", max(padding, 0)))
    # On TPUs the peak is less than the sum: memory of arguments is used again.
    rows.append(("temporaries", max(memory.peak - memory.arguments, 0)))
  return tuple(
    bars.Segment(name, size, _LEGEND[name]) for name, size in rows if size
  )


def _closed(memory: result.Memory) -> tuple[bars.Segment, ...]:
  gradients = bars.Segment(_GRADIENTS, memory.gradients, GRADIENTS)
  saved = [
    bars.Segment(f"saved: {name}", size, SAVED)
    for name, size in memory.saved.items()
  ]
  return (gradients, *saved)


def _limits(
  memory: result.Memory, end: float | int
) -> list[tuple[str, float | int]]:
  if memory.usable is None or end < _SMALL * memory.usable:
    return []
  limits = [("usable", memory.usable)]
  if memory.capacity is not None and memory.capacity > memory.usable:
    limits.append(("memory", memory.capacity))
  return limits


def _figures(plan: result.Plan) -> list[tuple[str, str]]:
  memory = plan.memory
  rows = [
    ("parameters", memory.parameters),
    ("optimizer", memory.optimizer),
    ("other variables", memory.other_variables),
    ("batch", memory.batch),
    ("all of the above, as allocated", memory.arguments),
    ("temporaries", memory.temporaries),
    (_GRADIENTS, memory.gradients),
    *((f"saved: {name}", size) for name, size in memory.saved.items()),
    ("peak", memory.peak),
    ("usable", memory.usable),
    ("memory of the device", memory.capacity),
    ("HBM traffic per step", plan.hbm_bytes),
  ]
  return [(name, units.size(n)) for name, n in rows if n is not None]
