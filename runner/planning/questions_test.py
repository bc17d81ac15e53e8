"""Tests for the cost of training, sizes of a target, and grids."""

import dataclasses

import pytest

from paxon.runner.plan import report, result, sample_plan
from paxon.runner.plan import target as targets
from paxon.runner.planning import questions


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ({"tokens": "many"}, r"^--plan_tokens=many must be a positive number, suc"),
    ({"tokens": "-1"}, r"^--plan_tokens=-1 must be a positive number"),
    ({"tokens": "nan"}, r"^--plan_tokens=nan must be a positive number"),
    ({"tokens": "inf"}, r"^--plan_tokens=inf must be a positive number"),
    ({"tokens": "1", "price": "$2"}, r"^--plan_price=\$2 must be a positive"),
    ({"price": "2.5"}, r"^--plan_price requires --plan_tokens, .*=1e12\.$"),
    ({"days": "30"}, r"^--plan_days requires --plan_tokens"),
    ({"tokens": "1", "days": "0"}, r"^--plan_days=0 must be a positive"),
    ({"batches": "64,x"}, r"^--plan_batches=64,x must be positive integers se"),
    ({"batches": "0"}, r"^--plan_batches=0 must be positive integers"),
    ({"lengths": "8,,9"}, r"^--plan_lengths=8,,9 must be positive integers"),
    ({"lengths": "8,8"}, r"^--plan_lengths=8,8 has a value twice\.$"),
    (
      {"batches": ",".join(map(str, range(1, 66)))},
      r"make 65 plans; at most 6",
    ),
    (
      {"programs": "eval"},
      r"^--plan_programs=eval must be one of auto, all, t",
    ),
    (
      {"tokens": "1", "days": "1", "batches": "8"},
      r"^--plan_days cannot be combined with --plan_batches or",
    ),
    *(
      (
        {"batches": "largest", **more},
        r"^--plan_batches=largest cannot be combined with --plan_search, --pla",
      )
      for more in (
        {"is_searched": True},
        {"lengths": "8"},
        {"tokens": "1", "days": "1"},
        {"decode": "8x8"},
      )
    ),
    (
      {"is_searched": True, "lengths": "8"},
      r"^--plan_search cannot be combined with --plan_batches or",
    ),
  ],
)
def test_wrong_flags_are_named(flags, message):
  with pytest.raises(ValueError, match=message):
    questions.parse(**flags)


def test_flags_are_read():
  asked = questions.parse(
    tokens="1e12", price="2.5", batches="64, 128", lengths="2048,8192"
  )
  assert (asked.tokens, asked.price) == (1e12, 2.5)
  assert asked.cells() == [
    {"global_batch_size": 64, "length": 2048},
    {"global_batch_size": 128, "length": 2048},
    {"global_batch_size": 64, "length": 8192},
    {"global_batch_size": 128, "length": 8192},
  ]
  assert questions.parse(lengths="8").cells() == [{"length": 8}]
  assert questions.parse().cells() == []
  asked = questions.parse(batches="largest")
  assert asked.wants_largest
  assert asked.cells() == []


@pytest.mark.parametrize(
  ("programs", "target", "has_others"),
  [
    ("auto", "h200:1x8", True),
    ("auto", "cpu:8", True),
    ("auto", "v5e:2x2", False),
    ("all", "v5e:2x2", True),
    ("train", "h200:1x8", False),
  ],
)
def test_tpus_compile_only_the_training_step_by_default(
  programs, target, has_others
):
  asked = questions.parse(programs=programs)
  assert asked.has_others(targets.parse(target)) is has_others


def test_decoding_steps():
  asked = questions.parse(decode="1x8192, 64x4096")
  assert asked.decode == ((1, 8192), (64, 4096))
  assert questions.parse().decode == ()


@pytest.mark.parametrize("text", ["", "8", "0x8", "8x0", "8x8,8x8", "8x8x8"])
def test_decoding_steps_that_are_none(text):
  with pytest.raises(
    ValueError, match=rf"--plan_decode={text} must be different pairs of posit"
  ):
    questions.parse(decode=text)


