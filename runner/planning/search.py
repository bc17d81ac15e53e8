"""Search by compiling: the best layouts of a job, or the smallest that fits.

Candidates (`search_space`) are put in order by analytical estimates
(`plan.layouts`), which reject nothing but a state that does not fit. The best
few are compiled, several at once, each in a process of its own. What the
compiler returns corrects the estimates of similar candidates, and the next few
are chosen. Compiled candidates are ranked by the estimated step time; those
within 2 % of each other by their peak.

`explore` varies everything: the attention kernel first, in one layout; then the
mesh and what goes with it, by the estimates; then one dimension of the best
layout at a time; then compiler options of the best one. `mesh=auto`
(`run_mesh`) varies the mesh alone, and `fix` makes as few changes as it can.
"""

import dataclasses
import math
from typing import Final

from paxon.runner import units
from paxon.runner.plan import advice, child_process, layouts, result
from paxon.runner.plan import target as targets
from paxon.runner.plan.program_text import lints
from paxon.runner.planning import attempts, search_space
from paxon.runner.planning import subject as subject_lib
from paxon.sharding import axes
from paxon.sharding import mesh as mesh_lib

# Programs that are compiled at most.
_EXPLORE_COMPILES: Final = 8
_REFINE_COMPILES: Final = 6
_FIX_COMPILES: Final = 5
# Compiled candidates after which a search may end early.
_MIN_COMPILED: Final = 4
# Expected steps up to this factor longer than the best are worth a program.
_TOLERANCE: Final = 1.05
# Share of a step that waits for communication, from which overlap is tried.
_LONG_WAIT: Final = 0.15
# Uncompiled candidates in the table.
_MAX_ROWS: Final = 4

_Candidate = search_space.Candidate


def problem(target: targets.Target) -> str | None:
  """Returns why nothing can be searched for on a target, or None.

  Args:
    target: The devices.
  """
  kind = target.hardware
  if kind.usable_bytes is None or kind.peak_flops() is None:
    return (
      f"neither the memory nor the rates of {target} are known, so layouts"
      " cannot be compared; choose another target, such as h200:1x8"
    )
  return None


def explore(subject: subject_lib.Subject, before: result.Plan) -> result.Plan:
  """Returns a plan with the table of `--plan_search`.

  Args:
    subject: The job.
    before: Its plan.
  """
  search = attempts.Search(subject, before)
  number = len(search.candidates)
  attempts.log(
    f"searching {number:,} layouts of {subject.target}: meshes, rules, remat"
    " policies, microbatches, attention kernels, dispatches of experts and"
    " offloading ..."
  )
  if subject.is_compiled:
    _decide_kernel(search)
    compile_rounds(search, _EXPLORE_COMPILES)
    _refine(search, _REFINE_COMPILES)
    _try_options(search)
  notes = before.notes
  if not subject.is_compiled:
    notes += (
      "--plan_search compiled nothing: the order is that of analytical"
      " estimates, and none is known to fit.",
    )
  elif search.is_out_of_time:
    notes += (
      f"--plan_search ended after {attempts.SECONDS / 60:.0f} minutes.",
    )
  return dataclasses.replace(
    before, search=_table(search), num_layouts=number, notes=notes
  )


def fix(subject: subject_lib.Subject, before: result.Plan) -> result.Plan:
  """Returns a plan that does not fit with the smallest change that does.

  Args:
    subject: The job.
    before: Its plan, which does not fit.
  """
  usable = before.memory.usable
  if usable is None or problem(subject.target) is not None:
    return before
  search = attempts.Search(subject, before)
  whole = search.space.layouts.whole_state_bytes()
  if whole > usable * subject.target.num_devices:
    words = advice.devices_for(
      whole, usable=usable, num_devices=subject.target.num_devices
    )
    lines = words, advice.SMALLER_STATE
    return dataclasses.replace(before, advice=lines)
  attempts.log("looking for the smallest change that fits ...")
  found = _compile_smallest(search, before) if subject.is_compiled else None
  changes = [_change(a, search) for a in search.attempts[::-1]]
  changes = [c for c in changes if c.overrides and c.peak is not None]
  if not subject.is_compiled and (rest := _smallest_first(search)):
    changes = [_expected_change(rest[0], search)]
  notes = before.notes
  if subject.is_compiled and found is None:
    notes += (
      "No change was found that fits and makes steps at most"
      f" {advice.MAX_SLOWDOWN:g} times slower: {len(search.attempts) - 1} of"
      f" {len(search.candidates)} were compiled; --plan_search compiles more."
      f" {advice.list_memory(before.memory)}".rstrip(),
    )
  return dataclasses.replace(
    before, verified_changes=tuple(changes), notes=notes
  )


