"""Tests for the searches, against an oracle of made-up figures."""

import dataclasses
import itertools

import hypothesis
from hypothesis import strategies as st
import pytest

from paxon.runner.plan import result, sample_plan
from paxon.runner.plan.search import (
  candidates,
  chains,
  changes,
  cost,
  exploring,
  fixing,
  front,
  oracle,
  table,
)

_Kind = candidates.Kind
_STATE = 10
_ACTIVATIONS = 100
# What each policy keeps, and what it costs.
_POLICIES = {"none": (1.0, 1.0), "some": (0.5, 1.1), "least": (0.2, 1.5)}


def _choice(kind, text):
  return candidates.Choice(
    kind=kind, assignments=(f"{kind.name}={text}",), words=f"take {text}"
  )


_SPACE = candidates.Space(
  remat=(_choice(_Kind.REMAT, "some"), _choice(_Kind.REMAT, "least")),
  microbatches=tuple(_choice(_Kind.MICROBATCHES, str(n)) for n in (2, 4, 8)),
  meshes=(_choice(_Kind.MESH, "fsdp"), _choice(_Kind.MESH, "odd")),
  dtypes=(_choice(_Kind.DTYPE, "narrow"),),
)


class _Oracle:
  """State 10, activations 100; the compiler takes `factor` of the latter."""

  def __init__(self, usable=50, factor=1.0):
    self.usable = float(usable)
    self.factor = factor
    self.forecasts = 0
    self.compiles = []

  def is_possible(self, candidate):
    return "MESH=odd" not in candidate.assignments

  def state(self, candidate):
    return 5 if "DTYPE=narrow" in candidate.assignments else _STATE

  def forecast(self, candidate):
    self.forecasts += 1
    given = dict(a.split("=") for a in candidate.assignments)
    kept, time = _POLICIES[given.get("REMAT", "none")]
    parts = int(given.get("MICROBATCHES", 1))
    is_split = given.get("MESH") == "fsdp"
    arguments = self.state(candidate) // (2 if is_split else 1)
    return oracle.Forecast(
      candidate=candidate,
      arguments=arguments,
      peak=arguments + int(kept * _ACTIVATIONS / parts),
      cost=cost.Cost(
        compute=time, fast=0.15 * parts + 0.5 * is_split, network=0.0
      ),
      recomputed_share=(time - 1) / time,
    )

  def compiled(self, candidate) -> result.Plan | None:
    self.compiles.append(candidate.assignments)
    found = self.forecast(candidate)
    self.forecasts -= 1
    peak = found.arguments + int(self.factor * (found.peak - found.arguments))
    plan = sample_plan.plan()
    assert plan.bound is not None
    memory = dataclasses.replace(
      plan.memory, peak=peak, usable=self.usable, compiler_error=None
    )
    bound = dataclasses.replace(plan.bound, step=found.cost.total)
    return dataclasses.replace(
      plan, memory=memory, bound=bound, estimate=None, fit=memory.fit.value
    )


def _budget(**limits):
  return oracle.Budget(
    **{"traces": 99, "compiles": 9, "seconds": 60.0} | limits
  )


def _fix(usable, *, space=_SPACE, factor=1.0, **options):
  oracle_ = _Oracle(usable, factor)
  options = {"budget": _budget(), "correction": oracle.Correction()} | options
  return _search(space, oracle_, **options), oracle_


def _search(space, oracle_, **options):
  return fixing.smallest(space, oracle_, usable=oracle_.usable, **options)


def _last(found):
  return found.attempts[-1].forecast.candidate.assignments


@pytest.mark.parametrize(
  ("usable", "expected"),
  [
    # Some remat takes 1.25, two microbatches 1.3.
    (60, ("REMAT=some",)),
    # Four microbatches take 1.6, the least remat 1.65.
    (40, ("MICROBATCHES=4",)),
    (30, ("REMAT=least",)),
    (22, ("MICROBATCHES=8",)),
    # No single change. The least remat with two microbatches takes 1.8, some
    # remat with eight 2.3.
    (20, ("REMAT=least", "MICROBATCHES=2")),
  ],
)
def test_the_cheapest_of_the_smallest_changes_that_fit(usable, expected):
  found, _ = _fix(usable)
  assert _last(found) == expected


