"""`report.html`: the curves, figures, sample and configuration of a run.

One file that needs no network, made from the other files of a run's folder, so
it can be made again at any time.
"""

from collections.abc import Sequence
import html
import json
import math

from etils import epath

from paxon.runner import files
from paxon.runner import run_dir as run_dir_lib
from paxon.runner.monitoring import (
  goodput,
  line_chart,
  metrics_file,
  summary_writer,
)
from paxon.runner.monitoring import spikes as spikes_lib

_TRAIN = "train"
_MAIN_CHARTS = ("loss", "bits_per_byte")
_SMALL_CHARTS = ("learning_rate", "grad_norm", "tokens_per_second", "mfu")
_SHARES = ("goodput", "mfu")
_MIB = 2.0**20
_STYLES = 4

_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --page: #ffffff; --panel: #f6f8fa; --train: #7a93b8;
  --eval0: #c2410c; --eval1: #15803d; --eval2: #7c3aed; --eval3: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3;
  --soft: #9198a1; --line: #3d444d; --page: #0d1117; --panel: #151b23;
  --train: #6c8ebf; --eval0: #fb923c; --eval1: #4ade80; --eval2: #c4b5fd;
  --eval3: #67e8f9; } }
body { margin: 2rem auto; max-width: 860px; padding: 0 1rem;
  font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2rem; }
.soft { color: var(--soft); }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; color: var(--soft); }
pre { overflow-x: auto; padding: 1rem; border: 1px solid var(--line);
  border-radius: 6px; background: var(--panel); font-size: 13px; }
