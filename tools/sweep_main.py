"""Sweeps over the knobs of an experiment.

  tools/sweep STUDY --exp=EXPERIMENT
    --knob='learning_rate=log:1e-4:1e-2' --knob='width=64,128'
    [--algorithm=grid|random|asha] [--trials=20] [--metric=train/loss]
    [--rungs=100,300] [--reduction=3] [--seed=0] [--fdl.KNOB=VALUE ...]

STUDY is a folder. Each trial is an ordinary run in STUDY/trial_0000, and so on;
trials run one after another. Rerun a stopped command, or only `tools/sweep
STUDY`, to resume the study: the table is the same as without the interruption.
The results are in STUDY/table.txt and STUDY/report.html.

A knob has comma-separated choices, or a range: `log:LOW:HIGH`,
`uniform:LOW:HIGH`, or `int:LOW:HIGH` with both ends. `grid` tries all
combinations of choices; `random` and `asha` draw `--trials` of them.

`asha` stops trials early, as the stopping variant of asynchronous successive
halving (Li et al. 2020, https://arxiv.org/abs/1810.05934): with n values at a
rung, that of the trial itself included, a trial continues if its value is one
of the best max(1, n // reduction). A rung is a step; its value is the first
one logged at or after it. The smallest value is the best.
"""

import argparse
from collections.abc import Sequence
import ctypes
import dataclasses
import html
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

from paxon.runner import files, user_error
from paxon.tools import command_line, console_scripts

