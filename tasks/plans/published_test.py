"""Tests of published step times and of the errors of estimates."""

import dataclasses
import math
import pathlib

import pytest

from paxon.runner import user_error
from paxon.runner.plan import hardware
from paxon.runner.plan import target as targets
from paxon.runner.plan.estimate import efficiency
from paxon.tasks.plans import main, published

_ROWS = published.read()
_BY_NAME = {row.name: row for row in _ROWS}


@pytest.mark.parametrize(
  ("name", "figure", "seconds"),
  [
    # 492 TFLOP/s, MaxText's README; 6 FLOPs for each of 6.61 B matmul weights
    # and token, and 12 L D T for attention: 32 x 4,096 tokens on 8 GPUs.
    (
      "maxtext-7b",
      492e12,
      32 * 4096 / 8 * (6 * 6.61e9 + 12 * 32 * 4096 * 4096) / 492e12,
    ),
    # 6,667 and 8,532 tokens/s for each GPU, torchtitan's benchmarks.
    ("torchtitan-8b", 6667, 2 * 8192 / 6667),
    ("torchtitan-8b-fp8", 8532, 2 * 8192 / 8532),
    # 29,994 tokens/s for each GPU, Megatron Bridge.
    ("megatron-8b-fp8", 29994, 16 * 8192 / 29994),
    # 597 tokens/s for each GPU, torchtitan 70B.
    ("torchtitan-70b", 597, 2 * 8192 / 597),
    ("nanogpt-124m", 0.1481, 0.1481),
    ("axlearn-70b", 9.2, 9.2),
  ],
)
def test_seconds_follow_from_what_was_published(name, figure, seconds):
  assert figure > 0
  assert _BY_NAME[name].seconds == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
  ("name", "parameters", "tokens", "devices", "peak"),
  [
    # Llama 3 8B: 8.03 B parameters, of which 0.53 B are embeddings.
    ("torchtitan-8b", 7.5e9, 16 * 8192, 8, 989.4e12),
    ("megatron-8b-fp8", 7.5e9, 128 * 8192, 8, 2250e12),
    ("recipes-8b", 7.5e9, 24 * 8192, 8, 918e12),
  ],
)
def test_ideal_seconds_follow_from_the_models_formula(
  name, parameters, tokens, devices, peak
):
  # 6 N, and 12 L D T for attention with 32 layers of width 4,096.
  flops = tokens * (6 * parameters + 12 * 32 * 4096 * 8192)
  expected = flops / devices / peak
  assert _BY_NAME[name].ideal == pytest.approx(expected, rel=0.01)


def test_bands_cover_nine_of_ten_published_runs():
  covered = [
    published.is_covered(row, published.leave_out(row, _ROWS)) for row in _ROWS
  ]
  assert sum(covered) >= 0.9 * len(covered)
  # A band that is 5 % narrower on each side would cover fewer.
  narrow = [
    row.band[0] * 1.05
    <= 1 / (1 + published.leave_out(row, _ROWS))
    <= row.band[1] / 1.05
    for row in _ROWS
  ]
  assert sum(narrow) < sum(covered)


def test_errors_are_those_of_the_goal():
  errors = sorted(abs(published.leave_out(row, _ROWS)) for row in _ROWS)
  assert errors[len(errors) // 2] < 0.08
  assert errors[-1] < 0.25


def test_the_factors_are_the_fit():
  load, stragglers = published.fit(_ROWS)
  for name in ("h100", "h200"):
    found = efficiency.choose(hardware.find_kind(name), {})
    assert found is not None
    assert found.load == pytest.approx(load, abs=5e-4)
    assert found.stragglers == pytest.approx(stragglers, abs=5e-4)


def test_the_fit_finds_what_made_the_times():
  # Times of a known law: exp(0.1 + 0.02 sqrt(2 log hosts)).
  made = [
    dataclasses.replace(
      row,
      low_precision=0.0,
      seconds=row.simulated
      * math.exp(0.1 + 0.02 * math.sqrt(2 * math.log(row.num_hosts))),
    )
    for row in _ROWS
  ]
  assert published.fit(made) == pytest.approx((0.1, 0.02))
  for row in made:
    if row.kind in ("h100", "h200") and row.target != "h200:1x1":
      assert published.leave_out(row, made) == pytest.approx(0.0, abs=1e-9)


def test_rows_name_targets_and_uses():
  assert len(_BY_NAME) == len(_ROWS)
  for row in _ROWS:
    assert targets.parse(row.target).hardware.name == row.kind
    assert row.use in ("fit", "board", "check")
    assert 0 < row.ideal < row.simulated


def test_the_page_has_the_table():
  root = pathlib.Path(published.__file__).parents[2]
  page = (root / "docs" / "plan_accuracy.md").read_text()
  assert page == published.replace_section(page), (
    "run `tools/plans --accuracy --table`"
  )
  with pytest.raises(user_error.UserError, match="The page has no <!--"):
    published.replace_section("no marks")


def test_the_command_prints_rows(capsys):
  assert main.main(["--accuracy", "--list"]) == 0
  assert capsys.readouterr().out.split() == [row.name for row in _ROWS]
  assert main.main(["--accuracy"]) == 0
  assert "| maxtext-7b | `h100:1x8` | fit | 1.53 s |" in capsys.readouterr().out
  assert main.main(["--accuracy", "maxtext-8b"]) == 2
  error = capsys.readouterr().err
  assert "no published run 'maxtext-8b'; did you mean" in error