def test_decoding_steps_are_not_combined():
  with pytest.raises(ValueError, match=r"--plan_decode cannot be combined"):
    questions.parse(decode="8x8", batches="8")
  with pytest.raises(ValueError, match=r"--plan_decode cannot be combined"):
    questions.parse(decode="8x8", is_searched=True)


def _plan(rate=10_000.0, *, chips=8, **fields):
  return sample_plan.plan(
    num_chips=chips,
    estimate=sample_plan.estimate(tokens_per_second=rate),
    notes=(),
    **fields,
  )


def test_the_cost_is_tokens_over_the_rate():
  asked = questions.Questions(tokens=864e6 * 10, price=2.5)
  # 864 M tokens a day at 10,000 tokens/s.
  assert questions.answer(_plan(), asked).training_cost == result.TrainingCost(
    tokens=864e7, days=10.0, device_hours=8 * 240.0, money=8 * 240.0 * 2.5
  )


def test_without_an_estimate_the_cost_is_a_lower_bound():
  plan = sample_plan.plan(estimate=None, notes=())
  found = questions.answer(plan, questions.Questions(tokens=1e9))
  assert found.training_cost is not None
  assert found.training_cost.is_lower_bound
  assert "are lower bounds" in found.notes[0]
  plan = sample_plan.plan(estimate=None, bound=None, notes=())
  found = questions.answer(plan, questions.Questions(tokens=1e9))
  assert found.training_cost is None
  assert "is not known" in found.notes[0]


# The first is a time in which no program starts.
@pytest.mark.parametrize("step", [4e-6, 0.9e-3])
def test_a_step_that_the_host_limits_has_no_throughput(step):
  bound = sample_plan.plan().bound
  assert bound is not None
  bound = dataclasses.replace(bound, step=step, tokens_per_second=21e9)
  plan = sample_plan.plan(bound=bound, estimate=None, notes=())
  found = questions.answer(plan, questions.Questions(tokens=1e9))
  assert found.bound.tokens_per_second is None
  assert found.training_cost is None
  assert "is not known, or so short that the host limits it" in found.notes[0]
  # No tokens/s, no MFU and no mark.
  line = report.to_table([found]).splitlines()[1]
  assert line.split()[-4:] == ["-", "-", "-", "-"]


def test_sizes_are_not_tried_if_the_time_is_not_known():
  first = targets.parse("cpu:8")
  plan = sample_plan.plan(estimate=None, bound=None, notes=())
  plan = questions.answer(plan, questions.Questions(tokens=1e9))
  found = questions.find_size(
    questions.Size(first, plan), 1.0, lambda target: pytest.fail(str(target))
  )
  table = questions.to_size_table(found, 1.0).splitlines()
  assert table[-1] == "the time of training is not known"


def test_a_cost_by_a_bound_without_communication_says_so():
  bound = sample_plan.plan().bound
  assert bound is not None
  bound = dataclasses.replace(bound, fast_link=None, network=None)
  plan = sample_plan.plan(estimate=None, bound=bound, notes=())
  found = questions.answer(plan, questions.Questions(tokens=1e9))
  assert "the bound is without communication" in found.notes[0]


