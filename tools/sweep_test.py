"""Tests of sweeps: values, rungs, resumption, bad input."""

import dataclasses
import math
import os
import pathlib
import random
import subprocess
import sys
import textwrap

import pytest

from paxon.runner import user_error
from paxon.tools import sweep_main

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
    [sys.executable, "-m", "paxon.tools.sweep_main", *arguments],
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
      arguments = arguments[:1]
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
  assert "http" not in page
  lines = [line.split() for line in table.splitlines()[1:]]
  rates = {int(line[0]): float(line[4]) for line in lines}
  found = {int(line[0]): (line[1], int(line[2])) for line in lines}
  assert found == _expected([rates[number] for number in range(20)])
  assert {status for status, _ in found.values()} == {
    "finished",
    "stopped",
    "failed",
  }


def _study(**changes: object) -> sweep_main.Study:
  study = sweep_main.Study(
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
  ],
)
def test_bad_input_is_one_clear_error(
  changes: dict[str, object], message: str
) -> None:
  with pytest.raises(user_error.UserError, match=message):
    _study(**changes)


def test_another_study_in_the_folder_is_an_error(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  folder = tmp_path / "study"
  folder.mkdir()
  (folder / "study.json").write_text("{}")
  assert sweep_main.main(_flags(folder)) == 2
  assert "another study" in capsys.readouterr().err