_POLL_SECONDS = 0.05
_RANGES = ("log", "uniform", "int")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2).


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """What a study tries; stored in its folder.

  Attributes:
    exp: The experiment.
    knobs: Names and ranges, such as `("width", "64,128")`.
    algorithm: grid, random or asha.
    trials: Number of trials; of a grid, the number of combinations.
    metric: Split and name of the metric to minimize, `train/loss`.
    rungs: Steps at which `asha` compares trials.
    reduction: One of how many trials continues after a rung.
    seed: Of the drawn values.
    program: Module that runs a trial.
    arguments: More arguments of each trial.
  """

  exp: str
  knobs: tuple[tuple[str, str], ...]
  algorithm: str
  trials: int
  metric: str
  rungs: tuple[int, ...]
  reduction: int
  seed: int
  program: str
  arguments: tuple[str, ...]

  def __post_init__(self) -> None:
    if not self.knobs:
      raise user_error.UserError("--knob is required, such as width=64,128.")
    names = [name for name, _ in self.knobs]
    if repeated := {name for name in names if names.count(name) > 1}:
      raise user_error.UserError(f"--knob={min(repeated)} is given twice.")
    for name, text in self.knobs:
      _check_range(name, text, is_grid=self.algorithm == "grid")
    if self.trials < 1:
      raise user_error.UserError(
        f"--trials must be positive, got {self.trials}."
      )
    if self.reduction < 2:
      raise user_error.UserError(
        f"--reduction must be at least 2, got {self.reduction}."
      )
    if (self.algorithm == "asha") != bool(self.rungs):
      raise user_error.UserError(
        "--rungs is required with --algorithm=asha, and only with it."
      )
    if list(self.rungs) != sorted(set(self.rungs)) or min((1, *self.rungs)) < 1:
      raise user_error.UserError(
        f"--rungs must be positive and increasing, got {self.rungs}."
      )
    if not all(self.metric.rpartition("/")):
      raise user_error.UserError(
        f"--metric must be SPLIT/NAME, such as train/loss, got {self.metric!r}."
      )

  def points(self) -> list[dict[str, str]]:
    """Returns the knobs of each trial, as text."""
    names = [name for name, _ in self.knobs]
    if self.algorithm == "grid":
      choices = [text.split(",") for _, text in self.knobs]
      return [
        dict(zip(names, point, strict=True))
        for point in itertools.product(*choices)
      ]
    return [
      # Each value has its own generator: more trials or knobs change no other.
      {
        name: _draw(text, random.Random(f"{self.seed}/{name}/{number}"))
        for name, text in self.knobs
      }
      for number in range(self.trials)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The outcome of one trial.

  Attributes:
    status: finished, stopped (at a rung) or failed.
    step: The step of `value`.
    value: The metric; infinite if it was not finite, or the trial failed.
    rungs: Values by rung, for later trials.
  """

  status: str
  step: int
  value: float
  rungs: dict[str, float]


def _check_range(name: str, text: str, *, is_grid: bool) -> None:
  kind, *ends = text.split(":")
  if not name.isidentifier() or not all(text.split(",")):
    raise user_error.UserError(
      f"--knob={name}={text} must be NAME=A,B or NAME=log:LOW:HIGH."
    )
  if kind not in _RANGES:
    return
  if is_grid:
    raise user_error.UserError(
      f"--knob={name}={text}: --algorithm=grid needs choices, not a range."
    )
  try:
    low, high = (int(end) if kind == "int" else float(end) for end in ends)
  except ValueError:
    low, high = 1, 0
  is_valid = math.isfinite(low) and math.isfinite(high) and low < high
  if not is_valid or (kind == "log" and low <= 0):
    raise user_error.UserError(
      f"--knob={name}={text} must be {kind}:LOW:HIGH with"
      f"{' 0 <' if kind == 'log' else ''} LOW < HIGH."
    )


def _draw(text: str, generator: random.Random) -> str:
  """Draws one value."""
  kind, *ends = text.split(":")
  if kind == "int":
    return str(generator.randint(int(ends[0]), int(ends[1])))
  if kind not in _RANGES:
    return generator.choice(text.split(","))
  low, high = map(float, ends)
  if kind == "log":
    low, high = math.log(low), math.log(high)
    return f"{math.exp(generator.uniform(low, high)):.6g}"
  return f"{generator.uniform(low, high):.6g}"


def run(study: Study, folder: pathlib.Path) -> dict[int, Result]:
  """Runs the trials without a result; returns all results."""
  results: dict[int, Result] = {}
  points = study.points()
  (folder / "results").mkdir(exist_ok=True)
  for number, point in enumerate(points):
    stored = folder / "results" / f"trial_{number:04}.json"
    if stored.exists():
      results[number] = Result(**json.loads(stored.read_text()))
      continue
    results[number] = _run_trial(study, folder, number, point, results)
    files.write_text(
      os.fspath(stored), json.dumps(dataclasses.asdict(results[number]))
    )
    print(f"trial {number}: {results[number].status}", flush=True)
  files.write_text(
    os.fspath(folder / "table.txt"), format_table(points, results)
  )
  files.write_text(
    os.fspath(folder / "report.html"), format_page(points, results)
  )
  return results


def _run_trial(
  study: Study,
  folder: pathlib.Path,
  number: int,
  point: dict[str, str],
  earlier: dict[int, Result],
) -> Result:
  """Runs or resumes one trial until it ends or a rung stops it."""
  run_dir = folder / f"trial_{number:04}"
  log = folder / f"trial_{number:04}.log"
  command = [sys.executable, "-m", study.program, f"--exp={study.exp}"]
  command += ["--mode=train", f"--job_log_dir={run_dir}", *study.arguments]
  command += [f"--fdl.{name}={value}" for name, value in point.items()]
  reached: dict[str, float] = {}
  with log.open("ab") as output:
    child = subprocess.Popen(
      command, stdout=output, stderr=output, preexec_fn=_die_with_parent
    )
    try:
      status = None
      while status is None:
        status = child.poll()
        values = read_values(run_dir / "metrics.jsonl", study.metric)
        stop = _pass_rungs(study, values, earlier, reached)
        if stop is not None:
          return stop
        time.sleep(_POLL_SECONDS)
    finally:
      if child.poll() is None:
        child.kill()
      child.wait()
  if status < 0 or status > 128:
    raise user_error.UserError(
      f"Trial {number} was interrupted (status {status}); run the command"
      " again to resume the study."
    )
  if status == command_line.WRONG_USE:
    lines = log.read_text(errors="replace").strip().splitlines()
    raise user_error.UserError(
      f"Trial {number}: {(lines or ['no output'])[-1]}"
    )
  if status:
    return Result(status="failed", step=0, value=math.inf, rungs=reached)
  if not values:
    raise user_error.UserError(
      f"Trial {number} logged no --metric={study.metric}; see"
      f" {run_dir / 'metrics.jsonl'}."
    )
  step, value = values[-1]
  return Result(status="finished", step=step, value=value, rungs=reached)


def _die_with_parent() -> None:
  # A killed sweep must not leave a trial that writes to the same run.
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _pass_rungs(
  study: Study,
  values: Sequence[tuple[int, float]],
  earlier: dict[int, Result],
  reached: dict[str, float],
) -> Result | None:
  """Adds newly reached rungs; returns the result of a trial that they stop."""
  for rung in study.rungs:
    if str(rung) in reached:
      continue
    found = next((value for step, value in values if step >= rung), None)
    if found is None:
      return None
    reached[str(rung)] = found
    others = [
      result.rungs[str(rung)]
      for result in earlier.values()
      if str(rung) in result.rungs
    ]
    best = max(1, (len(others) + 1) // study.reduction)
    if sum(other <= found for other in others) >= best:
      return Result(status="stopped", step=rung, value=found, rungs=reached)
  return None


def read_values(path: pathlib.Path, metric: str) -> list[tuple[int, float]]:
  """Returns steps and values of a metric; infinity for what is not finite."""
  split, _, name = metric.rpartition("/")
  try:
    text = path.read_text()
  except FileNotFoundError:
    return []
  values = {}
  for line in text.splitlines():
    record = json.loads(line)
    if record["split"] == split and name in record:
      value = float(record[name])
      values[record["step"]] = value if math.isfinite(value) else math.inf
  return sorted(values.items())


def _ranked(results: dict[int, Result]) -> list[tuple[int, Result]]:
  # A value at a later step comes first: trials stopped early are worse.
  return sorted(
    results.items(), key=lambda each: (-each[1].step, each[1].value, each[0])
  )


def format_table(
  points: Sequence[dict[str, str]], results: dict[int, Result]
) -> str:
  """Returns the table, best trial first."""
  lines = [["trial", "status", "step", "value", *points[0]]]
  for number, result in _ranked(results):
    step, value = str(result.step), f"{result.value:.6g}"
    lines.append(
      [str(number), result.status, step, value, *points[number].values()]
    )
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "".join(
    "  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines
  )


def format_page(
  points: Sequence[dict[str, str]], results: dict[int, Result]
) -> str:
  """Returns a self-contained page: parallel coordinates and the table."""
  axes: dict[str, list[Any]] = {
    name: [point[name] for point in points] for name in points[0]
  }
  axes["value"] = [f"{results[n].value:.6g}" for n in range(len(points))]
  places = {name: _place(texts) for name, texts in axes.items()}
  drawn = []
  for index, name in enumerate(axes):
    x = 80 + 160 * index
    drawn.append(
      f'<line x1="{x}" y1="40" x2="{x}" y2="340" stroke="#999"/>'
      f'<text x="{x}" y="20" text-anchor="middle">{html.escape(name)}</text>'
    )
    drawn += [
      f'<text x="{x + 4}" y="{340 - 300 * y:.1f}">{html.escape(text)}</text>'
      for text, y in sorted({*zip(axes[name], places[name], strict=True)})
      if y in (0, 1) or len(set(axes[name])) <= 8
    ]
  for number in range(len(points)):
    line = " ".join(
      f"{80 + 160 * i},{340 - 300 * places[name][number]:.1f}"
      for i, name in enumerate(axes)
    )
    color = f"hsl({240 * (1 - places['value'][number]):.0f} 70% 50%)"
    drawn.append(
      f'<polyline points="{line}" fill="none" stroke="{color}">'
      f"<title>trial {number}</title></polyline>"
    )
  table = html.escape(format_table(points, results))
  return (
    '<!doctype html><meta charset="utf-8"><title>Sweep</title>'
    f'<svg width="{160 * len(axes) + 80}" height="360" font-size="11">'
    f"{''.join(drawn)}</svg><pre>{table}</pre>\n"
  )


def _place(texts: Sequence[str]) -> list[float]:
  """Returns heights in [0, 1]: by rank, of numbers or of text."""
  try:
    ordered = sorted({*texts}, key=float)
  except ValueError:
    ordered = sorted({*texts})
  return [ordered.index(text) / max(1, len(ordered) - 1) for text in texts]


def main(argv: Sequence[str]) -> int:
  """Runs or resumes a study; returns the exit status."""
  try:
    study, folder = _open_study(argv)
    results = run(study, folder)
    print(format_table(study.points(), results), end="")
    print(f"Report: {folder / 'report.html'}")
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return command_line.WRONG_USE
  return 0


def _open_study(argv: Sequence[str]) -> tuple[Study, pathlib.Path]:
  """Returns the study of the command line, or the stored one."""
  description = console_scripts.name_programs(__doc__ or "")
  parser = command_line.Parser("sweep", description)
  parser.prog = console_scripts.name_programs("tools/sweep")
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("folder", metavar="STUDY")
  parser.add_argument("--exp")
  parser.add_argument("--knob", action="append", default=[])
  parser.add_argument(
    "--algorithm", choices=("grid", "random", "asha"), default="random"
  )
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--metric", default="train/loss")
  parser.add_argument("--rungs", default="")
  parser.add_argument("--reduction", type=int, default=3)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--program", default="paxon.runner.main")
  given, arguments = parser.parse_known_args(list(argv))
  folder = pathlib.Path(given.folder).expanduser().absolute()
  settings = folder / "study.json"
  if len(argv) == 1 and settings.exists():
    stored = json.loads(settings.read_text())
    stored["knobs"] = tuple(map(tuple, stored["knobs"]))
    for name in ("rungs", "arguments"):
      stored[name] = tuple(stored[name])
    return Study(**stored), folder
  for argument in arguments:
    if not argument.startswith("--fdl."):
      parser.error(f"unknown argument {argument}")
  if not given.exp:
    parser.error("--exp is required for a new study")
  values: dict[str, Any] = {**vars(given), "arguments": tuple(arguments)}
  del values["folder"], values["knob"]
  values["knobs"] = tuple(
    (name, text) for name, _, text in (k.partition("=") for k in given.knob)
  )
  try:
    values["rungs"] = tuple(map(int, filter(None, given.rungs.split(","))))
  except ValueError:
    parser.error(f"--rungs must be steps such as 100,300, got {given.rungs}")
  study = Study(**values)
  text = json.dumps(dataclasses.asdict(study), indent=2)
  if settings.exists() and settings.read_text() != text:
    raise user_error.UserError(
      f"{folder} has another study; pass only the folder to resume it, or"
      " another folder."
    )
  folder.mkdir(parents=True, exist_ok=True)
  files.write_text(os.fspath(settings), text)
  return study, folder


def run_command_line() -> NoReturn:
  """Runs the program on the process's arguments."""
  command_line.run(main)


if __name__ == "__main__":
  run_command_line()