summary { cursor: pointer; }
.small { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); }
svg .name { fill: var(--ink); }
svg .grid { stroke: var(--line); stroke-width: .6; }
svg .axis { stroke: var(--soft); }
svg .level { stroke: var(--soft); stroke-dasharray: 6 4; }
svg text.level { stroke: none; }
svg .curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .label { font-weight: 600; }
"""


def write(run_dir: epath.PathLike) -> epath.Path:
  """Writes the report of a run and returns its path.

  Args:
    run_dir: The folder with `metrics.jsonl` and, where there are,
      `eval/metrics.jsonl`, `goodput.jsonl`, `spikes.jsonl`, `samples.txt` and
      `config.txt`.

  Raises:
    ValueError: The metrics are damaged.
  """
  folder = epath.Path(run_dir)
  path = folder / run_dir_lib.REPORT
  times, jumps = folder / run_dir_lib.GOODPUT, folder / run_dir_lib.SPIKES
  attempts = goodput.read(times) if times.exists() else []
  page = make(
    metrics_file.read_run(folder),
    account=goodput.account(attempts) if attempts else None,
    spikes=spikes_lib.read(jumps) if jumps.exists() else (),
    sample=_read(folder / run_dir_lib.SAMPLES),
    config=_read(folder / run_dir_lib.CONFIG_TEXT),
    folder=folder.name,
  )
  files.write_text(path, page)
  return path


def make(
  records: Sequence[metrics_file.Record],
  *,
  account: goodput.Account | None = None,
  spikes: Sequence[spikes_lib.Spike] = (),
  sample: str = "",
  config: str = "",
  folder: str = "",
) -> str:
  """Returns the page.

  Args:
    records: The lines of `metrics.jsonl`.
    account: Where the time went.
    spikes: Jumps of the loss or the gradient.
    sample: Text that the model wrote.
    config: The resolved configuration, as `dump.to_text` writes it.
    folder: The name of the run's folder.
  """
  experiment = _experiment(config)
  title = experiment.rpartition(".")[2] or folder or "A run"
  parts = [
    "<!doctype html>",
    '<html lang="en"><head><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f"<title>{_escape(title)}</title><style>{_CSS}{_curve_css()}</style>",
    f"</head><body><h1>{_escape(title)}</h1>",
    f'<p class="soft">{_escape(_subtitle(experiment, folder, records))}</p>',
    *_charts(records),
    *_table(records),
    *_times(account),
    *_spikes(spikes),
  ]
  if sample:
    parts.append(f"<h2>Sample</h2><pre>{_escape(sample)}</pre>")
  if config:
    parts.append(
      "<h2>Configuration</h2><details><summary>Show all"
      f" {len(config.splitlines())} lines</summary>"
      f"<pre>{_escape(config)}</pre></details>"
    )
  return "\n".join([*parts, "</body></html>"]) + "\n"


def _charts(records: Sequence[metrics_file.Record]) -> list[str]:
  parts = []
  baselines = _baselines(records)
  for metric in _MAIN_CHARTS:
    levels = {
      name: values[metric]
      for name, values in baselines.items()
      if metric in values
    }
    chart = line_chart.draw(
      _series(records, metric), title=_words(metric), levels=levels
    )
    if chart:
      parts.append(f"<h2>{_words(metric).capitalize()}</h2>{chart}")
  small = [
    line_chart.draw(
      _series(records, metric), title=_words(metric), width=560, height=260
    )
    for metric in _SMALL_CHARTS
  ]
  small = [f"<div>{chart}</div>" for chart in small if chart]
  if small:
    parts.append('<h2>Training</h2><div class="small">')
    parts += [*small, "</div>"]
  return parts or ['<p class="soft">No figures were written yet.</p>']


def _series(
  records: Sequence[metrics_file.Record], metric: str
) -> list[line_chart.Series]:
  """Returns the curve of each split; `train` is drawn first, below others."""
  points: dict[str, list[tuple[float, float]]] = {}
  for record in sorted(records, key=lambda r: (r.split != _TRAIN, r.step)):
    if metric in record.values and not _is_baseline(record):
      point = float(record.step), record.values[metric]
      points.setdefault(record.split, []).append(point)
  evaluated = sorted(split for split in points if split != _TRAIN)
  styles = {s: f"eval{i % _STYLES}" for i, s in enumerate(evaluated)}
  return [
    line_chart.Series(split, values, styles.get(split, "train"))
    for split, values in points.items()
  ]


def _table(records: Sequence[metrics_file.Record]) -> list[str]:
  """Returns the last figures of each split, and the baselines."""
  last: dict[str, metrics_file.Record] = {}
  for record in sorted(records, key=lambda r: r.step):
    last[record.split] = record
  rows = [last[s] for s in sorted(last, key=lambda s: (s == _TRAIN, s))]
  rows.sort(key=_is_baseline)
  if not rows:
    return []
  metrics = list(dict.fromkeys(name for row in rows for name in row.values))
  parts = ["<h2>Final figures</h2>"]
  parts += _figures(rows, [name for name in metrics if "/" not in name])
  # Of each layer or group of variables: there may be hundreds.
  many = [name for name in metrics if "/" in name]
  if many:
    parts.append(f"<details><summary>Show {len(many)} figures of parts of the")
    parts += ["model</summary>", *_figures(rows, many), "</details>"]
  return parts


def _figures(
  rows: Sequence[metrics_file.Record], metrics: Sequence[str]
) -> list[str]:
  """Returns a table with a column for each record."""
  parts = ['<div class="table"><table>']
  parts.append(_row("", [_split_name(row) for row in rows], "th"))
  steps = ["" if _is_baseline(row) else f"{row.step:,}" for row in rows]
  parts.append(_row("step", steps))
  for metric in metrics:
    cells = [_shown(metric, row.values.get(metric)) for row in rows]
    parts.append(_row(_words(metric.removesuffix("_bytes")), cells))
  return [*parts, "</table></div>"]


def _times(account: goodput.Account | None) -> list[str]:
  """Returns where the time went: the productive time, then losses by size."""
  if account is None:
    return []
  attempts = f" in {account.attempts} attempts" if account.attempts > 1 else ""
  parts = [
    "<h2>Time</h2>",
    f'<p class="soft">Goodput {account.goodput:.1%} of'
    f" {account.wall_seconds:,.1f} s{attempts}: the share of wall time spent on"
    " steps that count.</p>",
    '<div class="table"><table>',
    _row("", ["seconds", "share"], "th"),
  ]
  for cause, seconds in account.by_size():
    share = seconds / max(account.wall_seconds, 1e-9)
    parts.append(_row(cause.value, [f"{seconds:,.1f}", f"{share:.1%}"]))
  return [*parts, "</table></div>"]


def _spikes(spikes: Sequence[spikes_lib.Spike]) -> list[str]:
  if not spikes:
    return []
  parts = [
    "<h2>Spikes</h2>",
    f'<p class="soft">Their batches are named in {run_dir_lib.SPIKES}.</p>',
    '<div class="table"><table>',
    _row("step", ["metric", "value", "expected"], "th"),
  ]
  for spike in spikes:
    numbers = [_figure(spike.value), _figure(spike.expected)]
    parts.append(_row(f"{spike.step:,}", [_words(spike.metric), *numbers]))
  return [*parts, "</table></div>"]


def _row(head: str, cells: Sequence[str], tag: str = "td") -> str:
  columns = "".join(f"<{tag}>{_escape(cell)}</{tag}>" for cell in cells)
  return f"<tr><th>{_escape(head)}</th>{columns}</tr>"


def _split_name(record: metrics_file.Record) -> str:
  name = record.split.removeprefix(summary_writer.BASELINE_PREFIX)
  return f"{name} (baseline)" if _is_baseline(record) else name


def _baselines(
  records: Sequence[metrics_file.Record],
) -> dict[str, dict[str, float]]:
  return {
    r.split.removeprefix(summary_writer.BASELINE_PREFIX): dict(r.values)
    for r in records
    if _is_baseline(r)
  }


def _is_baseline(record: metrics_file.Record) -> bool:
  return record.split.startswith(summary_writer.BASELINE_PREFIX)


def _subtitle(
  experiment: str, folder: str, records: Sequence[metrics_file.Record]
) -> str:
  steps = max((r.step for r in records), default=0)
  return " · ".join(p for p in (experiment, folder, f"{steps:,} steps") if p)


def _experiment(config: str) -> str:
  """Returns the experiment's name from the text of a configuration."""
  for line in config.splitlines():
    name, equals, value = line.partition(" = ")
    if name == "experiment" and equals:
      return str(json.loads(value))
  return ""


