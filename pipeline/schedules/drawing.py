"""Pictures of schedules, as SVG: a row a stage, a box an operation."""

import html

from paxon.pipeline.schedules import operation, simulation, table

_Kind = operation.Kind
# Fill of the first chunk's boxes; later chunks are lighter.
_COLORS = {
  _Kind.FORWARD: (66, 103, 178),
  _Kind.RECOMPUTE: (140, 140, 140),
  _Kind.BACKWARD: (46, 139, 87),
  _Kind.INPUT_GRADIENT: (214, 132, 34),
  _Kind.WEIGHT_GRADIENT: (152, 84, 160),
}
_WORDS = {
  _Kind.FORWARD: "forward",
  _Kind.RECOMPUTE: "recompute",
  _Kind.BACKWARD: "backward",
  _Kind.INPUT_GRADIENT: "gradient of input",
  _Kind.WEIGHT_GRADIENT: "gradient of weights",
}
_WIDTH, _MARGIN, _ROW, _GAP = 1000.0, 70.0, 26.0, 4.0


def to_svg(
  schedule: table.Table, *, clock: simulation.Clock, title: str | None = None
) -> str:
  """Returns a picture of width 1000: time to the right, stages downwards.

  Each box says its microbatch; chunks after the first are lighter.

  Args:
    schedule: What is drawn.
    clock: Of its simulation: when operations begin and end.
    title: Above the picture; by default the schedule's name.
  """
  stages = schedule.pieces.num_stages
  height = _MARGIN + stages * (_ROW + _GAP) + 34
  scale = (_WIDTH - _MARGIN - 10) / (clock.total or 1.0)
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g}'
    f' {height:g}" font-family="sans-serif" font-size="12">',
    f'<rect width="{_WIDTH:g}" height="{height:g}" fill="white"/>',
    _text(10.0, 20.0, title or schedule.name, size=15),
    _text(
      10.0,
      40.0,
      f"{clock.total:g} in all, bubble {clock.bubble:g}"
      f" ({clock.bubble_fraction:.0%})",
    ),
  ]
  for stage in range(stages):
    parts.append(_text(10.0, _top(stage) + 17, f"stage {stage}"))
  for (stage, op), (begin, end) in clock.spans.items():
    parts.append(
      _box(
        op,
        x=_MARGIN + begin * scale,
        y=_top(stage),
        width=(end - begin) * scale,
        num_chunks=schedule.pieces.num_chunks,
      )
    )
  used = {op.kind for _, op in clock.spans}
  x = _MARGIN
  for kind in _Kind:
    if kind in used:
      parts.append(
        f'<rect x="{x:g}" y="{height - 24:g}" width="12" height="12"'
        f' fill="{_fill(kind, chunk=0, num_chunks=1)}"/>'
      )
      parts.append(_text(x + 17, height - 13, _WORDS[kind]))
      x += 160
  return "\n".join([*parts, "</svg>", ""])


def _top(stage: int) -> float:
  return 56.0 + stage * (_ROW + _GAP)


def _box(
  op: operation.Operation,
  *,
  x: float,
  y: float,
  width: float,
  num_chunks: int,
) -> str:
  fill = _fill(op.kind, chunk=op.chunk, num_chunks=num_chunks)
  box = (
    f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW:g}"'
    f' fill="{fill}" stroke="white" stroke-width="0.7">'
    f"<title>{html.escape(str(op))}</title></rect>"
  )
  # A number that does not fit its box is left to the tooltip.
  if width < 9 * len(str(op.microbatch)):
    return box
  return box + (
    f'<text x="{x + width / 2:.2f}" y="{y + 17:g}" text-anchor="middle"'
    f' fill="white" font-size="11">{op.microbatch}</text>'
  )


def _fill(kind: operation.Kind, *, chunk: int, num_chunks: int) -> str:
  lighter = 0.45 * chunk / max(num_chunks - 1, 1) if num_chunks > 1 else 0.0
  channels = (round(c + (255 - c) * lighter) for c in _COLORS[kind])
  return "#" + "".join(f"{c:02x}" for c in channels)


def _text(x: float, y: float, text: str, *, size: int = 12) -> str:
  return (
    f'<text x="{x:g}" y="{y:g}" font-size="{size}">{html.escape(text)}</text>'
  )
