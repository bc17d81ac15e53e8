"""Sweeps over the knobs of an experiment.

  tools/sweep STUDY --exp=EXPERIMENT
    --knob='learning_rate=log:1e-4:1e-2' --knob='width=64,128'
    [--algorithm=grid|random|asha|hyperband|optuna] [--trials=20]
    [--metric=train/loss] [--goal=min|max] [--rungs=100,300] [--reduction=3]
    [--stop_value=STEP:VALUE] [--stop_rank=STEP:RANK] [--seed=0]
    [--fdl.KNOB=VALUE ...]

STUDY is a folder. Modules in it are not imported without --allow_run_code, and
another --program must be passed again to resume. Each trial is an ordinary run
in STUDY/trial_0000, and so on; trials run one after another. Rerun a stopped
command, or only `tools/sweep STUDY`, to resume the study: the table is the same
as without the interruption.
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
import contextlib
import dataclasses
import importlib
import json
import math
import os
import pathlib
import stat
import subprocess
import sys
import time
from typing import Any, BinaryIO

from paxon.runner import files, run_code, user_error
from paxon.runner.hosts import supervisor
from paxon.runner.monitoring import metrics_file
from paxon.tools import command_line, console_scripts
from paxon.tools.sweeps import sweep_report, sweep_study

_POLL_SECONDS = 0.05
# The file of a study in its folder.
_SETTINGS = "study.json"


def _ask_optuna(
  study: sweep_study.Study, number: int, earlier: dict[int, sweep_study.Result]
) -> dict[str, str]:
  """Returns the knobs of a trial, which depend on those before it alone."""
  optuna = importlib.import_module(sweep_study.OPTUNA)
  optuna.logging.set_verbosity(optuna.logging.WARNING)
  kinds = optuna.distributions
  space = {}
  for name, text in study.knobs:
    kind, *ends = text.split(":")
    if kind == "int":
      space[name] = kinds.IntDistribution(*map(int, ends))
    elif kind in sweep_study.RANGES:
      low, high = map(float, ends)
      space[name] = kinds.FloatDistribution(low, high, log=kind == "log")
    else:
      space[name] = kinds.CategoricalDistribution(text.split(","))
  try:
    sampler = sweep_study.find_sampler(study.sampler)(seed=study.seed + number)
  except TypeError as error:
    raise user_error.UserError(
      f"--sampler={study.sampler} cannot be used: {error}."
    ) from error
  asked = optuna.create_study(
    sampler=sampler, direction="minimize" if study.sign > 0 else "maximize"
  )
  states = optuna.trial.TrialState
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
        state=states.FAIL if is_failed else states.COMPLETE,
      )
    )
  found = asked.ask(space).params
  return {
    name: f"{found[name]:.6g}"
    if isinstance(found[name], float)
    else str(found[name])
    for name, _ in study.knobs
  }


def run(
  study: sweep_study.Study, folder: pathlib.Path, *, allows_code: bool = False
) -> dict[int, sweep_study.Result]:
  """Runs the trials without a result; returns all results.

  Args:
    study: The study.
    folder: Its folder, which exists.
    allows_code: Whether trials may import modules of the folder.
  """
  results: dict[int, sweep_study.Result] = {}
  points = study.points()
  (folder / "results").mkdir(exist_ok=True)
  for number in range(len(points) or study.trials):
    stored = folder / "results" / f"trial_{number:04}.json"
    found = sweep_study.read_result(
      study, stored, points[number] if points else None
    )
    if found is not None:
      results[number] = found
      continue
    point = (
      points[number] if points else _keep_point(study, folder, number, results)
    )
    found = _run_trial(study, folder, number, point, results, allows_code)
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
  study: sweep_study.Study,
  folder: pathlib.Path,
  number: int,
  earlier: dict[int, sweep_study.Result],
) -> dict[str, str]:
  """Asks for a point, and stores it before its run begins."""
  stored = folder / "results" / f"point_{number:04}.json"

  def make(value: Any) -> dict[str, str]:
    sweep_study.check_point(study, files.to_object(value))
    return value

  try:
    return files.read_json(stored, make, kind="the knobs of a trial")
  except FileNotFoundError:
    point = _ask_optuna(study, number, earlier)
    files.write_text(os.fspath(stored), json.dumps(point))
    return point


def _run_trial(
  study: sweep_study.Study,
  folder: pathlib.Path,
  number: int,
  point: dict[str, str],
  earlier: dict[int, sweep_study.Result],
  allows_code: bool,
) -> sweep_study.Result:
  """Runs or resumes one trial until it ends or a rung stops it."""
  run_dir = folder / f"trial_{number:04}"
  log = folder / f"trial_{number:04}.log"
  reached: dict[str, float] = {}
  with _open_log(log) as output:
    child = subprocess.Popen(
      _make_command(study, run_dir, point, allows_code),
      stdout=output,
      stderr=output,
      env=_make_environ(folder, allows_code),
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
  _check_status(number, status, log)
  if status:
    worst = study.sign * math.inf
    return sweep_study.Result(
      status="failed", step=0, value=worst, rungs=reached
    )
  if not values:
    raise user_error.UserError(
      f"Trial {number} logged no --metric={study.metric}; see"
      f" {run_dir / 'metrics.jsonl'}."
    )
  step, value = values[-1]
  return sweep_study.Result(
    status="finished", step=step, value=value, rungs=reached
  )


def _make_command(
  study: sweep_study.Study,
  run_dir: pathlib.Path,
  point: dict[str, str],
  allows_code: bool,
) -> list[str]:
  """Returns the command line of a trial."""
  command = [sys.executable, "-m", study.program, f"--exp={study.exp}"]
  command += ["--mode=train", f"--job_log_dir={run_dir}", *study.arguments]
  command += [f"--fdl.{name}={value}" for name, value in point.items()]
  return command + [f"--{run_code.FLAG}"] * allows_code


def _make_environ(folder: pathlib.Path, allows_code: bool) -> dict[str, str]:
  """Returns the environment variables of a trial."""
  environ = dict(os.environ)
  if not allows_code and run_code.is_inside(os.getcwd(), folder):
    # `python -m` would import from the working directory, before anything else.
    environ["PYTHONSAFEPATH"] = "1"
  return environ


def _check_status(number: int, status: int, log: pathlib.Path) -> None:
  """Raises if a trial was interrupted or its command line is wrong."""
  if status < 0 or status > 128:
    raise user_error.UserError(
      f"Trial {number} was interrupted (status {status}); run the command"
      " again to resume the study."
    )
  if status == command_line.WRONG_USE:
    text = files.read_bytes(log, max_bytes=files.MAX_LINES_BYTES)
    lines = text.decode(errors="replace").strip().splitlines()
    raise user_error.UserError(
      f"Trial {number}: {(lines or ['no output'])[-1]}"
    )


def _open_log(path: pathlib.Path) -> BinaryIO:
  """Opens the log of a trial to append to it; a link is not followed."""
  flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
  try:
    number = os.open(path, flags | os.O_CLOEXEC, 0o666)
  except OSError as error:
    raise user_error.UserError(
      f"{path} cannot be written ({error.strerror}); remove it."
    ) from error
  if not stat.S_ISREG(os.fstat(number).st_mode):
    os.close(number)
    raise user_error.UserError(f"{path} is not a file; remove it.")
  return open(number, "ab")


def _pass_stops(
  study: sweep_study.Study,
  number: int,
  values: Sequence[tuple[int, float]],
  earlier: dict[int, sweep_study.Result],
  reached: dict[str, float],
) -> sweep_study.Result | None:
  """Adds newly reached steps; returns the result of a trial that they stop."""
  skipped = 0
  if study.algorithm == "hyperband":
    skipped = number % len(study.rungs)
    same = range(skipped, number, len(study.rungs))
    earlier = {k: result for k, result in earlier.items() if k in same}
  rungs = dict.fromkeys(study.rungs[skipped:], True)
  stops = [
    sweep_study.parse_stop("stop_value", text) for text in study.stop_value
  ]
  ranks = [
    sweep_study.parse_stop("stop_rank", text) for text in study.stop_rank
  ]
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
      return sweep_study.Result(
        status="stopped", step=step, value=found, rungs=reached
      )
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
    records = metrics_file.read(path)
  except FileNotFoundError:
    return []
  weights = sweep_study.parse_metric(metric)
  found: dict[int, dict[str, float]] = {}
  for record in records:
    for name in weights:
      split, _, key = name.rpartition("/")
      if record.split == split and key in record.values:
        found.setdefault(record.step, {})[name] = record.values[key]
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
  return command_line.catch_user_errors(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  study, folder, allows_code = _open_study(argv)
  results = run(study, folder, allows_code=allows_code)
  rows = sweep_report.rank(results.items(), sign=study.sign)
  print(sweep_report.format_table(rows), end="")
  print(f"Report: {folder / 'report.html'}")
  return 0


def _open_study(
  argv: Sequence[str],
) -> tuple[sweep_study.Study, pathlib.Path, bool]:
  """Returns the study of the command line, or the stored one.

  With it, its folder, and whether modules in it may be imported.
  """
  parser = _make_parser()
  given, arguments = parser.parse_known_args(list(argv))
  folder = pathlib.Path(given.folder).expanduser().absolute()
  allows_code = given.allow_run_code
  if not allows_code:
    run_code.reject(folder)
  if not arguments and _is_resuming(parser, given):
    with contextlib.suppress(FileNotFoundError):
      study = sweep_study.read_study(folder / _SETTINGS, given.program)
      return study, folder, allows_code
  study = _make_study(parser, given, arguments)
  _store_study(study, folder)
  return study, folder, allows_code


def _make_parser() -> command_line.Parser:
  """Returns the parser of all flags but `--fdl.`."""
  description = console_scripts.name_programs(__doc__ or "")
  parser = command_line.Parser("sweep", description)
  parser.prog = console_scripts.name_programs("tools/sweep")
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("folder", metavar="STUDY")
  parser.add_argument("--exp")
  parser.add_argument("--knob", action="append", default=[])
  parser.add_argument(
    "--algorithm", choices=sweep_study.ALGORITHMS, default="random"
  )
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--metric", default="train/loss")
  parser.add_argument("--goal", choices=sweep_study.GOALS, default="min")
  parser.add_argument("--sampler", default="TPESampler")
  for name in ("--stop_value", "--stop_rank"):
    parser.add_argument(name, action="append", default=[])
  parser.add_argument("--rungs", default="")
  parser.add_argument("--reduction", type=int, default=3)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--program", default="paxon.runner.main")
  parser.add_argument(f"--{run_code.FLAG}", action="store_true")
  return parser


def _is_resuming(
  parser: argparse.ArgumentParser, given: argparse.Namespace
) -> bool:
  """Whether no flag describes a study, so that the stored one resumes."""
  ignored = {"folder", "program", run_code.FLAG}
  return all(
    value == parser.get_default(name)
    for name, value in vars(given).items()
    if name not in ignored
  )


def _make_study(
  parser: argparse.ArgumentParser,
  given: argparse.Namespace,
  arguments: Sequence[str],
) -> sweep_study.Study:
  """Returns the study that the command line describes.

  Args:
    parser: Reports errors in the flags.
    given: Its flags.
    arguments: The others, which must be overrides (`--fdl.`).
  """
  for argument in arguments:
    if not argument.startswith("--fdl."):
      parser.error(f"unknown argument {argument}")
  if not given.exp:
    parser.error("--exp is required for a new study")
  values: dict[str, Any] = {**vars(given), "arguments": tuple(arguments)}
  del values["folder"], values["knob"], values[run_code.FLAG]
  for name in ("stop_value", "stop_rank"):
    values[name] = tuple(values[name])
  values["knobs"] = tuple(
    (name, text) for name, _, text in (k.partition("=") for k in given.knob)
  )
  try:
    values["rungs"] = tuple(map(int, filter(None, given.rungs.split(","))))
  except ValueError:
    parser.error(f"--rungs must be steps such as 100,300, got {given.rungs}")
  return sweep_study.Study(**values)


def _store_study(study: sweep_study.Study, folder: pathlib.Path) -> None:
  """Stores a study in its folder; rejects a folder of another study."""
  settings = folder / _SETTINGS
  text, before = json.dumps(dataclasses.asdict(study), indent=2), ""
  with contextlib.suppress(FileNotFoundError):
    before = files.read_text(settings)
  if before not in ("", text):
    raise user_error.UserError(
      f"{folder} has another study; pass only the folder to resume it, or"
      " another folder."
    )
  folder.mkdir(parents=True, exist_ok=True)
  files.write_text(os.fspath(settings), text)


if __name__ == "__main__":
  command_line.run(main)