def test_what_changes_numbers_comes_after_what_does_not():
  space = dataclasses.replace(_SPACE, remat=(), microbatches=(), meshes=())
  found, _ = _fix(106, space=space)
  assert _last(found) == ("DTYPE=narrow",)
  found, _ = _fix(106)
  assert _last(found) == ("REMAT=some",)


def test_what_the_compiler_says_corrects_the_forecasts():
  # It takes half as much again: some remat is 85, not 60.
  found, asked = _fix(60, factor=1.5)
  # The estimate for two microbatches is 60; by then it is known to be wrong.
  assert asked.compiles == [("REMAT=some",), ("MICROBATCHES=4",)]
  assert [attempt.fits for attempt in found.attempts] == [False, True]


def test_nothing_fits():
  found, asked = _fix(4)
  assert found == fixing.Found()
  # Not even the state: nothing needed a trace.
  assert asked.forecasts == 0


def test_the_budget_ends_a_search():
  found, asked = _fix(60, factor=9.0, budget=_budget(compiles=1))
  assert (len(found.attempts), found.is_cut_short) == (1, True)
  found, asked = _fix(11, budget=_budget(traces=5))
  assert (asked.forecasts, found.is_cut_short) == (5, True)
  times = iter(range(100))
  late = _budget(seconds=3.0, clock=lambda: next(times))
  found, asked = _fix(11, budget=late)
  assert found.is_cut_short
  assert asked.forecasts <= 3


def test_without_a_compiler_the_closed_form_decides():
  found, asked = _fix(60, is_compiled=False)
  assert found.forecast.candidate.assignments == ("REMAT=some",)
  assert asked.compiles == []


def test_a_candidate_without_a_plan_is_passed_over():
  class Broken(_Oracle):
    def compiled(self, candidate):
      found = super().compiled(candidate)
      return None if "REMAT=some" in candidate.assignments else found

  asked = Broken(60)
  found = _search(
    _SPACE, asked, budget=_budget(), correction=oracle.Correction()
  )
  assert asked.compiles == [("REMAT=some",), ("MICROBATCHES=2",)]
  assert _last(found) == ("MICROBATCHES=2",)


def test_exploring_returns_the_front_of_what_was_compiled():
  asked = _Oracle()
  found = exploring.explore(
    _SPACE,
    asked,
    usable=50.0,
    budget=_budget(compiles=4),
    correction=oracle.Correction(),
  )
  assert len(asked.compiles) <= 4
  before = sample_plan.plan()
  points = changes.front_of(found.attempts, before=before)
  assert points
  for one, other in itertools.pairwise(points):
    assert one.bound_after <= other.bound_after
    assert one.peak_after >= other.peak_after
  assert all(p.peak_after <= 50 for p in points)
  # All of the closed-form front fits, and the fastest is among the compiled.
  fastest = min(found.forecasts, key=lambda f: f.cost.total)
  assert fastest.candidate.assignments in asked.compiles
  assert not any("odd" in a for c in asked.compiles for a in c)
  assert not any("narrow" in a for c in asked.compiles for a in c)


def test_exploring_within_a_budget():
  asked = _Oracle()
  said = []
  found = exploring.explore(
    _SPACE,
    asked,
    usable=50.0,
    budget=_budget(traces=10),
    correction=oracle.Correction(),
    is_compiled=False,
    say=said.append,
  )
  assert asked.forecasts == 10
  assert found.is_cut_short
  assert said == ["10 traced, of which 6 fit ..."]
  assert asked.compiles == []


@hypothesis.given(
  st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20)
)
def test_the_front_is_what_nothing_beats(points):
  found = front.pareto(points, key=lambda point: point)
  expected = {
    p
    for p in points
    if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
  }
  assert found == sorted(expected)


@hypothesis.given(st.integers(0, 50), st.integers(1, 10))
def test_spread_keeps_both_ends(number, count):
  points = list(range(number))
  found = front.spread(points, count)
  assert len(found) == min(number, count)
  assert found == sorted(set(found))
  assert found[:1] == points[:1]
  if count > 1:
    assert found[-1:] == points[-1:]


