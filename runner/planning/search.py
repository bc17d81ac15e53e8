"""Search by compiling: the best layouts of a job, or the smallest that fits.

Candidates (`search_space`) are put in order by analytical estimates
(`plan.layouts`), which reject nothing but a state that does not fit. The best
few are compiled, several at once, each in a process of its own. What the
compiler returns corrects the estimates of similar candidates, and the next few
are chosen. Compiled candidates are ranked by the estimated step time; those
within 2 % of each other by their peak.

`explore` varies everything, `mesh=auto` (`run_mesh`) the mesh alone, and `fix`
makes as few changes as it can.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math
import re
import time
from typing import Final

import fiddle as fdl

from paxon.runner import job as job_lib
from paxon.runner import units, user_error
from paxon.runner.plan import advice, child_process, layouts, result
from paxon.runner.plan import target as targets
from paxon.runner.plan.program_text import lints
from paxon.runner.planning import search_space
from paxon.runner.planning import subject as subject_lib
from paxon.sharding import axes
from paxon.sharding import mesh as mesh_lib

# Programs that are compiled at most, and the time after which none is started.
_EXPLORE_COMPILES: Final = 12
_FIX_COMPILES: Final = 5
_SECONDS: Final = 900.0
# Compiled candidates after which a search may end early.
_MIN_COMPILED: Final = 4
# Uncompiled candidates in the table.
_MAX_ROWS: Final = 4
# Limit of a compiled program's correction of other estimates.
_MAX_CORRECTION: Final = 4.0
# Message of a TPU compiler about a program that does not fit.
_USED: Final = re.compile(r"(?:Used |temporaries \()([\d.]+)([KMGT])")

_Candidate = search_space.Candidate


@dataclasses.dataclass(frozen=True)
class Attempt:
  """A candidate that was compiled.

  Attributes:
    candidate: The candidate.
    plan: Its plan; None if it failed.
    failure: Why there is no plan.
  """

  candidate: _Candidate
  plan: result.Plan | None
  failure: str = ""

  @property
  def fits(self) -> bool:
    """Whether the compiled program fits."""
    fit = result.Fit.UNKNOWN if self.plan is None else self.plan.memory.fit
    return fit in (result.Fit.FITS, result.Fit.TIGHT)


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


class Search:
  """Candidates, and the programs that were compiled of them."""

  def __init__(
    self,
    subject: subject_lib.Subject,
    before: result.Plan | None,
    *,
    only_meshes: bool = False,
  ) -> None:
    self.subject = subject
    self.space = search_space.Space(
      subject, work=_get_flops(before, subject.config)
    )
    self.candidates = self.space.candidates(only_meshes=only_meshes)
    self.attempts: list[Attempt] = []
    if before is not None and (
      before.compiled or before.memory.compiler_error or get_peak(before)
    ):
      self.attempts.append(Attempt(self.space.current, before))
    self._predicted = {
      c: self.space.layouts.predict(c.layout) for c in self.candidates
    }
    if before is not None:
      current = self.space.current
      self._predicted[current] = self.space.layouts.predict(current.layout)
    self._end = time.monotonic() + _SECONDS

  @property
  def usable(self) -> float:
    """Bytes of a device."""
    return self.subject.target.hardware.usable_bytes or math.inf

  @property
  def is_out_of_time(self) -> bool:
    """Whether no more programs may be compiled."""
    return time.monotonic() > self._end

  def rest(self) -> list[_Candidate]:
    """Returns the candidates that were not compiled."""
    tried = {attempt.candidate for attempt in self.attempts}
    return [c for c in self.candidates if c not in tried]

  def expect(self, candidate: _Candidate) -> layouts.Prediction:
    """Returns the estimates, corrected by the most similar program."""
    found = self._predicted[candidate]
    nearest = max(
      (a for a in self.attempts if a.plan is not None and get_peak(a.plan)),
      key=lambda attempt: _similarity(attempt.candidate, candidate),
      default=None,
    )
    if nearest is None or nearest.plan is None:
      return found
    other, peak = self._predicted[nearest.candidate], get_peak(nearest.plan)
    assert peak is not None
    added = _ratio(peak - other.state, other.peak - other.state)
    step = get_step_time(nearest.plan)
    factor = 1.0 if step is None else _ratio(step, other.step)
    return layouts.Prediction(
      step=factor * found.step,
      state=found.state,
      peak=found.state + round(added * (found.peak - found.state)),
    )

  def is_too_slow(self, candidate: _Candidate) -> bool:
    """Returns whether a step should take more than twice as long.

    Args:
      candidate: Compared with the job as it is; both by analytical estimates.
    """
    now = self._predicted[self.space.current].step
    return self._predicted[candidate].step > advice.MAX_SLOWDOWN * now

  def keep_from_recomputing(self, candidate: _Candidate) -> _Candidate | None:
    """Returns a candidate with XLA's recomputation disabled, if it can be.

    Args:
      candidate: One that was compiled.
    """
    changed = self.space.keep_from_recomputing(candidate)
    if changed is not None:
      # The analytical estimate knows nothing of XLA's recomputation.
      self._predicted[changed] = self._predicted[candidate]
    return changed

  def order(self, candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """Returns candidates, the most promising first.

    Candidates that should fit come first, by step time; others by memory.
    """
    expected = {c: self.expect(c) for c in candidates}
    fitting = [c for c, e in expected.items() if e.peak <= self.usable]
    others = sorted(
      (c for c in expected if expected[c].peak > self.usable),
      key=lambda c: expected[c].peak,
    )
    best = layouts.rank(
      fitting,
      step=lambda c: expected[c].step,
      memory=lambda c: expected[c].peak,
    )
    return best + others

  def compile(self, chosen: Sequence[_Candidate]) -> list[Attempt]:
    """Compiles candidates, several at once, and adds them to the attempts."""
    for candidate in chosen:
      typed = " ".join(map(str, candidate.overrides)) or "(no change)"
      _log(f"  compiling {typed} ...")
    found = child_process.in_parallel(self._compile_one, chosen)
    self.attempts += found
    return found

  def _compile_one(self, candidate: _Candidate) -> Attempt:
    try:
      found = self.subject.plan(candidate.overrides)
    except user_error.UserError as error:
      return Attempt(candidate, None, user_error.one_line(error))
    if isinstance(found, result.Failure):
      return Attempt(candidate, None, found.message)
    return Attempt(candidate, found)

  def rank(self) -> list[Attempt]:
    """Returns the attempts that fit, the best first."""
    fitting = [a for a in self.attempts if a.fits]
    # A bound is less than an estimate, so that alone it would always win.
    above = [
      plan.estimate.step / plan.bound.step
      for plan in (a.plan for a in fitting)
      if plan and plan.estimate and plan.bound and plan.bound.step
    ]

    def step(attempt: Attempt) -> float:
      plan = attempt.plan
      if plan is None or plan.bound is None:
        return math.inf
      if plan.estimate is not None:
        return plan.estimate.step
      return plan.bound.step * max(above, default=1.0)

    return layouts.rank(
      fitting, step=step, memory=lambda a: get_peak(a.plan) or 0
    )


def explore(subject: subject_lib.Subject, before: result.Plan) -> result.Plan:
  """Returns a plan with the table of `--plan_search`.

  Args:
    subject: The job.
    before: Its plan.
  """
  search = Search(subject, before)
  number = len(search.candidates)
  _log(
    f"searching {number} layouts of {subject.target}: meshes, remat policies,"
    " microbatches and attention kernels ..."
  )
  if subject.is_compiled:
    compile_rounds(search, _EXPLORE_COMPILES)
    _keep_from_recomputing(search)
  notes = before.notes
  if not subject.is_compiled:
    notes += (
      "--plan_search compiled nothing: the order is that of analytical"
      " estimates, and none is known to fit.",
    )
  elif search.is_out_of_time:
    notes += (f"--plan_search ended after {_SECONDS / 60:.0f} minutes.",)
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
  search = Search(subject, before)
  whole = search.space.layouts.whole_state_bytes()
  if whole > usable * subject.target.num_devices:
    words = advice.devices_for(
      whole, usable=usable, num_devices=subject.target.num_devices
    )
    lines = words, advice.SMALLER_STATE
    return dataclasses.replace(before, advice=lines)
  _log("looking for the smallest change that fits ...")
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


def compile_rounds(search: Search, budget: int) -> None:
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


def _keep_from_recomputing(search: Search) -> None:
  """Compiles the best candidate again if XLA recomputed values to fit it."""
  best = next(iter(search.rank()), None)
  if best is None or best.plan is None or search.is_out_of_time:
    return
  compiled, traced = best.plan.compiled_flops, best.plan.flops.hardware
  if compiled is None or compiled <= lints.RATIO[1] * traced:
    return
  candidate = search.keep_from_recomputing(best.candidate)
  if candidate is not None:
    search.compile([candidate])


def _next(search: Search, count: int) -> list[_Candidate]:
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
  expected: layouts.Prediction, best: result.Plan, search: Search
) -> bool:
  step = get_step_time(best) or math.inf
  if expected.peak > 1.2 * search.usable:
    return False
  is_smaller = expected.peak < 0.9 * (get_peak(best) or math.inf)
  return expected.step < step or (expected.step < 1.02 * step and is_smaller)


def _is_fsdp(candidate: _Candidate, search: Search) -> bool:
  """Whether FSDP spans all devices of a slice."""
  spec = mesh_lib.MeshSpec.parse(candidate.layout.mesh).resolve(
    search.subject.target.num_devices
  )
  return all(n == 1 for a, n in spec.ici.items() if a != axes.FSDP)


def _compile_smallest(search: Search, before: result.Plan) -> Attempt | None:
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


def _smallest_first(search: Search) -> list[_Candidate]:
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


def _table(search: Search) -> tuple[result.Change, ...]:
  """Compiled candidates, the best first; then some that were not compiled."""
  best = search.rank()
  others = [a for a in search.attempts if not a.fits]
  rows = [_change(a, search, best=best[0]) for a in best]
  rows += [_change(a, search) for a in others]
  rest = search.order(search.rest())[:_MAX_ROWS]
  return (*rows, *(_expected_change(c, search) for c in rest))


def _change(
  attempt: Attempt, search: Search, *, best: Attempt | None = None
) -> result.Change:
  after = attempt.plan
  fit = result.Fit.UNKNOWN if after is None else after.memory.fit
  return result.Change(
    overrides=_to_flags(attempt.candidate),
    words=attempt.candidate.words,
    compiled=after is not None and after.compiled,
    fit=fit.value,
    peak=get_peak(after),
    recomputed_share=0.0
    if after is None
    else after.flops.recomputed / max(after.flops.hardware, 1),
    bound=after.bound.step if after and after.bound else None,
    estimate=after.estimate.step if after and after.estimate else None,
    reason=_reason(attempt, search, best),
  )


def _expected_change(candidate: _Candidate, search: Search) -> result.Change:
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


def _reason(attempt: Attempt, search: Search, best: Attempt | None) -> str:
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


def _log(text: str) -> None:
  print(text, flush=True)


def _similarity(a: _Candidate, b: _Candidate) -> int:
  one, other = a.layout, b.layout
  return (
    4 * (one.attention is other.attention)
    + 3 * (one.remat is other.remat)
    + 2 * (one.mesh == other.mesh)
    + (one.microbatches == other.microbatches)
  )


def _ratio(measured: float | int, predicted: float | int) -> float:
  if measured <= 0 or predicted <= 0:
    return 1.0
  return min(max(measured / predicted, 1 / _MAX_CORRECTION), _MAX_CORRECTION)


def get_peak(plan: result.Plan | None) -> int | None:
  """Returns the peak, also of a program that its compiler rejected.

  Args:
    plan: None if there is none.
  """
  if plan is None:
    return None
  memory = plan.memory
  found = _USED.search(memory.compiler_error or "")
  if memory.peak is None and found is not None:
    return round(float(found[1]) * 2 ** (10 * (1 + "KMGT".index(found[2]))))
  return memory.peak


def get_step_time(plan: result.Plan) -> float | None:
  """Returns the estimated step time of a plan, or the bound without one."""
  if plan.estimate is not None:
    return plan.estimate.step
  return None if plan.bound is None else plan.bound.step


def _get_flops(
  plan: result.Plan | None, config: "fdl.Config[job_lib.Job]"
) -> layouts.Work | None:
  """FLOPs as they were traced; None lets shapes decide."""
  if plan is None or not plan.flops.model:
    return None
  flops = plan.flops
  # A causal mask hides half of attention.
  hidden = flops.model - (flops.causal_model or flops.model)
  return layouts.Work(
    model=float(flops.model),
    attention=2.0 * hidden,
    itemsize=2 if "bfloat16" in flops.by_dtype else 4,
    loss_chunk=search_space.loss_chunk(config),
  )
