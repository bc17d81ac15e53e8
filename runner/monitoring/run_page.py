"""The page of one run or several: live from a server, or frozen with its data.

Both are the same template. The live page asks `tools/watch` for curves and
sections; in a report they are a part of the page. Charts are drawn by uPlot,
which is a part of the page, too: it loads nothing from elsewhere. Sections are
HTML that is made here, where all text is escaped.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import math
import pathlib
import re
from typing import Any, Final, TypeVar
from xml.etree import ElementTree

from etils import epath

from paxon.runner import files, web_page
from paxon.runner import run_dir as run_dir_lib
from paxon.runner.monitoring import (
  curves,
  goodput,
  metrics_file,
  sample_file,
)

Record = metrics_file.Record

_TRAIN = "train"
_SHARES = ("goodput", "mfu")
_MIB = 2.0**20
_MAX_SPIKES = 10
_MAX_TEXT = 20_000  # Characters of the samples of a step.
_MAX_POSITION = 200
_MAX_DOCUMENTS = 8
# All curves of a report together, and each of them.
_FROZEN_POINTS = 60_000
_MIN_POINTS = 50
MAX_POINTS: Final = 1_000

_HERE = pathlib.Path(__file__).parent
_LIBRARY = _HERE.parent.parent / "third_party" / "uplot"
_MARK = re.compile(r"\{\{(\w+)\}\}")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)

_element = web_page.element
_T = TypeVar("_T")
_Parts = Sequence[web_page.Element | None]


def make_live() -> str:
  """Returns the page that asks a server for its contents."""
  return _fill(title="Runs", subtitle="", sections="", data="null")


def make_frozen(folder: epath.PathLike, *, max_lines: int) -> str:
  """Returns the page of a run with its contents.

  Args:
    folder: The run directory.
    max_lines: Bound on the training lines of the metrics that are parsed.
  """
  root = epath.Path(folder)
  records = curves.read(root, max_lines=max_lines)
  about = describe(root.name, root)
  count = len({(name, r.split) for r in records for name in r.values})
  limit = _FROZEN_POINTS // max(1, count)
  found = curves.make_tables(
    {root.name: records},
    max_points=min(MAX_POINTS, max(_MIN_POINTS, limit)),
  )
  experiment = about["experiment"]
  steps = max((record.step for record in records), default=0)
  subtitle = (experiment, root.name, f"{steps:,} steps")
  return _fill(
    title=experiment.rpartition(".")[2] or root.name,
    subtitle=_to_html(_note(" · ".join(filter(None, subtitle)))),
    sections="".join(
      f"<section>{section}</section>\n"
      for section in make_sections(root, lambda: records).values()
    ),
    data=to_json({"runs": [about], "curves": found}),
  )


def describe(name: str, folder: epath.PathLike) -> dict[str, Any]:
  """Returns the name, experiment and knobs of a run, and why it is damaged."""
  root = epath.Path(folder)
  settings: dict[str, Any] = {}
  problem = ""
  try:
    settings = files.read_json(
      root / run_dir_lib.SETTINGS, _to_settings, kind="the settings of a run"
    )
  except FileNotFoundError:
    pass  # A run that starts, or is not of this program, has no settings.
  except (OSError, files.DamagedFileError) as error:
    problem = str(error)
  try:
    with files.open_bytes(root / run_dir_lib.METRICS):
      pass
  except FileNotFoundError:
    pass
  except (OSError, files.DamagedFileError) as error:
    problem = problem or str(error)
  overrides = settings.get("overrides", [])
  knobs = [each.removeprefix("--fdl.") for each in overrides]
  return {
    "name": name,
    "experiment": settings.get("experiment", ""),
    "knobs": knobs,
    "finished": (root / run_dir_lib.FINISHED).exists(),
    "problem": problem,
  }


def _to_settings(value: Any) -> dict[str, Any]:
  files.check_type("experiment", value.get("experiment", ""), str)
  files.check_type("overrides", value.get("overrides", []), list)
  for each in value.get("overrides", []):
    files.check_type("overrides[]", each, str)
  return value


def to_json(value: Any) -> str:
  """Returns JSON that a browser reads, also inside of a `script` element.

  Raises:
    ValueError: A number is not finite.
  """
  text = json.dumps(value, allow_nan=False, separators=(",", ":"))
  # Otherwise a text could end the element.
  return text.replace("<", "\\u003c")


def make_sections(
  folder: epath.PathLike, read: Callable[[], Sequence[Record]]
) -> dict[str, str]:
  """Returns the HTML of the sections of a run by name; none is empty.

  A file that cannot be read is an error in its section.

  Args:
    folder: The run directory.
    read: Returns its metrics, by step.
  """
  root = epath.Path(folder)
  makers: dict[str, tuple[Callable[[], _Parts], tuple[str, ...]]] = {
    "metrics": (lambda: _table(read()), ()),
    "time": (lambda: _times(root / run_dir_lib.GOODPUT), ()),
    "spikes": (
      lambda: _spikes(root / run_dir_lib.SPIKES),
      (run_dir_lib.SPIKES,),
    ),
    "samples": (
      lambda: _samples(root),
      (run_dir_lib.SAMPLES_BY_STEP, run_dir_lib.SAMPLES),
    ),
    "examples": (
      lambda: _examples(root / run_dir_lib.EXAMPLES),
      (run_dir_lib.EXAMPLES,),
    ),
    "configuration": (
      lambda: _configuration(root / run_dir_lib.CONFIG_TEXT),
      (run_dir_lib.CONFIG_TEXT,),
    ),
  }
  found = {}
  for name, (maker, texts) in makers.items():
    try:
      # A page must not show a file from elsewhere.
      for each in texts:
        files.check_link(root / each, folder=root)
      parts = maker()
    except (OSError, files.DamagedFileError) as error:
      parts = [_element("p", str(error), class_="bad")]
    text = "".join(_to_html(part) for part in parts)
    if text:
      found[name] = text
  return found


def _fill(*, title: str, **marks: str) -> str:
  """Returns the template with texts for its marks, in one pass."""
  texts = {
    "title": _to_html(_element("title", title)),
    "heading": _to_html(_element("h1", title)),
    "style": web_page.CSS,
    "uplot_style": (_LIBRARY / "uPlot.min.css").read_text(),
    "uplot": (_LIBRARY / "uPlot.iife.min.js").read_text(),
    **marks,
  }
  template = (_HERE / "run_page.html").read_text()
  texts["policy"] = _to_html(
    _element(
      "meta",
      http_equiv="Content-Security-Policy",
      content=make_policy(),
    )
  )
  return _MARK.sub(lambda match: texts[match[1]], template)


def make_policy() -> str:
  """Returns the Content Security Policy of the page; see `web_page`."""
  template = (_HERE / "run_page.html").read_text()
  uplot = (_LIBRARY / "uPlot.iife.min.js").read_text()
  return web_page.make_policy(
    [
      _MARK.sub(lambda match: uplot, script[1])
      for script in _SCRIPT.finditer(template)
    ]
  )


def _to_html(part: web_page.Element | None) -> str:
  if part is None:
    return ""
  return ElementTree.tostring(part, encoding="unicode", method="html")


def _table(records: Sequence[Record]) -> _Parts:
  """Returns the last metrics of each split, and the baselines."""
  last = {record.split: record for record in records}
  columns = [last[s] for s in sorted(last, key=lambda s: (s == _TRAIN, s))]
  columns.sort(key=metrics_file.is_baseline)
  if not columns:
    return []
  metrics = list(dict.fromkeys(name for c in columns for name in c.values))
  # There may be hundreds of metrics of single layers or groups of variables.
  many = [name for name in metrics if "/" in name]
  summary = f"Show {len(many)} metrics of submodules"
  return [
    _element("h2", "Final metrics"),
    _metrics(columns, [name for name in metrics if "/" not in name]),
    web_page.details(summary, _metrics(columns, many)) if many else None,
  ]


def _metrics(
  columns: Sequence[Record], metrics: Sequence[str]
) -> web_page.Element | None:
  """Returns a table with a column for each record."""
  steps = [
    "" if metrics_file.is_baseline(c) else f"{c.step:,}" for c in columns
  ]
  rows = [
    [
      metrics_file.to_words(metric.removesuffix("_bytes")),
      *(_with_unit(metric, c.values.get(metric)) for c in columns),
    ]
    for metric in metrics
  ]
  return web_page.table(
    ["", *(_split_name(c) for c in columns)], [["step", *steps], *rows]
  )


def _times(path: epath.Path) -> _Parts:
  """Returns wall time by cause: productive time, then losses by size."""
  attempts = _read_if_there(lambda: goodput.read(path))
  if not attempts:
    return []
  account = goodput.account(attempts)
  several = f" in {account.attempts} attempts" if account.attempts > 1 else ""
  wall = max(account.wall_seconds, 1e-9)
  rows = [
    (cause.value, f"{seconds:,.1f}", f"{seconds / wall:.1%}")
    for cause, seconds in account.sort_by_size()
  ]
  return [
    _element("h2", "Time"),
    _note(
      f"Goodput {account.goodput:.1%} of {account.wall_seconds:,.1f} s"
      f"{several}: the share of wall time spent on training steps that count."
    ),
    web_page.table(("", "seconds", "share"), rows),
  ]


def _spikes(path: epath.Path) -> _Parts:
  found = _read_if_there(
    lambda: files.read_json_lines(path, _to_spike, kind="spike")
  )
  if not found:
    return []
  newest = found[-_MAX_SPIKES:]
  more = f"The newest {len(newest)} of {len(found)}. "
  items = [
    _element(
      "li",
      f"Step {spike['step']:,}: {metrics_file.to_words(spike['metric'])}"
      f" {_number(spike['value'])}, expected {_number(spike['expected'])}."
      f" Batch: {_batch(spike)}",
    )
    for spike in reversed(newest)
  ]
  return [
    _element("h2", "Spikes"),
    _note(
      f"{more if len(newest) < len(found) else ''}{run_dir_lib.SPIKES} has the"
      " whole data positions."
    ),
    _element("ul", *items),
  ]


def _to_spike(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a spike, without the module `spikes` and JAX."""
  return {
    "step": int(fields["step"]),
    "metric": str(fields["metric"]),
    "value": float(fields["value"]),
    "expected": float(fields["expected"]),
    "position": fields["position_before"],
    "documents": [int(each) for each in fields.get("documents") or ()],
  }


