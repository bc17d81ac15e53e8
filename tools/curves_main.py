"""`tools/curves`: a page with the convergence curves of runs.

  tools/curves PAGE [--run=DIR ...] [--folder=DIR --exp=EXPERIMENT ...
    [--launcher=COMMAND] [--fdl.KNOB=VALUE ...]]

PAGE is a Markdown file. Its text up to the line "<!-- tools/curves -->" is
kept; below come a table with a row per run, and a chart of `log_pplx` for each
split, an SVG file next to the page.

Each --exp is trained in its own run directory of --folder, named by its class,
with all --fdl. overrides: a stopped run resumes, and a finished one is not
trained again. `--launcher='srun --nodes=16'` starts each training on a cluster;
without it, training uses the devices of this machine. --run adds a run that was
trained by any other means. Run directories may be in object stores: of a run,
only its metrics, its configuration, and the metadata of its newest checkpoint
are read, on one machine and without accelerators.
"""

import argparse
import ast
from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import itertools
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
from typing import Final

from etils import epath
import jax

import paxon
from paxon.runner import files, run_dir, user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.configuration import overrides
from paxon.runner.monitoring import curves, metric_chart, metrics_file
from paxon.tools import command_line, console_scripts

_METRIC: Final = "log_pplx"
_TRAIN: Final = "train"
_MARK: Final = "<!-- tools/curves -->"
_MAX_LINES: Final = 20_000
# Of training, where each value is that of one batch.
_AVERAGED: Final = 10
_EMBEDDINGS: Final = ("embedding", "position_embedding", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """A run as the page shows it.

  Attributes:
    checkpoint: Its newest checkpoint.
    config: Its configuration; values as text by path.
    records: Its metrics by step, without baselines.
  """

  checkpoint: stored_checkpoint.StoredCheckpoint
  config: Mapping[str, str]
  records: Sequence[metrics_file.Record]

  def count_parameters(self) -> tuple[int, int]:
    """Returns the number of parameters, and that without embeddings."""
    sizes = [
      (name.split("/")[1] in _EMBEDDINGS, array.size)
      for name, array in self.checkpoint.variables().items()
      if name.startswith("params/")
    ]
    return sum(n for _, n in sizes), sum(n for is_in, n in sizes if not is_in)

  def count_tokens(self) -> int:
    """Returns the number of training tokens up to the checkpoint."""
    batch, length = (
      int(self.config[f"train_input.{name}"])
      for name in ("global_batch_size", "length")
    )
    step, tokens = self.checkpoint.step, 0
    ramp = ast.literal_eval(self.config["batch_ramp"])
    ends = [(0, 0), *ramp, (step, batch)]
    for (begin, _), (end, size) in itertools.pairwise(ends):
      tokens += max(0, min(end, step) - begin) * size * length
    return tokens

  def read_final(self, split: str) -> float | None:
    """Returns the last value of a split; of training, the mean of the last."""
    values = [
      each.values[_METRIC]
      for each in self.records
      if each.split == split and _METRIC in each.values
    ]
    count = _AVERAGED if split == _TRAIN else 1
    return statistics.fmean(values[-count:]) if values else None


def read_curve(folder: epath.Path) -> Curve:
  """Returns a run.

  Raises:
    user_error.UserError: It has no checkpoint, no configuration, or no value of
      the metric.
  """
  checkpoint = stored_checkpoint.find_checkpoint(folder)
  config = stored_checkpoint.read_config(folder)
  records = [
    each
    for each in curves.read(folder, max_lines=_MAX_LINES)
    if not metrics_file.is_baseline(each) and _METRIC in each.values
  ]
  if config is None or not records:
    missing = run_dir.CONFIG_TEXT if config is None else f"metric {_METRIC}"
    raise user_error.UserError(f"The run {os.fspath(folder)} has no {missing}.")
  return Curve(checkpoint=checkpoint, config=config, records=records)


def train(
  experiment: str, folder: epath.Path, launcher: str, given: Sequence[str]
) -> None:
  """Trains or resumes a run.

  Args:
    experiment: The experiment, as for `--exp`.
    folder: The run directory.
    launcher: Command to which that of the training is appended.
    given: More arguments of the training.

  Raises:
    user_error.UserError: The training failed.
  """
  command = [*shlex.split(launcher), sys.executable, "-m", "paxon.runner.main"]
  command += [f"--exp={experiment}", "--mode=train"]
  command += [f"--job_log_dir={os.fspath(folder)}", *given]
  print(shlex.join(command), flush=True)
  status = subprocess.run(command, check=False).returncode
  if status:
    raise user_error.UserError(
      f"The training of {experiment} ended with status {status}; run the"
      " command again to resume it."
    )


def write(page: pathlib.Path, runs: Mapping[str, Curve], command: str) -> None:
  """Writes the page and its charts.

  Args:
    page: Path of the page.
    runs: The runs by name.
    command: The command line, which the page shows.
  """
  before = page.read_text() if page.exists() else "# Convergence\n\n"
  splits = list(
    dict.fromkeys(r.split for c in runs.values() for r in c.records)
  )
  splits.sort(key=lambda split: split != _TRAIN)
  lines = [before.partition(_MARK)[0] + _MARK, "", *_describe(runs, command)]
  lines += ["", *_format_table(runs, splits)]
  for split in splits:
    chart = metric_chart.make(
      {
        name: [each for each in curve.records if each.split == split]
        for name, curve in runs.items()
      },
      _METRIC,
    )
    path = page.with_name(f"{page.stem}_{split.replace('/', '_')}.svg")
    chart.save(path)
    lines += ["", f"![{_METRIC} of {split} by step]({path.name})"]
  files.write_text(page, "\n".join(lines) + "\n")


def _describe(runs: Mapping[str, Curve], command: str) -> list[str]:
  newest = max(curve.checkpoint.time for curve in runs.values())
  date = datetime.datetime.fromtimestamp(newest, datetime.UTC).date()
  return [
    f"Newest checkpoint of {date}; page made by paxon {paxon.__version__}, jax"
    f" {jax.__version__}, Python {platform.python_version()}:",
    *("", "```", command, "```", ""),
    f"`{_METRIC}` is the mean cross entropy in nats per token. That of training"
    f" is the mean of the last {_AVERAGED} logged batches, others are of the"
    " last evaluation.",
  ]


def _format_table(
  runs: Mapping[str, Curve], splits: Sequence[str]
) -> list[str]:
  titles = ["run", "parameters", "without embeddings", "steps", "tokens"]
  rows = [[*titles, *(f"{_METRIC}, {split}" for split in splits)]]
  rows += [["---"] * len(rows[0])]
  for name, curve in runs.items():
    counts = *curve.count_parameters(), curve.checkpoint.step
    finals = [curve.read_final(split) for split in splits]
    rows.append(
      [
        f"`{name}`",
        *(f"{each:,}" for each in (*counts, curve.count_tokens())),
        *("-" if each is None else f"{each:.4f}" for each in finals),
      ]
    )
  return [f"| {' | '.join(row)} |" for row in rows]


def main(argv: Sequence[str]) -> int:
  """Trains runs and writes the page; returns the exit status."""
  return command_line.catch_user_errors(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  description = console_scripts.name_programs(__doc__ or "")
  parser = command_line.Parser("curves", description)
  parser.prog = console_scripts.name_programs("tools/curves")
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("page", metavar="PAGE", type=pathlib.Path)
  parser.add_argument("--run", action="append", default=[])
  parser.add_argument("--folder")
  parser.add_argument("--exp", action="append", default=[])
  parser.add_argument("--launcher", default="")
  given, others = parser.parse_known_args(list(argv))
  for argument in others:
    if not argument.startswith(f"--{overrides.PREFIX}"):
      parser.error(f"unknown argument {argument}")
  if not given.exp and (others or given.launcher or not given.run):
    parser.error("--exp is required, or --run of a trained run")
  if bool(given.exp) != bool(given.folder):
    parser.error("--exp and --folder belong together")
  places = [
    (os.path.join(given.folder, each.rpartition(".")[2]), each)
    for each in given.exp
  ]
  runs = {}
  for place, experiment in [*places, *((each, None) for each in given.run)]:
    folder = run_dir.resolve(place, os.environ)
    if folder.name in runs:
      parser.error(f"two runs are called {folder.name}")
    if experiment is not None:
      train(experiment, folder, given.launcher, others)
    runs[folder.name] = read_curve(folder)
  write(given.page, runs, shlex.join([parser.prog, *argv]))
  return 0


if __name__ == "__main__":
  command_line.run(main)
