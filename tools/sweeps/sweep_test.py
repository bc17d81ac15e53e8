"""Tests of sweeps: values, rungs, resumption, bad input."""

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import textwrap

import pytest

from paxon.runner import user_error
from paxon.tools.sweeps import sweep_main, sweep_report, sweep_study

# Minimizes a quadratic by gradient descent; resumes from its metrics.
_TRAINER = """
  import json, os, sys, time
  flags = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:])
  rate = float(flags["fdl.rate"])
  path = os.path.join(flags["job_log_dir"], "metrics.jsonl")
  os.makedirs(flags["job_log_dir"], exist_ok=True)
  lines = open(path).read().splitlines() if os.path.exists(path) else []
  if rate > 2.5:
    sys.exit(1)
  for step in range(len(lines) + 1, 9):
    loss = (1 - rate) ** (2 * step)
    lines.append(json.dumps({"step": step, "split": "train", "loss": loss}))
    with open(path + ".new", "w") as f:
      f.write("\\n".join(lines) + "\\n")
    os.replace(path + ".new", path)
    time.sleep(0.005)
"""


def _flags(folder: pathlib.Path, *more: str) -> list[str]:
  return [
    os.fspath(folder),
    "--exp=toy",
    "--knob=rate=uniform:0.05:3",
    "--algorithm=asha",
    "--rungs=2,4",
    "--reduction=2",
    "--program=toy_trainer",
    *more,
  ]


def _start(tmp_path: pathlib.Path, arguments: list[str]) -> subprocess.Popen:
  (tmp_path / "toy_trainer.py").write_text(textwrap.dedent(_TRAINER))
  path = os.pathsep.join([os.fspath(tmp_path), *sys.path])
  return subprocess.Popen(
    [sys.executable, "-m", "paxon.tools.sweeps.sweep_main", *arguments],
    env={**os.environ, "PYTHONPATH": path},
    stdout=subprocess.PIPE,
    text=True,
  )


