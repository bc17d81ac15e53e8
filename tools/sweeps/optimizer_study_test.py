"""The study of optimizers, with trainings replaced by a formula."""

from collections.abc import Callable
import dataclasses
import json
import math
import pathlib
from typing import Any

import pytest

from paxon.learners.optimizers import optimizers_page
from paxon.tasks.lm.params import optimizers
from paxon.tools.benchmarks import timing
from paxon.tools.sweeps import optimizer_study, sweep_main

# The best factor of each rate, and seconds of a step; AdamW's are 1.
_BEST = {"Muon": 8.0, "Lion": 0.25}
_SECONDS = {"Muon": 1.5, "SGD": 0.5}


def _bits(name: str, factor: float, steps: int) -> float:
  distance = abs(math.log2(factor / _BEST.get(name, 1.0)))
  return 2 + distance + 10 / steps if name != "LARS" else math.inf


@pytest.fixture(name="commands")
def _commands(monkeypatch) -> list[list[str]]:
  """Sweeps that were run; each stores results instead of training."""
  commands: list[list[str]] = []

  def sweep(argv: list[str]) -> int:
    folder, *flags = argv
    values = dict(flag.lstrip("-").split("=", 1) for flag in flags)
    knob, _, choices = values["knob"].partition("=")
    (pathlib.Path(folder) / "results").mkdir(parents=True, exist_ok=True)
    commands.append(argv)
    name = values["fdl.optimizer_name"]
    for number, choice in enumerate(choices.split(",")):
      knobs = {"rate_factor": values.get("fdl.rate_factor", "1"), knob: choice}
      steps = int(values["fdl.num_train_steps"])
      value = _bits(name, float(knobs["rate_factor"]), steps)
      pathlib.Path(folder, f"results/trial_{number:04}.json").write_text(
        json.dumps({"point": {knob: choice}, "value": value})
      )
    return 0

  def start(name: str) -> Callable[[], float]:
    return lambda: _SECONDS.get(name, 1.0)

  def interleave(first: Any, second: Any, *, rounds: int) -> timing.Pairs:
    return timing.Pairs(first=(first(),) * rounds, second=(second(),) * rounds)

  monkeypatch.setattr(sweep_main, "main", sweep)
  monkeypatch.setattr(optimizer_study, "_start", start)
  monkeypatch.setattr(timing, "interleave", interleave)
  return commands


@pytest.mark.parametrize(
  ("name", "sweeps"), [("AdamW", 1), ("Muon", 4), ("Lion", 3)]
)
def test_tunes_until_both_neighbors_are_worse(name, sweeps, commands, tmp_path):
  factor, bits = optimizer_study.tune(tmp_path, name)
  assert factor == _BEST.get(name, 1.0)
  assert bits == pytest.approx(2 + 10 / 150)
  assert len(commands) == sweeps


def test_a_page_is_made_of_the_study(commands, tmp_path, monkeypatch):
  monkeypatch.setattr(optimizers_page, "STUDY", tmp_path / "study.json")
  assert optimizer_study.main([str(tmp_path), "write"]) == 0
  study = json.loads((tmp_path / "study.json").read_text())
  rows = study["optimizers"]
  assert set(rows) == set(optimizers.CHOICES)
  assert rows["Muon"]["rate"] == 8 * optimizers.CHOICES["Muon"].rate
  assert rows["Muon"]["same_time_steps"] == 100
  assert rows["SGD"]["same_time_bits_per_byte"] == [2.0333] * 3
  # No second training where the times are equal.
  assert not any("adamw/same-time" in argv[0] for argv in commands)
  page = optimizers_page.page()
  muon = f"| Muon | {rows['Muon']['rate']:g} | 2.067 (2.067 to 2.067) |"
  assert f"{muon} 1.50 | 100 | 2.100" in page
  lars = f"| LARS | {optimizers.CHOICES['LARS'].rate / 2:g} | 3 of 3 not finite"
  assert page.index(lars) > page.index(muon)


def test_an_unknown_optimizer_is_an_error(tmp_path, capsys):
  assert optimizer_study.main([str(tmp_path), "tune", "Muonn"]) == 2
  assert "got 'Muonn'; did you mean 'Muon'?" in capsys.readouterr().err


@pytest.mark.usefixtures("commands")
def test_a_study_keeps_its_rates(tmp_path, capsys, monkeypatch):
  assert optimizer_study.main([str(tmp_path), "tune", "SGD"]) == 0
  changed = dataclasses.replace(optimizers.CHOICES["SGD"], rate=1e-3)
  monkeypatch.setattr(
    optimizers, "CHOICES", {**optimizers.CHOICES, "SGD": changed}
  )
  assert optimizer_study.main([str(tmp_path), "tune", "SGD"]) == 2
  assert "other learning rates than those of" in capsys.readouterr().err