def _batch(spike: Mapping[str, Any]) -> str:
  """Returns the documents of a batch and the data position before it."""
  text = json.dumps(spike["position"])
  position = f"data position {_shorten(text, _MAX_POSITION)}"
  documents = spike["documents"]
  if not documents:
    return position
  first = ", ".join(map(str, documents[:_MAX_DOCUMENTS]))
  more = ", …" if len(documents) > _MAX_DOCUMENTS else ""
  return f"documents {first}{more}; {position}"


def _samples(root: epath.Path) -> _Parts:
  """Returns generated texts, the last step's first and open."""
  path, single = root / run_dir_lib.SAMPLES_BY_STEP, root / run_dir_lib.SAMPLES
  texts = _read_if_there(lambda: sample_file.read(path))
  if texts is None:
    only = _read(single)
    return [_element("h2", "Samples"), _text(only)] if only else []
  shown = []
  for each in reversed(texts):
    details = web_page.details(f"Step {each.step:,}", _text(each.text))
    assert details is not None
    shown.append(details)
  for first in shown[:1]:
    first.set("open", "open")
  return [_element("h2", "Samples by step"), *shown] if shown else []


def _examples(path: epath.Path) -> _Parts:
  """Returns images and sounds of a split with captions."""

  def read() -> _Parts:
    return files.read_json(path, _figures, kind="examples of a split")

  return _read_if_there(read) or []