def _expected(values: list[float]) -> dict[int, tuple[str, int]]:
  """Returns status and last step of each trial, from the rule."""
  at = {2: [], 4: []}
  expected = {}
  for number, rate in enumerate(values):
    expected[number] = ("failed", 0) if rate > 2.5 else ("finished", 8)
    for rung in () if rate > 2.5 else (2, 4):
      loss = (1 - rate) ** (2 * rung)
      at[rung].append(loss)
      rank = sorted(at[rung]).index(loss) + 1
      if rank > max(1, len(at[rung]) // 2):
        expected[number] = ("stopped", rung)
        break
  return expected


@pytest.mark.nightly
def test_a_killed_sweep_resumes_to_the_same_table(
  tmp_path: pathlib.Path,
) -> None:
  whole = _start(tmp_path, _flags(tmp_path / "whole"))
  output = whole.communicate()[0]
  assert whole.returncode == 0
  generator, kills = random.Random(0), 0
  arguments = _flags(tmp_path / "killed")
  while True:
    process = _start(tmp_path, arguments)
    try:
      process.communicate(timeout=generator.uniform(1.0, 2.5))
      break
    except subprocess.TimeoutExpired:
      # Each try completes at least a trial more, or the test would not end.
      kills += 1
      process.kill()
      process.communicate()
    if (tmp_path / "killed" / "study.json").exists():
      # The study does not choose the program.
      arguments = [arguments[0], "--program=toy_trainer"]
    if kills == 4:
      process = _start(tmp_path, arguments)
      process.communicate()
      break
  assert process.returncode == 0
  assert kills
  table = (tmp_path / "whole" / "table.txt").read_text()
  assert (tmp_path / "killed" / "table.txt").read_text() == table
  assert table in output
  page = (tmp_path / "whole" / "report.html").read_text()
  assert page.count("<polyline") == 20
  assert "://" not in page
  lines = [line.split() for line in table.splitlines()[1:]]
  rates = {int(line[0]): float(line[4]) for line in lines}
  found = {int(line[0]): (line[1], int(line[2])) for line in lines}
  assert found == _expected([rates[number] for number in range(20)])
  assert {status for status, _ in found.values()} == {
    "finished",
    "stopped",
    "failed",
  }


def _study(**changes: object) -> sweep_study.Study:
  study = sweep_study.Study(
    exp="toy",
    knobs=(("a", "1,2,3"), ("b", "x,y")),
    algorithm="grid",
    trials=4,
    metric="train/loss",
    rungs=(),
    reduction=3,
    seed=0,
    program="toy_trainer",
    arguments=(),
  )
  return dataclasses.replace(study, **changes)


def test_a_grid_has_all_combinations() -> None:
  points = _study().points()
  assert len(points) == 6
  assert points[0] == {"a": "1", "b": "x"}
  assert len({tuple(point.items()) for point in points}) == 6


def test_random_values_lie_in_their_ranges_and_are_spread() -> None:
  knobs = (("rate", "log:1e-4:1e-1"), ("n", "int:1:4"), ("c", "x,y"))
  study = _study(algorithm="random", knobs=knobs, trials=2000)
  points = study.points()
  logs = [math.log10(float(point["rate"])) for point in points]
  assert min(logs) >= -4
  assert max(logs) <= -1
  assert abs(sum(logs) / len(logs) + 2.5) < 0.1
  assert {point["n"] for point in points} == {"1", "2", "3", "4"}
  assert {point["c"] for point in points} == {"x", "y"}
  assert dataclasses.replace(study, trials=5).points() == points[:5]


def test_values_that_are_not_finite_are_the_worst(
  tmp_path: pathlib.Path,
) -> None:
  path = tmp_path / "metrics.jsonl"
  path.write_text(
    '{"step": 1, "split": "train", "loss": "NaN"}\n'
    '{"step": 2, "split": "train", "loss": 0.5}\n'
    '{"step": 2, "split": "validation", "loss": 0.25}\n'
  )
  assert sweep_main.read_values(path, "train/loss") == [(1, math.inf), (2, 0.5)]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"knobs": ()}, "--knob is required"),
    ({"knobs": (("a", "1"), ("a", "2"))}, "given twice"),
    ({"knobs": (("a", "log:0:1"),), "algorithm": "random"}, "0 < LOW"),
    ({"knobs": (("a", "int:1:2.5"),), "algorithm": "random"}, "LOW < HIGH"),
    ({"knobs": (("a", "log:1e-3:1"),)}, "needs choices"),
    ({"knobs": (("a", "1,,2"),)}, "must be NAME"),
    ({"algorithm": "asha"}, "--rungs is required"),
    ({"rungs": (2,)}, "--rungs is required"),
    ({"algorithm": "asha", "rungs": (4, 2)}, "increasing"),
    ({"reduction": 1}, "at least 2"),
    ({"trials": 0}, "--trials must be positive"),
    ({"metric": "loss"}, "SPLIT/NAME"),
    ({"metric": "a/loss+x*b/loss"}, "SPLIT/NAME"),
    ({"algorithm": "hyperband"}, "--rungs is required"),
    ({"stop_value": ("3",)}, "STEP:VALUE"),
    ({"stop_value": ("3:50%",)}, "STEP:VALUE"),
    ({"stop_rank": ("3:0",)}, "STEP:RANK"),
    ({"stop_rank": ("3:120%",)}, "STEP:PERCENT%"),
    ({"stop_rank": ("3:2:0",)}, "STEP:RANK"),
  ],
)
def test_bad_input_is_one_clear_error(
  changes: dict[str, object], message: str
) -> None:
  with pytest.raises(user_error.UserError, match=message):
    _study(**changes)


def _stop(study: sweep_study.Study, curves: list[list[float]]) -> list[int]:
  """Returns the step at which each trial is stopped, or its number of steps.

  `curves` has the values of each trial at steps 1, 2, ...
  """
  earlier: dict[int, sweep_study.Result] = {}
  steps = []
  for number, curve in enumerate(curves):
    values = list(enumerate(curve, start=1))
    reached: dict[str, float] = {}
    stop = sweep_main._pass_stops(study, number, values, earlier, reached)
    steps.append(len(curve) if stop is None else stop.step)
    earlier[number] = sweep_study.Result(
      status="finished" if stop is None else "stopped",
      step=steps[-1],
      value=curve[steps[-1] - 1],
      rungs=reached,
    )
  return steps