@pytest.mark.parametrize(
  ("target", "sizes"),
  [
    ("h200:1x8", "1x1 1x2 1x4 1x8 2x8 4x8 8x8 16x8"),
    ("v5e:4x4", "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
    ("v4:2x2x2", "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8"),
    ("h200:3x8", "1x1 1x2 1x4 1x8 2x8 3x8 4x8 8x8"),
  ],
)
def test_sizes_are_those_of_the_kind(target, sizes):
  kind = target.partition(":")[0]
  found = questions.sizes(targets.parse(target))[:8]
  assert [each.text for each in found] == [f"{kind}:{s}" for s in sizes.split()]


@pytest.mark.parametrize(
  ("days", "efficiency", "answer", "tried"),
  [
    # 80 device-days of perfect scaling.
    (5.0, 1.0, "h200:2x8", ["1x8", "2x8"]),
    (10.0, 1.0, "h200:1x8", ["1x4", "1x8"]),
    (6.0, 1.0, "h200:2x8", ["1x8", "2x8"]),
    # Each doubling loses a fifth, so the first guess is too slow.
    (2.5, 0.8, "h200:8x8", ["1x8", "4x8", "8x8"]),
    (40.0, 1.0, "h200:1x2", ["1x1", "1x2", "1x8"]),
  ],
)
def test_the_smallest_size_that_is_fast_enough(days, efficiency, answer, tried):
  asked = questions.Questions(tokens=10 * 864e6)

  def make(target):
    doublings = (target.num_chips // 8).bit_length() - 1
    share = efficiency ** max(doublings, 0)
    rate = 10_000.0 * target.num_chips / 8 * share
    return questions.answer(_plan(rate, chips=target.num_chips), asked)

  first = targets.parse("h200:1x8")
  found = questions.find_size(questions.Size(first, make(first)), days, make)
  assert [each.target.text for each in found] == [f"h200:{t}" for t in tried]
  table = questions.to_size_table(found, days).splitlines()
  assert table[0].split()[-3:] == ["days", "device-hours", "price"]
  assert table[-1].startswith(f"{answer} is the smallest that trains within")


def test_where_no_size_is_fast_enough_it_says_so():
  first = targets.parse("h200:1x8")
  failure = result.Failure(target="", message="mesh 'fsdp=8' needs 8 devices")
  asked = questions.Questions(tokens=1e15)
  plan = questions.answer(_plan(), asked)
  made = []

  def make(target):
    made.append(target)
    return failure

  found = questions.find_size(questions.Size(first, plan), 1.0, make)
  assert 1 <= len(made) <= 8
  table = questions.to_size_table(found, 1.0)
  assert "no plan" in table
  assert table.endswith("none of these trains within 1 day")


def test_a_grid_marks_the_fastest_that_fits():
  too_large = sample_plan.memory(peak=200 * 2**30)
  plans = [
    _plan(1_000.0, overrides=("--fdl.length=8",)),
    _plan(2_000.0, overrides=("--fdl.length=16",)),
    _plan(
      3_000.0,
      overrides=("--fdl.length=32",),
      memory=too_large,
      fit=too_large.fit.value,
    ),
  ]
  failure = result.Failure(target="h200:1x8 length=64", message="no knob")
  lines = report.to_table(plans, [failure]).splitlines()
  assert ["2,000*" in line for line in lines[1:4]] == [False, True, False]
  assert lines[2].startswith("h200:1x8 length=16 ")
  assert "does not fit" in lines[3]
  assert lines[4] == "h200:1x8 length=64  no plan: no knob"
  assert report.to_table([], [failure]).endswith("no plan: no knob")


def test_a_bound_is_not_faster_than_an_estimate():
  whole = _plan().bound
  assert whole is not None
  least = dataclasses.replace(whole, tokens_per_second=9_000.0)
  bound = dataclasses.replace(_plan(), estimate=None, bound=least)
  slow, fast = _plan(1_000.0), _plan(2_000.0)
  assert questions.best([slow, bound, fast]) is fast
  assert questions.best([bound]) is bound


def test_of_plans_that_do_not_fit_the_smallest_is_kept_and_none_is_marked():
  rejected = _plan(
    memory=sample_plan.memory(peak=None, compiler_error="Used 40G of 15G")
  )
  large, larger = (
    _plan(memory=sample_plan.memory(peak=n * 2**30)) for n in (200, 300)
  )
  plans = (larger, rejected, large)
  assert questions.best(plans) is large
  rows = report.compare(plans).rows
  assert not any("*" in cell for row in rows for cell in row)
