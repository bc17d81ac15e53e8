"""`report.html`: the curves, metrics, samples and configuration of a run.

One self-contained page made from the other files of a run directory, so that
it can be generated again at any time.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import json
import math
import os
import time
from typing import Any

from etils import epath

from paxon.runner import files, web_page
from paxon.runner import run_dir as run_dir_lib
from paxon.runner.monitoring import (
  goodput,
  line_chart,
  metric_chart,
  metrics_file,
)
from paxon.runner.monitoring import spikes as spikes_lib

_TRAIN = "train"
_MAIN_CHARTS = ("loss", "bits_per_byte")
_SMALL_CHARTS = ("learning_rate", "grad_norm", metrics_file.RATE, "mfu")
_SHARES = ("goodput", "mfu")
_MIB = 2.0**20

_element = web_page.element


def write(run_dir: epath.PathLike) -> epath.Path:
  """Writes the report of a run directory and returns its path."""
  folder = epath.Path(run_dir)
  path = folder / run_dir_lib.REPORT
  times, spikes = folder / run_dir_lib.GOODPUT, folder / run_dir_lib.SPIKES
  attempts = goodput.read(times) if times.exists() else []
  page = make(
    metrics_file.read_run(folder),
    account=goodput.account(attempts) if attempts else None,
    spikes=spikes_lib.read(spikes) if spikes.exists() else (),
    sample=_read(folder / run_dir_lib.SAMPLES),
    config=_read(folder / run_dir_lib.CONFIG_TEXT),
    folder=folder.name,
    examples=_read_examples(folder / run_dir_lib.EXAMPLES),
  )
  files.write_text(path, page)
  return path


class ReportFile(metrics_file.SummaryWriter):
  """Writes the report while a run trains: at its first metrics, then paced.

  It reads the files of the other writers, so it must come after them. A file
  that cannot be read or written leaves the report as it was, and the run
  continues.
  """

  def __init__(
    self,
    run_dir: epath.PathLike,
    *,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._run_dir = run_dir
    self._pace = files.FlushPace(clock)
    self._is_written = False

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Writes the report at the first call and when the pace allows."""
    del step, split, values  # Of the files.
    if not self._is_written or self._pace.is_due():
      self._is_written = True
      self._pace.run(self.close)

  def close(self) -> None:
    """Writes the report."""
    with contextlib.suppress(OSError, files.DamagedFileError):
      write(self._run_dir)


def make(
  records: Sequence[metrics_file.Record],
  *,
  account: goodput.Account | None = None,
  spikes: Sequence[spikes_lib.Spike] = (),
  sample: str = "",
  config: str = "",
  folder: str = "",
  examples: Mapping[str, Any] | None = None,
) -> str:
  """Returns the page.

  Args:
    records: Metrics of the run.
    account: Where its time went.
    spikes: Spikes of its metrics.
    sample: Text that the model generated.
    config: The configuration, as text.
    folder: Name of the run directory.
    examples: Content of `run_dir.EXAMPLES`.
  """
  experiment = _experiment(config)
  steps = max((r.step for r in records), default=0)
  subtitle = (experiment, folder, f"{steps:,} steps")
  parts: list[web_page.Content] = [
    _note(" · ".join(part for part in subtitle if part)),
    *_charts(records),
    *_table(records),
    *_times(account),
    *_spikes(spikes),
  ]
  parts += _examples(examples)
  if sample:
    parts += [_element("h2", "Sample"), _element("pre", sample)]
  if config:
    summary = f"Show all {len(config.splitlines())} lines"
    parts.append(_element("h2", "Configuration"))
    parts.append(web_page.details(summary, _element("pre", config)))
  title = experiment.rpartition(".")[2] or folder or "Training run"
  return web_page.page(title, *parts)


