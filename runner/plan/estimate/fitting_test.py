"""Tests for calibrations that are made from measurements."""

import dataclasses
import datetime
from typing import Any

import pytest

from paxon.runner import user_error
from paxon.runner.plan import hardware, result
from paxon.runner.plan.estimate import calibration, fitting, microbenchmarks

_TODAY = datetime.date(2026, 1, 31)
_H200 = hardware.named("h200")

_FOUND = microbenchmarks.Measurements(
  products={"bfloat16": 0.7 * 989.4e12, "float32": 0.6 * 494.7e12},
  best_products={"bfloat16": 0.8 * 989.4e12, "float32": 0.6 * 494.7e12},
  memory=0.9 * 4.8e12,
  link=0.8 * 450e9,
  attention=0.5 * 989.4e12,
  overhead=2e-6,
)


def _from(found, kind):
  made = fitting.from_microbenchmarks(
    found, kind=kind, where="8 things", versions={"jax": "1"}, today=_TODAY
  )
  # It is a file that can be read.
  text = calibration.to_json(made)
  assert calibration.from_json(text, name="x") == made
  return made


def test_small_programs_give_shares_of_the_data_sheet():
  made = _from(_FOUND, _H200)
  assert made.matmul == pytest.approx(
    {"bfloat16": 0.7, "float32": 0.6, "default": 0.6}
  )
  assert made.attention == pytest.approx(0.5)
  assert made.memory == pytest.approx(0.9)
  assert made.fast_link == pytest.approx(0.8)
  assert made.kernel_overhead == 2e-6
  assert made.measured
  assert made.source.startswith("microbenchmarks on 8 things")


def test_links_of_one_device_are_those_of_the_package():
  found = dataclasses.replace(_FOUND, link=None)
  made = _from(found, _H200)
  assert made.fast_link == calibration.for_hardware(_H200).fast_link
  assert "links as in the package's file" in made.source


def test_without_a_data_sheet_the_best_stands_for_it():
  found = dataclasses.replace(_FOUND, attention=None)
  made = _from(found, hardware.named("cpu"))
  assert made.rates.flops == found.best_products
  assert made.rates.memory == found.memory
  assert made.rates.network is None
  assert made.matmul["bfloat16"] == pytest.approx(7 / 8)
  assert (made.memory, made.fast_link) == (1.0, 1.0)


def _plan(**changes) -> Any:
  """A plan of 8 devices: 1e12 FLOPs and 8 x 256 tokens a step."""
  estimate = result.Estimate(
    step=0.5,
    compute=0.5,
    memory=0.0,
    overhead=0.0,
    exposed={},
    tokens_per_second=None,
    mfu=0.1,
    band=(0.5, 2.0),
    source=_before().summary,
    datasheet_step=0.2,
    datasheet_mfu=0.2,
    ceiling_mfu=0.3,
  )
  fields = {
    "experiment": "a.B",
    "overrides": (),
    "target": "h200:1x8",
    "device_kind": "h200",
    "num_devices": 8,
    "num_chips": 8,
    "mesh": {"fsdp": 8},
    "batch": {"inputs": (8, 256)},
    "compiled": True,
    "memory": result.Memory(
      parameters=0, other_variables=0, optimizer=0, batch=0, gradients=0
    ),
    "flops": result.Flops(
      model=2 * 10**12,
      causal_model=1e12,
      hardware=2 * 10**12,
      recomputed=0,
      by_module={},
      by_kind={},
      by_dtype={},
    ),
    "collectives": (),
    "kernels": {},
    "bound": None,
    "fit": "fits",
    "advice": (),
    "findings": (),
    "notes": (),
    "fingerprint": None,
    "versions": {},
    "compile_seconds": None,
    "estimate": estimate,
  }
  return result.Plan(**fields | changes)


def _before():
  return calibration.for_hardware(_H200)


def _reports(*seconds, tokens=2048.0):
  """What a run writes of steps with these times."""
  return [
    {
      "model_tflops_per_device": 1e12 / 8 / time / 1e12,
      "tokens_per_second": tokens / time,
      "loss": 1.0,
    }
    for time in seconds
  ]


def test_the_time_of_a_run_is_its_median_without_the_start():
  found = fitting.time_of_run(
    _reports(9.0, 0.8, 1.0, 0.9, 1.1, 5.0), _plan(), name="r"
  )
  assert found.seconds == pytest.approx(1.0)
  # Quartiles of 0.8 0.9 1.0 1.1 5.0.
  assert found.spread == pytest.approx((1.1 - 0.9) / 2 / 1.0)
  assert found.reports == 5


def test_the_estimate_becomes_the_time_of_the_run():
  time = fitting.RunTime(seconds=1.5, spread=0.01, reports=9)
  before = _before()
  made = fitting.from_run(
    time, _plan(), before, name="r", versions={}, today=_TODAY
  )
  # Three times the estimate of 0.5 s: all rates are a third.
  assert made.matmul["default"] == pytest.approx(before.matmul["default"] / 3)
  assert made.memory == pytest.approx(before.memory / 3)
  assert made.kernel_overhead == pytest.approx(3 * before.kernel_overhead)
  assert made.measured
  assert made.band == (0.85, 1.18)
  assert "run r of a.B on 8 h200, 9 reports: 1.5 s a step" in made.source


def test_an_uneven_run_widens_the_band():
  time = fitting.RunTime(seconds=1.0, spread=0.2, reports=9)
  made = fitting.from_run(
    time, _plan(), _before(), name="r", versions={}, today=_TODAY
  )
  assert made.band == pytest.approx((0.6, 1.4))


@pytest.mark.parametrize(
  ("reports", "changes", "message"),
  [
    (_reports(1.0, 1.0), {}, r"run r has 1 reports .* at least 2 are needed"),
    ([{"loss": 1.0}] * 9, {}, r"has 0 reports of its speed"),
    (
      _reports(1.0, 1.0, 1.0, tokens=4096.0),
      {},
      r"r differs from the plan: .* 4096 tokens, but a batch .* has 2048",
    ),
    (_reports(1.0, 1.0, 1.0, tokens=512.0), {}, r"differs from the plan"),
    (
      _reports(1.0, 1.0, 1.0),
      {
        "flops": dataclasses.replace(_plan().flops, causal_model=None),
      },
      r"a\.B has no token batch",
    ),
  ],
)
def test_a_run_that_does_not_belong_to_the_plan(reports, changes, message):
  with pytest.raises(user_error.UserError, match=message):
    fitting.time_of_run(reports, _plan(**changes), name="r")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"estimate": None, "notes": ("The step is not predicted: because.",)},
      r"has no estimate to correct\. The step is not predicted: because",
    ),
    (
      {"estimate": dataclasses.replace(_plan().estimate, source="other")},
      r"was made with 'other', not with 'not measured by us.*PAXON_PLAN_CALIB",
    ),
  ],
)
def test_an_estimate_that_cannot_be_corrected(changes, message):
  time = fitting.RunTime(seconds=1.5, spread=0.01, reports=9)
  with pytest.raises(user_error.UserError, match=message):
    fitting.from_run(
      time, _plan(**changes), _before(), name="r", versions={}, today=_TODAY
    )
