"""Tests for the comparison of plans in bfloat16 and in fp8."""

import dataclasses
import datetime

from paxon.runner.plan import sample_plan
from paxon.tools import fp8_plans_main


def _plan(case):
  """Half of the time in fp8."""
  is_narrow = case.quantization is not None
  base = sample_plan.plan()
  assert base.bound is not None
  return dataclasses.replace(
    base,
    experiment="a.b.Small",
    batch={"inputs": (32, 1024)},
    bound=dataclasses.replace(base.bound, step=0.2 if is_narrow else 0.4),
    estimate=sample_plan.estimate(step=0.6 if is_narrow else 0.9),
    flops=dataclasses.replace(
      base.flops, by_dtype={"float8_e4m3fn": 90, "bfloat16": 10}
    ),
    versions={"jax": "0.0"},
  )


def test_the_table_says_what_fp8_saves():
  plans = {case: _plan(case) for case in fp8_plans_main.CASES}
  text = fp8_plans_main.to_markdown(plans, date=datetime.date(2026, 11, 22))
  words, _, *lines = text.splitlines()
  assert words == "Small, 32 rows of 1,024 tokens; 2026-11-22, jax 0.0."
  rows = {
    cells[0]: cells[1:]
    for cells in ([c.strip() for c in x.strip("|").split("|")] for x in lines)
  }
  assert rows["Bound by the data sheet"] == ["400 ms", "200 ms", "2.00"] * 2
  assert rows["Estimate of a step"] == ["900 ms", "600 ms", "1.50"] * 2
  gathered = [
    c
    for c in sample_plan.plan().collectives
    if c.kind == "all-gather" or c.gathers
  ]
  assert gathered
  size = fp8_plans_main._size(sum(c.payload_bytes for c in gathered))
  assert rows["Gathered by a device"] == [size, size, ""] * 2
  assert text.endswith(
    "90 % of the FLOPs are in fp8. With `fp8_current` the estimate of a step"
    " on one GPU is 600 ms."
  )