def _charts(records: Sequence[metrics_file.Record]) -> list[web_page.Content]:
  parts: list[web_page.Content] = []
  for metric in _MAIN_CHARTS:
    chart = line_chart.draw(
      metric_chart.make_series(records, metric),
      title=metric_chart.to_words(metric),
      levels=metric_chart.read_levels(records, metric),
    )
    if chart is not None:
      parts += [
        _element("h2", metric_chart.to_words(metric).capitalize()),
        chart,
      ]
  trained = {
    name: None for r in records if r.split == _TRAIN for name in r.values
  }
  rates = list(filter(metrics_file.is_rate, trained))
  small = [
    line_chart.draw(
      metric_chart.make_series(records, metric),
      title=metric_chart.to_words(metric),
      width=560,
      height=260,
    )
    for each in _SMALL_CHARTS
    for metric in (rates if each == metrics_file.RATE else [each])
  ]
  grid = [_element("div", chart) for chart in small if chart is not None]
  if grid:
    parts.append(_element("h2", "Training"))
    parts.append(_element("div", *grid, class_="grid"))
  return parts or [_note("No metrics have been written yet.")]


def _table(records: Sequence[metrics_file.Record]) -> list[web_page.Content]:
  """Returns the last metrics of each split, and the baselines."""
  last: dict[str, metrics_file.Record] = {}
  for record in sorted(records, key=lambda r: r.step):
    last[record.split] = record
  columns = [last[s] for s in sorted(last, key=lambda s: (s == _TRAIN, s))]
  columns.sort(key=metric_chart.is_baseline)
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
  columns: Sequence[metrics_file.Record], metrics: Sequence[str]
) -> web_page.Element | None:
  """Returns a table with a column for each record."""
  steps = [
    "" if metric_chart.is_baseline(c) else f"{c.step:,}" for c in columns
  ]
  rows = [
    [
      metric_chart.to_words(metric.removesuffix("_bytes")),
      *(_with_unit(metric, c.values.get(metric)) for c in columns),
    ]
    for metric in metrics
  ]
  return web_page.table(
    ["", *(_split_name(c) for c in columns)], [["step", *steps], *rows]
  )


def _times(account: goodput.Account | None) -> list[web_page.Content]:
  """Returns wall time by cause: productive time, then losses by size."""
  if account is None:
    return []
  attempts = f" in {account.attempts} attempts" if account.attempts > 1 else ""
  wall = max(account.wall_seconds, 1e-9)
  rows = [
    (cause.value, f"{seconds:,.1f}", f"{seconds / wall:.1%}")
    for cause, seconds in account.by_size()
  ]
  return [
    _element("h2", "Time"),
    _note(
      f"Goodput {account.goodput:.1%} of {account.wall_seconds:,.1f} s"
      f"{attempts}: the share of wall time spent on training steps that count."
    ),
    web_page.table(("", "seconds", "share"), rows),
  ]


def _spikes(spikes: Sequence[spikes_lib.Spike]) -> list[web_page.Content]:
  if not spikes:
    return []
  rows = [
    (
      f"{spike.step:,}",
      metric_chart.to_words(spike.metric),
      _number(spike.value),
      _number(spike.expected),
    )
    for spike in spikes
  ]
  return [
    _element("h2", "Spikes"),
    _note(f"{run_dir_lib.SPIKES} lists the data position of their batches."),
    web_page.table(("step", "metric", "value", "expected"), rows),
  ]


def _examples(examples: Mapping[str, Any] | None) -> list[web_page.Content]:
  """Returns images and sounds of a split with captions."""
  if not examples or not examples["examples"]:
    return []
  figures = []
  for each in examples["examples"]:
    media = []
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


def _note(text: str) -> web_page.Element:
  return _element("p", text, class_="soft")


def _split_name(record: metrics_file.Record) -> str:
  name = record.split.removeprefix(metrics_file.BASELINE_PREFIX)
  return f"{name} (baseline)" if metric_chart.is_baseline(record) else name


def _experiment(config: str) -> str:
  """Returns the experiment's name from the text of a configuration."""
  for line in config.splitlines():
    name, equals, value = line.partition(" = ")
    if name == "experiment" and equals:
      return str(json.loads(value))
  return ""


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


def _read_examples(path: epath.Path) -> Mapping[str, Any] | None:
  text = _read(path)
  try:
    return json.loads(text) if text else None
  except ValueError as error:
    raise files.DamagedFileError(
      f"{os.fspath(path)} is damaged ({error}); delete it."
    ) from error


def _read(path: epath.Path) -> str:
  return path.read_text() if path.exists() else ""