def compile_rounds(search: attempts.Search, budget: int) -> None:
  """Compiles the most promising candidates, in rounds."""
  # A round of all workers; on GPUs compiling is fast, so rounds are small.
  size = max(2, child_process.count_parallel())
  compiled = 0
  while compiled < budget and not search.is_out_of_time:
    chosen = _next(search, min(size, budget - compiled))
    if not chosen:
      return
    search.compile(chosen)
    compiled += len(chosen)


def _decide_kernel(search: attempts.Search) -> None:
  """Compiles one layout with each attention kernel, and keeps the fastest."""
  kinds = dict.fromkeys(c.layout.attention for c in search.candidates)
  if len(kinds) < 2:
    return
  here = search.space.current.layout
  tried = {a.candidate.layout.attention for a in search.attempts if a.plan}
  chosen = []
  for kind in kinds:
    if kind not in tried:
      same = dataclasses.replace(here, attention=kind)
      found = [c for c in search.candidates if c.layout == same]
      others = [c for c in search.candidates if c.layout.attention is kind]
      chosen += (found or search.order(others))[:1]
  search.compile(chosen)
  times: dict[layouts.Attention, float] = {}
  for attempt in search.attempts:
    step = (
      None if attempt.plan is None else attempts.get_step_time(attempt.plan)
    )
    if step is not None:
      kind = attempt.candidate.layout.attention
      times[kind] = min(step, times.get(kind, math.inf))
  if times:
    search.keep_kernel(min(times, key=lambda kind: times[kind]))


def _refine(search: attempts.Search, budget: int) -> None:
  """Compiles candidates that differ from the best in one dimension."""
  size = max(2, child_process.count_parallel())
  while budget > 0 and not search.is_out_of_time:
    best = next(iter(search.rank()), None)
    if best is None or best.plan is None:
      return
    layout, plan = best.candidate.layout, best.plan
    near = [c for c in search.rest() if _count_changes(c.layout, layout) == 1]
    chosen = [
      c
      for c in search.order(near)
      if _may_beat(search.expect(c), plan, search, tolerance=_TOLERANCE)
    ][: min(size, budget)]
    if not chosen:
      return
    search.compile(chosen)
    budget -= len(chosen)


def _count_changes(one: layouts.Layout, other: layouts.Layout) -> int:
  """Returns the number of dimensions in which layouts differ."""
  fields = dataclasses.fields(layouts.Layout)
  return sum(getattr(one, f.name) != getattr(other, f.name) for f in fields)


def _try_options(search: attempts.Search) -> None:
  """Compiles the best candidate with compiler options that may help it."""
  best = next(iter(search.rank()), None)
  if best is None or best.plan is None or search.is_out_of_time:
    return
  found, plan = [], best.plan
  compiled, traced = plan.compiled_flops, plan.flops.hardware
  if compiled is not None and compiled > lints.RATIO[1] * traced:
    # XLA recomputed values to fit.
    found.append(search.space.keep_from_recomputing(best.candidate))
  estimate = plan.estimate
  if estimate is not None and (
    sum(estimate.exposed.values()) > _LONG_WAIT * estimate.step
  ):
    found.append(search.space.overlap(best.candidate))
  search.compile([search.add(c, best.candidate) for c in found if c])


def _next(search: attempts.Search, count: int) -> list[_Candidate]:
  """The next candidates to compile; empty if none can be better."""
  ordered = search.order(search.rest())
  best = next(iter(search.rank()), None)
  if best is not None and len(search.attempts) >= _MIN_COMPILED:
    assert best.plan is not None
    ordered = [
      c for c in ordered if _may_beat(search.expect(c), best.plan, search)
    ]
  chosen: list[_Candidate] = []
  if not any(_is_fsdp(a.candidate, search) for a in search.attempts):
    # The layout that others are compared with.
    chosen += [c for c in ordered if _is_fsdp(c, search)][:1]
  tried = {a.candidate.layout.mesh for a in search.attempts}
  # Meshes that were not compiled come first, one candidate each; a mesh whose
  # estimate is corrected may come again.
  for only_new in (True, False):
    for candidate in ordered:
      mesh = candidate.layout.mesh
      if len(chosen) >= count:
        return chosen
      seen = {c.layout.mesh for c in chosen} | (tried if only_new else set())
      is_half = only_new and 2 * len(chosen) >= count and bool(tried)
      if candidate not in chosen and mesh not in seen and not is_half:
        chosen.append(candidate)
  return chosen


def _may_beat(
  expected: layouts.Prediction,
  best: result.Plan,
  search: attempts.Search,
  *,
  tolerance: float = 1.0,
) -> bool:
  step = tolerance * (attempts.get_step_time(best) or math.inf)
  if expected.peak > 1.2 * search.usable:
    return False
  is_smaller = expected.peak < 0.9 * (attempts.get_peak(best) or math.inf)
  return expected.step < step or (expected.step < 1.02 * step and is_smaller)


