"""Self-contained HTML pages, bar charts and SVG, built as element trees.

Text is escaped when a tree is written, so callers never escape. Pages load
nothing from elsewhere, which a Content Security Policy in each of them enforces
(https://www.w3.org/TR/CSP3/), and suit light and dark screens. The colors of a
chart are the CSS classes `c0` to `c7`.
"""

import base64
from collections.abc import Callable, Sequence
import dataclasses
import hashlib
from typing import Final
from xml.etree import ElementTree

Element = ElementTree.Element
Content = Element | str | None

NUM_COLORS: Final = 8

_LIGHT: Final = "4f7ab8 c2410c 15803d 7c3aed 0e7490 b58b2a c2554f 9aa4af"
_DARK: Final = "6c95d1 fb923c 4ade80 c4b5fd 67e8f9 d1a945 dd7570 6e7681"


def _variables(colors: str) -> str:
  return " ".join(f"--c{i}: #{c};" for i, c in enumerate(colors.split()))


_CHART_COLORS: Final = (
  "--ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --page: #ffffff; "
  + _variables(_LIGHT)
)
_CHART_RULES: Final = """
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .name { fill: var(--ink); }
svg rect { stroke: var(--page); stroke-width: 1; }
svg .rule { stroke: var(--line); stroke-width: .6; }
svg .axis { stroke: var(--soft); }
svg line.level { stroke: var(--soft); stroke-dasharray: 6 4; }
svg .label { font-weight: 600; }
svg .curve { stroke-width: 1.6; stroke-linejoin: round; }
""" + "".join(
  f"svg .c{i} {{ fill: var(--c{i}); }}"
  f" svg .curve.c{i} {{ fill: none; stroke: var(--c{i}); }}\n"
  for i in range(NUM_COLORS)
)

CSS: Final = (
  """
:root { color-scheme: light dark; --panel: #f6f8fa; --good: #1a7f37;
  --bad: #cf222e; --warn: #9a6700; """
  + _CHART_COLORS
  + """ }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1;
  --line: #3d444d; --page: #0d1117; --panel: #151b23; --good: #3fb950;
  --bad: #ff7b72; --warn: #d29922; """
  + _variables(_DARK)
  + """ } }
body { margin: 2rem auto; max-width: 960px; padding: 0 1rem;
  font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); overflow-wrap: anywhere; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.4rem; }
h3 { margin: 1.8rem 0 .4rem; } p { margin: .4rem 0; }
.soft { color: var(--soft); } .verdict { font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.warn { color: var(--warn); } ul.warnings li::marker { color: var(--warn); }
.table { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 14px; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; color: var(--soft); }
tbody th { font-weight: 400; color: var(--ink); }
.values td { white-space: normal; text-align: left; }
.values tbody th { white-space: normal; }
pre { overflow-x: auto; padding: .8rem 1rem; border: 1px solid var(--line);
  border-radius: 6px; background: var(--panel); font-size: 13px; }
summary { cursor: pointer; color: var(--soft); font-size: 14px; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); }
.legend { list-style: none; padding: 0; margin: .2rem 0; font-size: 14px;
  display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em;
  border-radius: 2px; }
.figures { display: flex; flex-wrap: wrap; gap: .8rem; }
figure { margin: 0; max-width: 100%; }
figcaption { font-size: 13px; color: var(--soft); }
figure img { min-width: 84px; max-width: 100%; image-rendering: pixelated; }
figure audio { display: block; max-width: 100%; }
.bars { margin: .8rem 0; font-size: 14px; }
.bar { display: grid; grid-template-columns: minmax(8rem, 16rem) 1fr 7rem;
  gap: 0 .8rem; align-items: center; margin: .4rem 0; }
.bar .value { color: var(--soft); white-space: nowrap; }
.track { position: relative; height: 22px; background: var(--panel); }
.track span { position: absolute; top: 0; bottom: 0; min-width: 1.5px; }
.track .limit { width: 0; border-left: 2px dashed var(--ink); }
.track .range { top: 10px; bottom: 10px; background: var(--ink); }
@media (max-width: 600px) { .bar { grid-template-columns: 1fr auto; }
  .track { grid-column: 1 / 3; order: 3; } }
@media print { body { max-width: none; } }
"""
  + _CHART_RULES
  + "\n".join(
    f".swatch.c{i} {{ background: var(--c{i}); }}"
    f" .track .c{i} {{ background: var(--c{i}); }}"
    for i in range(NUM_COLORS)
  )
)


