"""Comparisons of plans, by figures that are computed by hand."""

import dataclasses

import pytest

from paxon.runner import user_error
from paxon.runner.plan import result, sample_plan
from paxon.runner.plan.functions import plan_comparison

_GIB = 2**30


def _gathers(size, module_bytes, axes=("fsdp",)):
  return result.Collectives(
    kind="all-gather",
    axes=axes,
    link="fast",
    count=2,
    asynchronous=0,
    payload_bytes=size,
    wire_bytes=float(size),
    seconds=None,
    module_bytes=module_bytes,
  )


def _plans(**head):
  base = sample_plan.plan(
    collectives=(_gathers(4 * _GIB, {"Model/block0": 4 * _GIB}),)
  )
  return base, dataclasses.replace(base, **head)


def _compare(base, head, limits=None):
  (found,) = plan_comparison.compare(
    [base], [head], plan_comparison.parse_limits(limits) if limits else ()
  )
  return found


def test_equal_plans_have_no_changes():
  found = _compare(*_plans(), "peak>+0%,step>+0s")
  assert {row[-1] for row in found.rows} == {"same"}
  assert not found.lines
  assert not found.excesses


def test_added_gathers_are_a_sentence_with_the_module():
  base, head = _plans(
    collectives=(_gathers(16 * _GIB, {"Model/block0": 16 * _GIB}),)
  )
  assert "adds 12.00 GiB of all-gathers over fsdp (Model/block0)" in (
    _compare(base, head).lines
  )
  assert "removes 12.00 GiB of all-gathers over fsdp (Model/block0)" in (
    _compare(head, base).lines
  )


def test_moved_gathers_name_both_modules():
  base, head = _plans(collectives=(_gathers(4 * _GIB, {"b": 4 * _GIB}),))
  (line,) = _compare(base, head).lines
  assert line.startswith("moves all-gathers over fsdp")
  assert "+4.00 GiB b" in line
  assert "-4.00 GiB Model/block0" in line


def test_memory_verdict_mesh_and_versions():
  base, head = _plans(
    memory=sample_plan.memory(peak=126 * _GIB),
    fit="does not fit",
    mesh={"data": 8},
    versions={"jax": "0.11.0"},
  )
  found = _compare(base, head)
  assert found.title == "tasks.a.B on h200:1x8: fits -> does not fit"
  # 126 / 72 = 1.75.
  row = ("peak", "72.00 GiB", "126.00 GiB", "+54.00 GiB (+75.0%)")
  assert row in found.rows
  assert "mesh: fsdp=8 -> data=8" in found.lines
  assert "versions: jax 0.10.2 -> 0.11.0" in found.lines
  assert "| peak | 72.00 GiB | 126.00 GiB |" in found.to_markdown()
  assert " ".join(row) in " ".join(found.to_text().split())


@pytest.mark.parametrize(
  ("limit", "is_exceeded"),
  [
    ("peak>+5%", True),  # 72 -> 76 GiB are 5.6 %.
    ("peak>+5.6%", False),
    ("peak>+4GiB", False),
    ("peak>+3.9GiB", True),
    ("all-gather>+1GiB", True),
    ("all-gather over fsdp,data>+1GiB", False),
    ("all-gather over fsdp>+2GiB,all-reduce>+0%", False),
    ("all-reduce>+0%,all-gather over fsdp>+1GiB", True),
    ("collectives>+50%", False),
    ("collectives>+49%", True),
  ],
)
def test_limits(limit, is_exceeded):
  base, head = _plans(
    memory=sample_plan.memory(peak=76 * _GIB),
    collectives=(_gathers(6 * _GIB, {"Model/block0": 6 * _GIB}),),
    mesh={"fsdp": 4, "data": 2},
  )
  found = _compare(base, head, limit)
  assert bool(found.excesses) == is_exceeded
  assert ("exceeded" in found.to_text()) == is_exceeded
  assert ("exceeded" in found.to_markdown()) == is_exceeded


def test_an_unknown_value_exceeds_its_limit():
  base, head = _plans(estimate=None)
  (text,) = _compare(base, head, "step>+5%").excesses
  assert text == "step>+5%: 900 ms -> unknown, so it cannot be checked"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("peak", "such as peak>\\+5%"),
    ("peak>5%", "such as peak>\\+5%"),
    ("peek>+5%", "'peek' is not a value"),
    ("peak>+5", "needs an amount in %, B, KiB"),
    ("step>+1GiB", "needs an amount in %, s, ms, us"),
  ],
)
def test_a_bad_limit_is_an_error(text, message):
  with pytest.raises(user_error.UserError, match=message):
    plan_comparison.parse_limits(text)


def test_other_targets_and_axes_are_errors():
  base, head = _plans(target="v5e:2x4")
  with pytest.raises(user_error.UserError, match=r"h200:1x8, .* v5e:2x4"):
    _compare(base, head)
  with pytest.raises(user_error.UserError, match=r"axis data .* fsdp"):
    _compare(base, base, "all-gather over data>+1GiB")
  with pytest.raises(user_error.UserError, match="several plans of one"):
    plan_comparison.compare([base, base], [base])


@pytest.mark.parametrize("text", ["", " ", "peak>+5%,", "peak+5%"])
def test_limits_that_check_nothing_are_errors(text):
  with pytest.raises(user_error.UserError, match="--fail_if="):
    plan_comparison.parse_limits(text)


def test_limits_may_have_spaces_between_them():
  found = plan_comparison.parse_limits("peak>+5%, flops>+1%")
  assert [limit.name for limit in found] == ["peak", "flops"]


def test_files_without_plans_are_not_equal():
  plan = sample_plan.plan()
  with pytest.raises(user_error.UserError, match="The head has no plans"):
    plan_comparison.compare([plan], [])
  with pytest.raises(user_error.UserError, match="The base has no plans"):
    plan_comparison.compare([], [])