def _is_fsdp(candidate: _Candidate, search: attempts.Search) -> bool:
  """Whether FSDP spans all devices of a slice."""
  spec = mesh_lib.MeshSpec.parse(candidate.layout.mesh).resolve(
    search.subject.target.num_devices
  )
  return all(n == 1 for a, n in spec.ici.items() if a != axes.FSDP)


def _compile_smallest(
  search: attempts.Search, before: result.Plan
) -> attempts.Attempt | None:
  """Compiles the smallest changes until one fits and is not much slower."""
  for _ in range(_FIX_COMPILES):
    ordered = _smallest_first(search)
    if not ordered or search.is_out_of_time:
      return None
    (attempt,) = search.compile(ordered[:1])
    if attempt.fits and not advice.is_too_slow(
      before, _change(attempt, search)
    ):
      return attempt
  return None


def _smallest_first(search: attempts.Search) -> list[_Candidate]:
  """Candidates that are expected to fit, those with few changes first.

  Candidates that should be much slower are left out. Microbatches, which gather
  the weights again, count as more than any other change. If none is expected to
  fit, the one that needs least is first.
  """
  rest = [c for c in search.rest() if not search.is_too_slow(c)]
  microbatches = search.space.current.layout.microbatches
  expected = {c: search.expect(c) for c in rest}
  fitting = [c for c in rest if expected[c].peak <= search.usable]
  if not fitting:
    return sorted(rest, key=lambda c: expected[c].peak)[:1]
  return sorted(
    fitting,
    key=lambda c: (
      len(c.changes),
      c.layout.microbatches > microbatches,
      expected[c].step,
    ),
  )


def _table(search: attempts.Search) -> tuple[result.Change, ...]:
  """Compiled candidates, the best first; then some that were not compiled."""
  best = search.rank()
  others = [a for a in search.attempts if not a.fits]
  rows = [_change(a, search, best=best[0]) for a in best]
  rows += [_change(a, search) for a in others]
  rest = search.order(search.rest())[:_MAX_ROWS]
  return (*rows, *(_expected_change(c, search) for c in rest))


def _change(
  attempt: attempts.Attempt,
  search: attempts.Search,
  *,
  best: attempts.Attempt | None = None,
) -> result.Change:
  after = attempt.plan
  fit = result.Fit.UNKNOWN if after is None else after.memory.fit
  return result.Change(
    overrides=_to_flags(attempt.candidate),
    words=attempt.candidate.words,
    compiled=after is not None and after.compiled,
    fit=fit.value,
    peak=attempts.get_peak(after),
    recomputed_share=0.0
    if after is None
    else after.flops.recomputed / max(after.flops.hardware, 1),
    bound=after.bound.step if after and after.bound else None,
    estimate=after.estimate.step if after and after.estimate else None,
    reason=_reason(attempt, search, best),
  )


def _expected_change(
  candidate: _Candidate, search: attempts.Search
) -> result.Change:
  expected = search.expect(candidate)
  return result.Change(
    overrides=_to_flags(candidate),
    words=candidate.words,
    compiled=False,
    fit=result.Fit.UNKNOWN.value,
    peak=expected.peak,
    recomputed_share=0.0,
    bound=expected.step,
    reason="not compiled: analytical estimates",
  )


def _reason(
  attempt: attempts.Attempt,
  search: attempts.Search,
  best: attempts.Attempt | None,
) -> str:
  """Why a candidate is not the best."""
  if attempt.plan is None:
    return attempt.failure
  if not attempt.fits:
    return f"does not fit in {units.size(search.usable)}"
  if best is None or best.plan is None or attempt is best:
    return "best" if attempt is best else ""
  mine, other = attempt.plan.estimate, best.plan.estimate
  if mine is None or other is None:
    return "no estimate of its step time, only a lower bound"
  slower = mine.step / other.step - 1
  if slower < 0.02:
    return "as fast within 2 %, with more memory"
  parts = {
    "compute": mine.compute - other.compute,
    "memory traffic": mine.memory - other.memory,
    "kernel overhead": mine.overhead - other.overhead,
  }
  for name in {*mine.exposed, *other.exposed}:
    waits = mine.exposed.get(name, 0.0) - other.exposed.get(name, 0.0)
    parts[f"exposed communication over {name}"] = waits
  worst = max(parts, key=lambda name: parts[name])
  return (
    f"{units.share(slower)} slower: {units.seconds(parts[worst])} more {worst}"
  )


def _to_flags(candidate: _Candidate) -> tuple[str, ...]:
  return tuple(f"--fdl.{o.path}={o.text}" for o in candidate.overrides)
