"""Study of a sweep: what it tries, its results, and how both are stored.

The folder of a study may come from someone else: what it stores is checked, and
it names no program.
"""

from collections.abc import Mapping
import dataclasses
import importlib
import itertools
import math
import pathlib
import random
from typing import Any, Final

from paxon.inputs import optional_library
from paxon.runner import files, user_error
from paxon.sharding import suggestions

# Optional: `pip install paxon[optuna]`.
OPTUNA: Final = "optuna"
RANGES: Final = ("log", "uniform", "int")
ALGORITHMS: Final = ("grid", "random", "asha", "hyperband", "optuna")
HALVING: Final = ("asha", "hyperband")
GOALS: Final = ("min", "max")
_STATUSES = ("finished", "stopped", "failed")
# Each of them trains; more are a mistake.
_MAX_TRIALS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """Definition of a study; stored in its folder.

  Attributes:
    exp: The experiment.
    knobs: Names and ranges, such as `("width", "64,128")`.
    algorithm: One of `ALGORITHMS`.
    trials: Number of trials; a grid has all combinations instead.
    metric: Split and name of the metric, `train/loss`, or a weighted sum.
    goal: min or max.
    rungs: Steps at which `asha` and `hyperband` compare trials.
    reduction: One of how many trials continues after a rung.
    stop_value: Steps and the worst values to continue with.
    stop_rank: Steps, and the worst ranks to continue with.
    sampler: Class of `optuna.samplers`.
    seed: Of the drawn values.
    program: Module that runs a trial; of the command line, never of the folder.
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
    count = self.count_trials() if self.trials > 0 else self.trials
    if not 1 <= count <= _MAX_TRIALS:
      raise user_error.UserError(
        f"--trials must be positive and at most {_MAX_TRIALS:,}, as the number"
        f" of combinations of a grid, got {count:,}."
      )
    if self.reduction < 2:
      raise user_error.UserError(
        f"--reduction must be at least 2, got {self.reduction}."
      )
    if (self.algorithm in HALVING) != bool(self.rungs):
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
      parse_stop("stop_value", text)
    for text in self.stop_rank:
      parse_stop("stop_rank", text)
    if self.algorithm == "optuna":
      find_sampler(self.sampler)

  @property
  def sign(self) -> int:
    """1 if a small value is good, otherwise -1."""
    return 1 if self.goal == "min" else -1

  def count_trials(self) -> int:
    """Returns the number of trials."""
    if self.algorithm != "grid":
      return self.trials
    return math.prod(len(text.split(",")) for _, text in self.knobs)

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
  if kind not in RANGES:
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
  if kind not in RANGES:
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


def parse_stop(flag: str, text: str) -> tuple[int, float, bool, int]:
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


def find_sampler(name: str) -> Any:
  """Returns a class of `optuna.samplers`."""
  try:
    with optional_library.explain("optuna", extra="optuna"):
      samplers = importlib.import_module(f"{OPTUNA}.samplers")
  except optional_library.MissingLibraryError as error:
    raise user_error.UserError(f"--algorithm=optuna: {error}") from error
  known = [each for each in samplers.__all__ if each.endswith("Sampler")]
  if name not in known:
    raise user_error.UserError(
      f"--sampler={name} is not known{suggestions.suggest(name, known)}"
    )
  return getattr(samplers, name)


def read_study(path: pathlib.Path, program: str) -> Study:
  """Returns a stored study, to be run by a program of the command line."""

  def make(value: Any) -> Study:
    fields = dict(files.to_object(value))
    stored = fields.get("program")
    files.check_type("program", stored, str)
    for name, kind in _LISTS.items():
      given = fields.get(name, [])
      files.check_type(name, given, list)
      for each in given:
        files.check_type(f"{name}[]", each, kind)
      fields[name] = tuple(given)
    for pair in fields["knobs"]:
      for text in pair:
        files.check_type("knobs[][]", text, str)
      if len(pair) != 2:
        raise ValueError(f"its knob {pair} is not a name and a range")
    fields["knobs"] = tuple(map(tuple, fields["knobs"]))
    for each in fields["arguments"]:
      if not each.startswith("--fdl."):
        raise ValueError(f"its argument {each!r} does not begin with --fdl.")
    for name, known in (("algorithm", ALGORITHMS), ("goal", GOALS)):
      if fields.get(name, known[0]) not in known:
        raise ValueError(f"its {name} is {fields[name]!r}")
    try:
      return files.to_record(Study, fields)
    except user_error.UserError as error:
      raise ValueError(str(error)) from error

  study = files.read_json(path, make, kind="a study")
  if study.program != program:
    raise user_error.UserError(
      f"{path} was begun with --program={study.program}; if you trust it, pass"
      " it again."
    )
  return study


# Kinds of the entries of lists in the file of a study.
_LISTS: Mapping[str, type] = {
  "knobs": list,
  "rungs": int,
  "arguments": str,
  "stop_value": str,
  "stop_rank": str,
}


def read_result(
  study: Study, path: pathlib.Path, point: dict[str, str] | None
) -> Result | None:
  """Returns the stored result of a trial, None without one."""

  def make(value: Any) -> Result:
    found = files.to_record(Result, value, not_finite=("value",))
    check_point(study, found.point)
    if point is not None and found.point != point:
      raise ValueError(f"its point is not that of the study, {point}")
    if found.status not in _STATUSES:
      raise ValueError(f"its status is {found.status!r}")
    if found.step < 0 or math.isnan(found.value):
      raise ValueError(f"it has value {found.value} at step {found.step}")
    for step, reached in found.rungs.items():
      files.check_type(f"rungs[{int(step)}]", reached, float)
    return found

  try:
    return files.read_json(
      path,
      make,
      kind="the result of a trial",
      advice="Remove it, and the trial runs again.",
    )
  except FileNotFoundError:
    return None


def check_point(study: Study, point: dict[str, Any]) -> None:
  """Raises ValueError or TypeError unless a point has the study's knobs."""
  if sorted(point) != sorted(name for name, _ in study.knobs):
    raise ValueError(f"it has the knobs {sorted(point)}")
  for name, text in point.items():
    files.check_type(name, text, str)