def _shown(metric: str, value: float | None) -> str:
  """Returns a figure in the unit that suits it."""
  if value is None or not math.isfinite(value):
    return _figure(value)
  if metric in _SHARES:
    return f"{value:.1%}"
  if metric.endswith("_bytes"):
    return f"{value / _MIB:,.0f} MiB" if value >= _MIB else f"{value:,.0f} B"
  return _figure(value)


def _figure(value: float | None) -> str:
  if value is None:
    return ""
  if not math.isfinite(value):
    return str(value)
  if abs(value) >= 1000:
    return f"{value:,.0f}"
  if value == 0:
    return "0"
  return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3e}"


def _words(metric: str) -> str:
  return metric.replace("_", " ")


def _curve_css() -> str:
  names = ["train", *(f"eval{i}" for i in range(_STYLES))]
  return "".join(
    f"svg .curve.{n} {{ stroke: var(--{n}); }}"
    f" svg .dot.{n}, svg text.label.{n} {{ fill: var(--{n}); }}\n"
    for n in names
  )


def _escape(text: str) -> str:
  # Bytes of a model may decode to control characters, which HTML forbids.
  clean = "".join(
    c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "\ufffd"
    for c in text
  )
  return html.escape(clean)


def _read(path: epath.Path) -> str:
  return path.read_text() if path.exists() else ""