def test_stop_policies() -> None:
  curves = [[5.0, 4.0, 3.0], [4.0, 5.0, 2.0], [6.0, 3.0, 1.0], [3.0, 2.0, 9.0]]
  assert _stop(_study(), curves) == [3, 3, 3, 3]
  # Worse than 5 at step 1, or than 3.5 at step 2.
  study = _study(stop_value=("1:5", "2:3.5"))
  assert _stop(study, curves) == [2, 2, 1, 3]
  # The same values, to maximize.
  assert _stop(_study(stop_value=("1:5",), goal="max"), curves) == [3, 1, 3, 1]
  assert _stop(_study(stop_rank=("1:1",)), curves) == [3, 3, 1, 3]
  assert _stop(_study(stop_rank=("2:1",)), curves) == [3, 2, 3, 3]
  assert _stop(_study(stop_rank=("2:1:3",)), curves) == [3, 3, 3, 3]
  assert _stop(_study(stop_rank=("1:50%",)), curves) == [3, 3, 1, 3]
  assert _stop(_study(stop_rank=("1:1",), goal="max"), curves) == [3, 1, 3, 1]


def test_brackets_of_hyperband_compare_their_own_trials() -> None:
  study = _study(algorithm="hyperband", rungs=(1, 2), reduction=2)
  # Trials 0 and 2 are compared from step 1 on, 1 and 3 from step 2 on.
  curves = [[1.0, 1.0, 1.0], [9.0, 9.0, 9.0], [2.0, 0.0, 0.0], [8.0, 9.5, 0.0]]
  assert _stop(study, curves) == [3, 3, 1, 2]
  study = _study(algorithm="asha", rungs=(1, 2), reduction=2)
  assert _stop(study, curves) == [3, 1, 1, 1]


def test_a_metric_may_be_a_weighted_sum(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "metrics.jsonl"
  lines = [(1, "a", 2.0), (1, "b", 3.0), (2, "a", 1.0), (3, "b", "NaN")]
  path.write_text(
    "".join(
      json.dumps({"step": step, "split": split, "loss": loss}) + "\n"
      for step, split, loss in [*lines, (3, "a", 1.0)]
    )
  )
  found = sweep_main.read_values(path, "a/loss+0.5*b/loss", -1)
  assert found == [(1, 3.5), (3, -math.inf)]


def test_the_best_trial_comes_first_for_both_goals() -> None:
  trials = {
    number: sweep_study.Result(
      status=status, step=step, value=value, rungs={}, point={"a": f"{number}"}
    )
    for number, (status, step, value) in enumerate(
      [("finished", 4, 2.0), ("finished", 4, 3.0), ("stopped", 2, 9.0)]
    )
  }
  for sign, expected in ((1, [0, 1, 2]), (-1, [1, 0, 2])):
    ranked = sweep_report.rank(trials.items(), sign=sign)
    assert [number for number, _ in ranked] == expected
  page = sweep_report.format_page(ranked, "a/<loss>")
  assert page.count("<polyline") == 3
  assert "a/&lt;loss&gt;" in page
  assert "trial 1: 3" in page


def test_optuna_is_resumed_from_the_results(tmp_path: pathlib.Path) -> None:
  if importlib.util.find_spec("optuna") is None:
    with pytest.raises(user_error.UserError, match="extra `optuna`"):
      _study(algorithm="optuna")
    return
  knobs = (("rate", "log:0.01:3"), ("n", "int:1:4"), ("c", "x,y"))
  study = _study(algorithm="optuna", knobs=knobs, trials=12)
  points, earlier = [], {}
  for number in range(12):
    point = sweep_main._ask_optuna(study, number, earlier)
    assert sweep_main._ask_optuna(study, number, earlier) == point
    assert 0.01 <= float(point["rate"]) <= 3
    value = math.log(float(point["rate"])) ** 2 + (point["c"] == "x")
    earlier[number] = sweep_study.Result(
      status="finished", step=1, value=value, rungs={}, point=point
    )
    points.append(point)
  assert len({tuple(point.items()) for point in points}) == 12
  with pytest.raises(user_error.UserError, match="did you mean"):
    _study(algorithm="optuna", sampler="TPESamplr")


def test_another_study_in_the_folder_is_an_error(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  folder = tmp_path / "study"
  folder.mkdir()
  (folder / "study.json").write_text("{}")
  assert sweep_main.main(_flags(folder)) == 2
  assert "another study" in capsys.readouterr().err
