"""Tests that the page on schedules is current, and that steps can be timed."""

import pathlib

import jax
import pytest

from paxon.tools import (
  schedules_main,
  schedules_measurement,
  schedules_page,
  schedules_plan,
)
from paxon.tools.benchmarks import timing

_ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
  """Where the command writes, little and quickly."""
  monkeypatch.setattr(schedules_main, "_ROOT", tmp_path)
  for module in (schedules_page, schedules_plan):
    for name in ("NUM_STAGES", "NUM_MICROBATCHES"):
      monkeypatch.setattr(module, name, 2)
  monkeypatch.setattr(schedules_page, "_FEW", 2)
  (tmp_path / "docs").mkdir()
  return tmp_path


def test_the_page_is_current():
  text = (_ROOT / schedules_page.PAGE).read_text()
  measured = schedules_page.measured_part(text)
  assert text == schedules_page.page(measured), "run tools/schedules"
  rows = {
    line.split(" | ")[0].removeprefix("| "): line.split(" | ")[3:7]
    for line in text.split(schedules_page.BEGIN)[0].splitlines()
    if line.startswith("| ")
  }
  # Bubbles on both clocks, without and with recomputation.
  assert rows["1F1B"] == ["9", "40", "12", "74"]
  assert rows["1F1B two-slot"] == ["9", "9", "12", "12"]
  assert rows["interleaved two-slot, 2 chunks"] == ["4.5", "4.5", "6", "6"]


def test_eight_h200_take_what_a_stages_work_takes():
  costs = schedules_plan.stage_costs()
  # By hand, forward: 4 layers of 218.1 M weights and of attention with 32 heads
  # of 128, 8192 tokens, at 0.8 and 0.5 of 989 TFLOP/s; the rest is memory.
  products = 4 * 2 * 218.1e6 * 8192 / (0.8 * 989e12)
  attention = 4 * 2 * 8192**2 * 4096 / (0.5 * 989e12)
  least = 1e3 * (products + attention)
  assert least < costs.forward < 1.15 * least
  # 64 MiB over NVLink, at 0.8 of 450 GB/s.
  assert costs.message == pytest.approx(1e3 * 2**26 / (0.8 * 450e9))
  assert costs.weight_gradient < costs.forward < costs.input_gradient
  # GPipe in lock-step: M + P - 1 ticks each way.
  whole = costs.forward + costs.input_gradient + costs.weight_gradient
  planned = (_ROOT / schedules_page.PAGE).read_text().split("## Planned")[1]
  (row,) = [x for x in planned.splitlines() if x.startswith("| GPipe ")]
  step = 39 * (whole + 2 * costs.message)
  assert float(row.split(" | ")[3]) == pytest.approx(step, rel=1e-3)


def test_the_pictures_are_current():
  for name, svg in schedules_page.pictures().items():
    assert (_ROOT / name).read_text() == svg, "run tools/schedules"


def test_steps_are_timed_beside_the_sequential_one(monkeypatch):
  monkeypatch.setattr(schedules_measurement, "EMBED", 4)
  monkeypatch.setattr(
    schedules_measurement, "_MAKERS", schedules_measurement._MAKERS[2:3]
  )
  monkeypatch.setattr(
    schedules_measurement, "_SAVING", schedules_measurement._SAVING[2:]
  )
  known = timing.Pairs(first=(0.03, 0.01, 0.02), second=(0.01, 0.01, 0.05))
  rounds = []

  def interleave(first, second, **given):
    # Steps that are timed can be run.
    first(), second()
    rounds.append(given["rounds"])
    return known

  monkeypatch.setattr(timing, "interleave", interleave)
  found = schedules_measurement.measure(rounds=3)
  # Medians of 30, 10, 20 and of 10, 10, 50 ms, and of 3, 1 and 0.4.
  assert [row[:4] for row in found] == [
    ("1F1B two-slot", "20", "10", "1.00"),
    ("ZB-H1, saved", "20", "10", "1.00"),
  ]
  assert all(row[4].isdigit() for row in found)
  assert rounds == [3, 3]


def test_too_few_devices_are_refused(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 2)
  with pytest.raises(ValueError, match=r"needs 4 devices, there are 2; set"):
    schedules_measurement.measure(rounds=1)


def test_the_command_writes_the_page_and_keeps_what_was_measured(
  elsewhere, capsys
):
  page = elsewhere / schedules_page.PAGE
  assert schedules_main.main([]) == 0
  assert "Not measured yet" in page.read_text()
  assert all((elsewhere / name).exists() for name in schedules_page.pictures())
  page.write_text(schedules_page.page("once: 3 ms"))
  assert schedules_main.main([]) == 0
  assert page.read_text() == schedules_page.page("once: 3 ms")
  assert "wrote docs/pipeline_schedules.md" in capsys.readouterr().out


def test_the_command_measures_when_asked(monkeypatch, elsewhere):
  rows = [("GPipe", "5", "10", "0.50", "7")]
  monkeypatch.setattr(
    schedules_measurement, "measure", lambda *, rounds: rows[:rounds]
  )
  assert schedules_main.main(["--measure", "--rounds=1"]) == 0
  text = (elsewhere / schedules_page.PAGE).read_text()
  assert "| GPipe | 5 | 10 | 0.50 | 7 |" in schedules_page.measured_part(text)
  assert "medians of 1 rounds" in text
