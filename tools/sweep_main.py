"""Sweeps over the knobs of an experiment.

  tools/sweep STUDY --exp=EXPERIMENT
    --knob='learning_rate=log:1e-4:1e-2' --knob='width=64,128'
    [--algorithm=grid|random|asha|hyperband|optuna] [--trials=20]
    [--metric=train/loss] [--goal=min|max] [--rungs=100,300] [--reduction=3]
    [--stop_value=STEP:VALUE] [--stop_rank=STEP:RANK] [--seed=0]
    [--fdl.KNOB=VALUE ...]

STUDY is a folder. Each trial is an ordinary run in STUDY/trial_0000, and so on;
trials run one after another. Rerun a stopped command, or only `tools/sweep
STUDY`, to resume the study: the table is the same as without the interruption.
The results are in STUDY/table.txt and STUDY/report.html.

A knob has comma-separated choices, or a range: `log:LOW:HIGH`,
`uniform:LOW:HIGH`, or `int:LOW:HIGH` with both ends. `grid` tries all
combinations of choices; the others draw `--trials` of them. `optuna` draws by
the results of earlier trials with a sampler of Optuna (`--sampler=TPESampler`;
extra `optuna`).

`--metric` is SPLIT/NAME, or a weighted sum such as
`validation/loss+0.1*code/loss`, of the steps that have all of them.

`asha` stops trials early, as the stopping variant of asynchronous successive
halving (Li et al. 2020, https://arxiv.org/abs/1810.05934): with n values at a
rung, that of the trial itself included, a trial continues if its value is one
of the best max(1, n // reduction). A rung is a step; its value is the first
one logged at or after it. In `hyperband` (Li et al. 2018,
https://arxiv.org/abs/1603.06560) the trials take turns in as many brackets as
there are rungs; bracket i ignores the first i rungs, and compares its own
trials only.

With any algorithm, `--stop_value=100:3.5` stops a trial whose value at step 100
is worse than 3.5, and `--stop_rank=100:5` or `100:25%` one that is not among
the best 5, or 25 %, of the trials so far; `100:5:8` only once 8 trials, itself
included, have come to that step. Both may be repeated.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import importlib
import itertools
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

from paxon.inputs import optional_library
from paxon.runner import files, user_error
from paxon.runner.hosts import supervisor
from paxon.sharding import suggestions
from paxon.tools import command_line, console_scripts, sweep_report

_POLL_SECONDS = 0.05
# Optional: `pip install paxon[optuna]`.
_OPTUNA = "optuna"
_RANGES = ("log", "uniform", "int")
_ALGORITHMS = ("grid", "random", "asha", "hyperband", "optuna")
_HALVING = ("asha", "hyperband")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """What a study tries; stored in its folder.

  Attributes:
    exp: The experiment.
    knobs: Names and ranges, such as `("width", "64,128")`.
    algorithm: One of `_ALGORITHMS`.
    trials: Number of trials; a grid has all combinations instead.
    metric: Split and name of the metric, `train/loss`, or a weighted sum.
    goal: min or max.
    rungs: Steps at which `asha` and `hyperband` compare trials.
    reduction: One of how many trials continues after a rung.
    stop_value: Steps and the worst values to continue with.
    stop_rank: Steps, and the worst ranks to continue with.
    sampler: Class of `optuna.samplers`.
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
  goal: str = "min"
  stop_value: tuple[str, ...] = ()
  stop_rank: tuple[str, ...] = ()
  sampler: str = "TPESampler"

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
    if (self.algorithm in _HALVING) != bool(self.rungs):
      raise user_error.UserError(
        "--rungs is required with --algorithm=asha and hyperband, and only with"
        " them."
      )
    if list(self.rungs) != sorted(set(self.rungs)) or min((1, *self.rungs)) < 1:
      raise user_error.UserError(
        f"--rungs must be positive and increasing, got {self.rungs}."
      )
    parse_metric(self.metric)
    for text in self.stop_value:
      _parse_stop("stop_value", text)
    for text in self.stop_rank:
      _parse_stop("stop_rank", text)
    if self.algorithm == "optuna":
      _find_sampler(self.sampler)

  @property
  def sign(self) -> int:
    """1 if a small value is good, otherwise -1."""
    return 1 if self.goal == "min" else -1

  def points(self) -> list[dict[str, str]]:
    """Returns the knobs of each trial, as text; of `optuna` none."""
    if self.algorithm == "optuna":
      return []
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
    value: The metric; the worst one, infinite, if it was not finite or the
      trial failed.
    rungs: Values by the steps at which trials are compared, for later trials.
    point: The knobs, as text.
  """

  status: str
  step: int
  value: float
  rungs: dict[str, float]
  point: dict[str, str] = dataclasses.field(default_factory=dict)


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


def parse_metric(text: str) -> dict[str, float]:
  """Returns the weights of metrics by SPLIT/NAME.

  Raises:
    UserError: The text is not a metric or a weighted sum.
  """
  found = {}
  for term in text.split("+"):
    weight, star, name = term.strip().rpartition("*")
    try:
      found[name] = float(weight) if star else 1.0
    except ValueError:
      found[name] = math.nan
    if not all(name.rpartition("/")) or not math.isfinite(found[name]):
      raise user_error.UserError(
        "--metric must be SPLIT/NAME, such as train/loss, or a sum such as"
        f" a/loss+0.5*b/loss, got {text!r}."
      )
  return found


def _parse_stop(flag: str, text: str) -> tuple[int, float, bool, int]:
  """Returns the step, value or rank, whether it is a share, and the history."""
  step, _, rest = text.partition(":")
  bound, _, history = rest.partition(":")
  is_share = bound.endswith("%")
  try:
    found = int(step), float(bound.rstrip("%")), is_share, int(history or 1)
  except ValueError:
    found = 0, math.nan, False, 0
  at, value, _, count = found
  ranks = flag == "stop_rank"
  is_rank = 0 < value <= 100 if is_share else value >= 1 and value % 1 == 0
  is_valid = is_rank if ranks else math.isfinite(value) and rest == bound
  if at < 1 or count < 1 or not is_valid or (is_share and not ranks):
    forms = "STEP:RANK, STEP:PERCENT% or both with :TRIALS"
    raise user_error.UserError(
      f"--{flag} must be {forms if ranks else 'STEP:VALUE'}, got {text!r}."
    )
  return found


def _find_sampler(name: str) -> Any:
  """Returns a class of `optuna.samplers`."""
  try:
    with optional_library.explain("optuna", extra="optuna"):
      samplers = importlib.import_module(f"{_OPTUNA}.samplers")
  except optional_library.MissingLibraryError as error:
    raise user_error.UserError(f"--algorithm=optuna: {error}") from error
  known = [each for each in samplers.__all__ if each.endswith("Sampler")]
  if name not in known:
    raise user_error.UserError(
      f"--sampler={name} is not known{suggestions.suggest(name, known)}"
    )
  return getattr(samplers, name)


def _ask_optuna(
  study: Study, number: int, earlier: dict[int, Result]
) -> dict[str, str]:
  """Returns the knobs of a trial, which depend on those before it alone."""
  optuna = importlib.import_module(_OPTUNA)
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  kinds = optuna.distributions
  space = {}
  for name, text in study.knobs:
    kind, *ends = text.split(":")
    if kind == "int":
      space[name] = kinds.IntDistribution(*map(int, ends))
    elif kind in _RANGES:
      low, high = map(float, ends)
      space[name] = kinds.FloatDistribution(low, high, log=kind == "log")
    else:
      space[name] = kinds.CategoricalDistribution(text.split(","))
  try:
    sampler = _find_sampler(study.sampler)(seed=study.seed + number)
  except TypeError as error:
    raise user_error.UserError(
      f"--sampler={study.sampler} cannot be used: {error}."
    ) from error
  asked = optuna.create_study(
    sampler=sampler, direction="minimize" if study.sign > 0 else "maximize"
  )
  for result in earlier.values():
    is_failed = not math.isfinite(result.value)
    values = {
      name: (
        each
        if isinstance(space[name], kinds.CategoricalDistribution)
        else float(each)
      )
      for name, each in result.point.items()
    }
    asked.add_trial(
      optuna.create_trial(
        params=values,
        distributions=space,
        value=None if is_failed else result.value,
        state=getattr(
          optuna.trial.TrialState, "FAIL" if is_failed else "COMPLETE"
        ),
      )
    )
  found = asked.ask(space).params
  return {
    name: f"{found[name]:.6g}"
    if isinstance(found[name], float)
    else str(found[name])
    for name, _ in study.knobs
  }


def run(study: Study, folder: pathlib.Path) -> dict[int, Result]:
  """Runs the trials without a result; returns all results."""
  results: dict[int, Result] = {}
  points = study.points()
  (folder / "results").mkdir(exist_ok=True)
  for number in range(len(points) or study.trials):
    stored = folder / "results" / f"trial_{number:04}.json"
    if stored.exists():
      results[number] = Result(**json.loads(stored.read_text()))
      continue
    point = (
      points[number] if points else _keep_point(study, folder, number, results)
    )
    found = _run_trial(study, folder, number, point, results)
    results[number] = dataclasses.replace(found, point=point)
    files.write_text(
      os.fspath(stored), json.dumps(dataclasses.asdict(results[number]))
    )
    print(f"trial {number}: {results[number].status}", flush=True)
  rows = sweep_report.rank(results.items(), sign=study.sign)
  for name, text in (
    ("table.txt", sweep_report.format_table(rows)),
    ("report.html", sweep_report.format_page(rows, study.metric)),
  ):
    files.write_text(os.fspath(folder / name), text)
  return results


def _keep_point(
  study: Study, folder: pathlib.Path, number: int, earlier: dict[int, Result]
) -> dict[str, str]:
  """Asks for a point, and stores it before its run begins."""
  stored = folder / "results" / f"point_{number:04}.json"
  if not stored.exists():
    point = _ask_optuna(study, number, earlier)
    files.write_text(os.fspath(stored), json.dumps(point))
  return json.loads(stored.read_text())


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
      command,
      stdout=output,
      stderr=output,
      preexec_fn=supervisor.die_with_parent,
    )
    try:
      status = None
      while status is None:
        status = child.poll()
        values = read_values(
          run_dir / "metrics.jsonl", study.metric, study.sign
        )
        stop = _pass_stops(study, number, values, earlier, reached)
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
    worst = study.sign * math.inf
    return Result(status="failed", step=0, value=worst, rungs=reached)
  if not values:
    raise user_error.UserError(
      f"Trial {number} logged no --metric={study.metric}; see"
      f" {run_dir / 'metrics.jsonl'}."
    )
  step, value = values[-1]
  return Result(status="finished", step=step, value=value, rungs=reached)


def _pass_stops(
  study: Study,
  number: int,
  values: Sequence[tuple[int, float]],
  earlier: dict[int, Result],
  reached: dict[str, float],
) -> Result | None:
  """Adds newly reached steps; returns the result of a trial that they stop."""
  skipped = 0
  if study.algorithm == "hyperband":
    skipped = number % len(study.rungs)
    same = range(skipped, number, len(study.rungs))
    earlier = {k: result for k, result in earlier.items() if k in same}
  rungs = dict.fromkeys(study.rungs[skipped:], True)
  stops = [_parse_stop("stop_value", text) for text in study.stop_value]
  ranks = [_parse_stop("stop_rank", text) for text in study.stop_rank]
  for step in sorted({*rungs, *(stop[0] for stop in (*stops, *ranks))}):
    if str(step) in reached:
      continue
    found = next((value for at, value in values if at >= step), None)
    if found is None:
      return None
    reached[str(step)] = found
    others = [
      result.rungs[str(step)]
      for result in earlier.values()
      if str(step) in result.rungs
    ]
    count = len(others) + 1
    better = sum(study.sign * (each - found) <= 0 for each in others)
    bounds = [max(1, count // study.reduction)] if step in rungs else []
    bounds += [
      max(1, int(count * bound / 100)) if is_share else int(bound)
      for at, bound, is_share, history in ranks
      if at == step and count >= history
    ]
    is_worse = any(
      at == step and study.sign * (found - bound) > 0
      for at, bound, _, _ in stops
    )
    if is_worse or any(better >= bound for bound in bounds):
      return Result(status="stopped", step=step, value=found, rungs=reached)
  return None


def read_values(
  path: pathlib.Path, metric: str, sign: int = 1
) -> list[tuple[int, float]]:
  """Returns steps and values of a metric.

  Args:
    path: The metrics of a run.
    metric: SPLIT/NAME, or a weighted sum.
    sign: Of the infinity in place of values that are not finite.
  """
  try:
    text = path.read_text()
  except FileNotFoundError:
    return []
  weights = parse_metric(metric)
  found: dict[int, dict[str, float]] = {}
  for record in map(json.loads, text.splitlines()):
    for name in weights:
      split, _, key = name.rpartition("/")
      if record["split"] == split and key in record:
        found.setdefault(record["step"], {})[name] = float(record[key])
  values = {
    step: sum(weights[name] * value for name, value in each.items())
    for step, each in found.items()
    if len(each) == len(weights)
  }
  return sorted(
    (step, value if math.isfinite(value) else sign * math.inf)
    for step, value in values.items()
  )


def main(argv: Sequence[str]) -> int:
  """Runs or resumes a study; returns the exit status."""
  try:
    study, folder = _open_study(argv)
    results = run(study, folder)
    rows = sweep_report.rank(results.items(), sign=study.sign)
    print(sweep_report.format_table(rows), end="")
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
  parser.add_argument("--algorithm", choices=_ALGORITHMS, default="random")
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--metric", default="train/loss")
  parser.add_argument("--goal", choices=("min", "max"), default="min")
  parser.add_argument("--sampler", default="TPESampler")
  for name in ("--stop_value", "--stop_rank"):
    parser.add_argument(name, action="append", default=[])
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
    for name in ("rungs", "arguments", "stop_value", "stop_rank"):
      stored[name] = tuple(stored.get(name, ()))
    return Study(**stored), folder
  for argument in arguments:
    if not argument.startswith("--fdl."):
      parser.error(f"unknown argument {argument}")
  if not given.exp:
    parser.error("--exp is required for a new study")
  values: dict[str, Any] = {**vars(given), "arguments": tuple(arguments)}
  del values["folder"], values["knob"]
  for name in ("stop_value", "stop_rank"):
    values[name] = tuple(values[name])
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


if __name__ == "__main__":
  command_line.run(main)