def _figures(examples: Mapping[str, Any]) -> _Parts:
  if not examples["examples"]:
    return []
  files.check_type("split", examples["split"], str)
  files.check_type("step", examples["step"], int)
  figures = []
  for each in examples["examples"]:
    files.check_type("caption", each["caption"], str)
    media = []
    for kind in ("image", "audio"):
      # A page loads nothing from elsewhere.
      if each.get(kind) and not each[kind].startswith("data:"):
        raise ValueError(f"its {kind} is not a data: URL")
    if each.get("image"):
      media.append(_element("img", src=each["image"], alt=each["caption"]))
    if each.get("audio"):
      media.append(_element("audio", src=each["audio"], controls="controls"))
    caption = _element("figcaption", each["caption"])
    figures.append(_element("figure", *media, caption))
  return [
    _element("h2", "Examples"),
    _note(f"{examples['split']}, step {examples['step']:,}"),
    _element("div", *figures, class_="figures"),
  ]


def _configuration(path: epath.Path) -> _Parts:
  text = _read(path)
  if not text:
    return []
  summary = f"Show all {len(text.splitlines())} lines"
  return [
    _element("h2", "Configuration"),
    web_page.details(summary, _element("pre", text)),
  ]


def _read(path: epath.Path) -> str:
  data = _read_if_there(lambda: files.read_bytes(path))
  return (data or b"").decode(errors="replace")


def _read_if_there(read: Callable[[], _T]) -> _T | None:
  """Returns the content; None if the file does not exist."""
  try:
    return read()
  except FileNotFoundError:
    return None


def _text(text: str) -> web_page.Element:
  return _element("pre", _shorten(text, _MAX_TEXT))


def _shorten(text: str, limit: int) -> str:
  return text if len(text) <= limit else text[:limit] + " …"


def _note(text: str) -> web_page.Element:
  return _element("p", text, class_="soft")


def _split_name(record: Record) -> str:
  name = record.split.removeprefix(metrics_file.BASELINE_PREFIX)
  return f"{name} (baseline)" if metrics_file.is_baseline(record) else name


def _with_unit(metric: str, value: float | None) -> str:
  if value is None or not math.isfinite(value):
    return _number(value)
  if metric in _SHARES:
    return f"{value:.1%}"
  if metric.endswith("_bytes"):
    return f"{value / _MIB:,.0f} MiB" if value >= _MIB else f"{value:,.0f} B"
  return _number(value)


def _number(value: float | None) -> str:
  if value is None:
    return ""
  if not math.isfinite(value):
    return str(value)
  if abs(value) >= 1000:
    return f"{value:,.0f}"
  if value == 0:
    return "0"
  return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3e}"