@hypothesis.given(st.integers(0, 12), st.integers(0, 12))
def test_bisection_finds_the_first(length, first):
  chain = [
    candidates.Candidate((_choice(_Kind.MICROBATCHES, str(i)),))
    for i in range(length)
  ]
  asked = []

  def forecast(candidate):
    asked.append(candidate)
    index = chain.index(candidate)
    return oracle.Forecast(
      candidate=candidate,
      arguments=0,
      peak=100 - index,
      cost=cost.Cost(compute=1.0, fast=0.0, network=0.0),
      recomputed_share=0.0,
    )

  found = chains.first_that_fits(
    chain, forecast, lambda f: f.peak <= 100 - first
  )
  assert (found is None) == (first >= length)
  if found is not None:
    assert found.candidate == chain[first]
  assert len(asked) <= 5


def test_chains_differ_in_microbatches_alone():
  level = next(iter(_SPACE.levels()))
  assert [[c.assignments[0] for c in chain] for chain in chains.of(level)] == [
    ["REMAT=some"],
    ["REMAT=least"],
    ["MICROBATCHES=2", "MICROBATCHES=4", "MICROBATCHES=8"],
    ["MESH=fsdp"],
    ["MESH=odd"],
  ]


def test_a_correction_leaves_the_arguments_alone():
  forecast = _Oracle().forecast(candidates.Candidate())
  correction = oracle.Correction()
  assert correction.peak(forecast) == 110
  correction.learn(forecast, 130)
  assert correction.peak(forecast) == 130
  half = _Oracle().forecast(candidates.Candidate((_SPACE.remat[0],)))
  assert correction.peak(half) == 70
  correction.learn(forecast, None)
  assert correction.peak(half) == 70
  correction.doubt()
  assert correction.peak(half) == 82
  # Not of another order: 5 times as much is not believed.
  correction.learn(forecast, 510)
  assert correction.factor == 2.0


def _change(**fields):
  return dataclasses.replace(
    result.Change(
      overrides=('--fdl.a=f(("x",))', "--fdl.mesh=fsdp=8"),
      words="do this",
      compiled=True,
      fit="fits",
      peak_before=200 * 2**30,
      peak_after=100 * 2**30,
      recomputed_share=0.25,
      bound_before=1.0,
      bound_after=1.25,
    ),
    **fields,
  )


def test_changes_as_text():
  plan = sample_plan.plan()
  memory = dataclasses.replace(plan.memory, usable=120.0 * 2**30)
  changes_ = (
    _change(),
    _change(fit="does not fit", overrides=("--fdl.b=2",), peak_after=None),
  )
  plan = dataclasses.replace(plan, memory=memory, verified_changes=changes_)
  assert table.verified(plan) == [
    "It fits (compiled) if you do this. Add to the command:",
    "  '--fdl.a=f((\"x\",))' --fdl.mesh=fsdp=8",
    "  peak 200.00 GiB -> 100.00 GiB of 120.00 GiB; step time at least"
    " 1.00 s -> 1.25 s; 25 % of FLOPs are recomputed",
    "Smaller changes that were compiled but do not fit:",
    "  --fdl.b=2  (peak 200.00 GiB -> - of 120.00 GiB)",
  ]
  plan = dataclasses.replace(plan, verified_changes=())
  assert table.verified(plan) == []
  closed = _change(compiled=False, estimate_before=2.0, estimate_after=3.0)
  plan = dataclasses.replace(plan, verified_changes=(closed,))
  first, _, last = table.verified(plan)
  assert "It fits (analytical estimate) if" in first
  assert "estimated step time 2.00 s -> 3.00 s" in last


def test_the_front_as_text():
  plan = sample_plan.plan()
  assert table.front(dataclasses.replace(plan, search=())) == []
  plan = dataclasses.replace(plan, search=(_change(), _change(overrides=())))
  assert table.front(plan) == [
    "Pareto front of step time and memory (compiled), fastest first",
    "  step >=  peak        recomputed  add to the command",
    "  1.25 s   100.00 GiB  25 %        '--fdl.a=f((\"x\",))'"
    " --fdl.mesh=fsdp=8",
    "  1.25 s   100.00 GiB  25 %        (nothing)",
  ]