def element(
  tag: str, *content: Content, **attributes: str | float | int
) -> Element:
  """Returns an element.

  Args:
    tag: Its name, such as `p`.
    *content: Elements and text, in order; None is skipped.
    **attributes: Its attributes. A trailing underscore is dropped (`class_`),
      other underscores become hyphens. Numbers are rounded to one decimal.
  """
  made = Element(
    tag,
    {
      name.removesuffix("_").replace("_", "-"): _attribute(value)
      for name, value in attributes.items()
    },
  )
  last = None
  for each in content:
    if isinstance(each, Element):
      made.append(each)
      last = each
    elif each is not None and last is not None:
      last.tail = (last.tail or "") + _printable(each)
    elif each is not None:
      made.text = (made.text or "") + _printable(each)
  return made


def make_policy(scripts: Sequence[str] = ()) -> str:
  """Returns a Content Security Policy of a page that loads nothing.

  Args:
    scripts: The texts of its inline scripts; no others run.
  """
  digests = [hashlib.sha256(text.encode()).digest() for text in scripts]
  hashes = [f"'sha256-{base64.b64encode(d).decode()}'" for d in digests]
  return "; ".join(
    (
      "default-src 'none'",
      " ".join(("script-src", *(hashes or ("'none'",)))),
      # Bars and colors are styles of elements, which can load only images.
      "style-src 'unsafe-inline'",
      "img-src data:",
      "media-src data:",
      "connect-src 'self'",
      "base-uri 'none'",
      "form-action 'none'",
    )
  )


def page(title: str, *body: Content) -> str:
  """Returns a whole page."""
  head = element(
    "head",
    element("meta", charset="utf-8"),
    element(
      "meta", http_equiv="Content-Security-Policy", content=make_policy()
    ),
    element(
      "meta", name="viewport", content="width=device-width, initial-scale=1"
    ),
    element("title", title),
    element("style", CSS),
  )
  root = element(
    "html", head, element("body", element("h1", title), *body), lang="en"
  )
  ElementTree.indent(head)
  text = ElementTree.tostring(root, encoding="unicode", method="html")
  return f"<!doctype html>\n{text}\n"


def chart_css(selector: str) -> str:
  """Returns the CSS of charts outside of a page, on a white background.

  Args:
    selector: Selector of their `svg` elements; nothing else is styled.
  """
  rules = _CHART_RULES.replace("svg", selector)
  return f"{selector} {{ {_CHART_COLORS} background: #ffffff; }}{rules}"


def table(
  titles: Sequence[str],
  rows: Sequence[Sequence[str]],
  *,
  kind: str = "",
) -> Element | None:
  """Returns a table with an optional CSS class; None without rows.

  The first cell of a row is its heading.
  """
  if not rows:
    return None
  made = element("table", **({"class": kind} if kind else {}))
  head = (element("th", title, scope="col") for title in titles)
  if any(titles):
    made.append(element("thead", element("tr", *head)))
  made.append(element("tbody", *(_row(row) for row in rows)))
  return element("div", made, class_="table")


def details(summary: str, *content: Content) -> Element | None:
  """Returns content that a click on a summary shows; None without content."""
  shown = [each for each in content if each is not None]
  return (
    element("details", element("summary", summary), *shown) if shown else None
  )


