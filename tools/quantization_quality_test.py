"""Tests for the comparison of trainings with and without quantization."""

import json
import math

import pytest

from paxon.runner import main as runner_main
from paxon.tools import (
  page_sections,
  quantization_quality,
  quantization_quality_main,
)

BF16 = {1: 2.0, 2: 2.1, 3: 2.2}  # Mean 2.1, spread 0.1.


def _results(**losses):
  return quantization_quality.Results(
    experiment="a.b.Small",
    steps=7,
    date="2026-11-21",
    hardware="jax 0.0 on 2 CPU cores",
    losses=losses,
  )


@pytest.mark.parametrize(
  ("seeds", "other", "holds"),
  [
    pytest.param(BF16, 2.29, True, id="within_two_spreads"),
    pytest.param(BF16, 2.31, False, id="beyond_two_spreads"),
    pytest.param({1: 2.0, 2: 2.0}, 2.019, True, id="within_one_percent"),
    pytest.param({1: 2.0, 2: 2.0}, 2.021, False, id="beyond_one_percent"),
    pytest.param({1: 2.0}, 2.019, True, id="one_seed_has_no_spread"),
    pytest.param({1: 2.0}, 2.021, False, id="one_seed_beyond_one_percent"),
    pytest.param(BF16, 1.0, True, id="better"),
    pytest.param(BF16, math.nan, False, id="nan"),
  ],
)
def test_a_recipe_holds_by_its_mean(seeds, other, holds):
  results = _results(fp8=dict.fromkeys(seeds, other), bf16=seeds)
  base, row = quantization_quality.rows(results)
  assert (base.recipe, row.recipe) == ("bf16", "fp8")
  assert row.holds is holds


def test_the_table_says_what_was_measured():
  losses = {seed: loss * 1.2 for seed, loss in BF16.items()}
  text = quantization_quality.to_markdown(_results(bf16=BF16, int4=losses))
  assert text.startswith("Small, 7 steps; 2026-11-21, jax 0.0 on 2 CPU cores.")
  assert text.splitlines()[-2:] == [
    "| `bf16` | 2.1000 | 0.1000 | - | - | - | 2.0000, 2.1000, 2.2000 |",
    "| `int4` | 2.5200 | 0.1200 | +20.00% | +9.52% | **fails** |"
    " 2.4000, 2.5200, 2.6400 |",
  ]


def test_json_keeps_everything():
  results = _results(bf16=BF16)
  assert quantization_quality.from_json(results.to_json()) == results


def test_other_seeds_are_not_compared():
  with pytest.raises(
    ValueError, match=r"int8 was trained with .* \[1, 2\], and"
  ):
    quantization_quality.rows(_results(bf16=BF16, int8={1: 2.0, 2: 2.0}))


def test_bf16_must_be_there():
  with pytest.raises(ValueError, match=r"no losses of bf16"):
    quantization_quality.rows(_results(int8=BF16))


def _run(argv):
  try:
    runner_main.run(argv=["main", *argv])
  except SystemExit as end:
    return end.code


def test_trains_what_is_missing_and_compares(tmp_path, capsys):
  commands = []

  def run(argv):
    commands.append(list(argv))
    return _run(argv)

  arguments = [
    "--exp=paxon.runner.training.testing.TinyLm",
    f"--folder={tmp_path}",
    "--steps=2",
    "--seeds=3",
    "--recipes=fp8_current",
    "--fdl=num_layers=1",
  ]
  assert quantization_quality_main.main(arguments, run) == 0
  assert [c[1].rpartition("/")[2] for c in commands] == [
    "bf16-seed3",
    "fp8_current-seed3",
  ]
  written = json.loads((tmp_path / "results.json").read_text())["losses"]
  # The same initial values and data, and close, but not the same.
  bf16, fp8 = written["bf16"]["3"], written["fp8_current"]["3"]
  assert bf16 != fp8
  assert fp8 == pytest.approx(bf16, rel=0.02)
  assert f"| `fp8_current` | {fp8:.4f} |" in capsys.readouterr().out
  assert quantization_quality_main.main(arguments, run) == 0
  assert len(commands) == 2


def test_a_training_that_fails_ends_it(tmp_path, capsys):
  arguments = [f"--folder={tmp_path}", "--seeds=1"]
  assert quantization_quality_main.main(arguments, lambda argv: 3) == 1
  assert "bf16-seed1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--recipes=fp9", "no recipe is named 'fp9'"),
    ("--seeds=1,1", "--seeds has one twice"),
    ("--seeds=a", "--seeds must be numbers with commas, got 'a'"),
    ("--steps=0", "--steps must be positive, got 0"),
  ],
)
def test_wrong_arguments_are_refused(argument, message, capsys):
  with pytest.raises(SystemExit):
    quantization_quality_main.main(["--folder=x", argument])
  assert message in capsys.readouterr().err


def test_a_section_is_replaced_between_its_marks(tmp_path):
  page = "a\n<!-- Made by x. -->\nold\n<!-- Until here. -->\nb\n"
  found = page_sections.replaced(page, "x", "new")
  assert found == "a\n<!-- Made by x. -->\n\nnew\n\n<!-- Until here. -->\nb\n"
  with pytest.raises(ValueError, match=r"must have <!-- Made by y. --> once"):
    page_sections.replaced(page, "y", "new")
  path = tmp_path / "page.md"
  path.write_text(page)
  page_sections.write(path, "x", "new")
  assert path.read_text() == found
