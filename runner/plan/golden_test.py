"""Tests for golden plans."""

import dataclasses

import pytest

from paxon.runner.plan import golden, sample_plan

_VERSIONS = {
  "jax": "0.10.2",
  "jaxlib": "0.10.3",
  "jax-cuda13-plugin": "0.10.4",
  "libtpu": "0.0.42",
}


def _plan(**fields):
  return sample_plan.plan(versions=_VERSIONS, **fields)


def _golden(plan=None):
  return golden.get_golden_values(
    plan or _plan(), platform="cuda", date="2026-11-21", seconds=12.6
  )


def test_holds_what_follows_from_the_program():
  made = _golden()
  found = made.figures
  assert found["memory"]["peak"] == 72 * 2**30
  assert found["flops"]["causal_model"] == 2_987 * 10**12
  assert found["kernels"] == {"__cudnn$fmhaSoftmax": 32}
  assert found["fit"] == "fits"
  assert made.seconds == 13
  # Of what else is installed nothing depends.
  assert set(made.versions) == {"jax", "jaxlib", "jax-cuda13-plugin"}


def test_a_file_is_read_as_it_was_written():
  made = _golden()
  text = golden.to_json(made)
  assert golden.from_json(text) == made
  assert golden.to_json(golden.from_json(text)) == text


def test_collectives_that_differ_in_nothing_shown_are_added_up():
  plan = _plan()
  first = plan.collectives[0]
  twice = dataclasses.replace(plan, collectives=(first, first))
  (sums,) = golden.figures(twice)["collectives"].values()
  assert sums == {"count": 2 * first.count, "bytes": 2 * first.payload_bytes}


def test_equal_plans_do_not_differ():
  found = golden.figures(_plan())
  assert golden.differences(found, found) == []


@pytest.mark.parametrize(
  ("peak", "lines"),
  [
    (101.9, []),
    (98.1, []),
    (102.1, ["memory / peak: 1,000,000 -> 1,021,000 (+2.1 %)"]),
    (97.9, ["memory / peak: 1,000,000 -> 979,000 (-2.1 %)"]),
    (None, ["memory / peak: 1,000,000 -> nothing"]),
  ],
)
def test_two_percent_are_allowed(peak, lines):
  expected = {"memory": {"peak": 1_000_000}, "fit": "fits"}
  bytes_ = None if peak is None else round(10_000 * peak)
  found = {"memory": {"peak": bytes_}, "fit": "fits"}
  assert golden.differences(expected, found) == lines


def test_what_is_new_what_is_gone_and_what_reads_otherwise_is_told():
  gather = {"count": 4, "bytes": 4000}
  expected = {"fit": "fits", "collectives": {"all-gather over fsdp": gather}}
  found = {
    "fit": "does not fit",
    "collectives": {"all-reduce over data": {"count": 0, "bytes": 7}},
  }
  assert golden.differences(expected, found) == [
    "fit: fits -> does not fit",
    "collectives / all-gather over fsdp / count: 4 -> nothing",
    "collectives / all-gather over fsdp / bytes: 4,000 -> nothing",
    "collectives / all-reduce over data / count: nothing -> 0",
    "collectives / all-reduce over data / bytes: nothing -> 7",
  ]


def test_a_plan_without_a_compiler_is_no_golden_one():
  with pytest.raises(ValueError, match=r"tasks\.a\.B on h200:1x8 was not comp"):
    _golden(_plan(compiled=False))