@dataclasses.dataclass(frozen=True)
class Segment:
  """A part of a bar.

  Attributes:
    name: Its name.
    value: Its length.
    color: Its color, below `NUM_COLORS`.
  """

  name: str
  value: float | int
  color: int


@dataclasses.dataclass(frozen=True)
class Bar:
  """A stacked bar.

  Attributes:
    label: Text before it.
    segments: From left to right.
    start: Where the first one begins.
    text: Text behind it; by default the sum of the segments.
    range: Expected range of the end, drawn as a line.
  """

  label: str
  segments: tuple[Segment, ...]
  start: float | int = 0.0
  text: str | None = None
  range: tuple[float | int, float | int] | None = None

  @property
  def end(self) -> float | int:
    """The largest value that is drawn."""
    total = self.start + sum(segment.value for segment in self.segments)
    return max(total, *(self.range or (0.0,)))


def bar_chart(
  bars: Sequence[Bar],
  *,
  title: str,
  form: Callable[[float | int], str],
  limits: Sequence[tuple[str, float | int]] = (),
) -> Element | None:
  """Returns bars on one scale, with a legend; None if all values are 0.

  Args:
    bars: From top to bottom.
    title: Title for screen readers.
    form: Formats a value.
    limits: Names and values of dashed lines across all bars.
  """
  most = max([0.0, *(bar.end for bar in bars), *(n for _, n in limits)])
  if not most:
    return None
  chart = element("div", class_="bars", role="img", aria_label=title)
  for bar in bars:
    total = form(sum(segment.value for segment in bar.segments))
    row = element("div", element("span", bar.label), class_="bar")
    row.append(_track(bar, most, form, limits))
    text = total if bar.text is None else bar.text
    row.append(element("span", text, class_="value"))
    chart.append(row)
  colors = {s.color: s.name for bar in bars for s in bar.segments if s.value}
  items = [
    element("li", element("span", class_=f"swatch c{color}"), name)
    for color, name in sorted(colors.items())
  ]
  items += [element("li", f"\u250a {n}: {form(v)}") for n, v in limits]
  if any(bar.range for bar in bars):
    items.append(element("li", "\u2500 expected range"))
  return element("div", chart, element("ul", *items, class_="legend"))


def _track(
  bar: Bar,
  most: float | int,
  form: Callable[[float | int], str],
  limits: Sequence[tuple[str, float | int]],
) -> Element:
  track = element("div", class_="track")

  def add(kind: str, title: str, begin: float | int, size: float | int) -> None:
    style = f"left: {100 * begin / most:.3f}%; width: {100 * size / most:.3f}%"
    track.append(element("span", class_=kind, title=title, style=style))

  begin = bar.start
  for segment in bar.segments:
    if segment.value > 0:
      words = f"{segment.name}: {form(segment.value)}"
      add(f"c{segment.color}", words, begin, segment.value)
    begin += segment.value
  if bar.range is not None:
    low, high = bar.range
    add("range", f"{form(low)} to {form(high)}", low, high - low)
  for name, value in limits:
    add("limit", f"{name}: {form(value)}", value, 0)
  return track


def _row(cells: Sequence[str]) -> Element:
  first, *rest = cells
  head = element("th", first, scope="row")
  return element("tr", head, *(element("td", cell) for cell in rest))


def _attribute(value: str | float | int) -> str:
  return _printable(value) if isinstance(value, str) else f"{round(value, 1):g}"


def _printable(text: str) -> str:
  """Replaces control characters and lone surrogates, which HTML forbids."""
  return "".join(
    "\ufffd" if _is_forbidden(c) and c not in "\n\t" else c for c in text
  )


def _is_forbidden(c: str) -> bool:
  # Not `str.isprintable`, which also rejects spaces and joiners of text.
  return ord(c) < 32 or 127 <= ord(c) < 160 or "\ud800" <= c <= "\udfff"
