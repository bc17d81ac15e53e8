"""Candidates of a search, and the programs that were compiled of them."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re
import time
from typing import Final

import fiddle as fdl

from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.plan import advice, child_process, layouts, result
from paxon.runner.planning import search_space
from paxon.runner.planning import subject as subject_lib
from paxon.sharding import axes

# Time after which no program is started.
SECONDS: Final = 900.0
# Limit of a compiled program's correction of other estimates.
_MAX_CORRECTION: Final = 4.0
# Message of a TPU compiler about a program that does not fit.
_USED: Final = re.compile(r"(?:Used |temporaries \()([\d.]+)([KMGT])")

_Candidate = search_space.Candidate

# How much equal fields of layouts say about their memory and their step time.
_MEMORY: Final = {
  "attention": 8,
  "remat": 6,
  "mesh": 4,
  "microbatches": 2,
  "rules": 3,
  "is_exchanged": 3,
  "is_offloaded": 1,
}
_TIME: Final = _MEMORY | {"mesh": 6, "remat": 2, "microbatches": 3}


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
    self._end = time.monotonic() + SECONDS

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
    added = factor = 1.0
    by_memory = self._find_nearest(candidate, _MEMORY)
    if by_memory is not None:
      other, peak = (
        self._predicted[by_memory.candidate],
        get_peak(by_memory.plan),
      )
      assert peak is not None
      added = _ratio(peak - other.state, other.peak - other.state)
    by_time = self._find_nearest(candidate, _TIME)
    if by_time is not None and by_time.plan is not None:
      step = get_step_time(by_time.plan)
      if step is not None:
        factor = _ratio(step, self._predicted[by_time.candidate].step)
    return layouts.Prediction(
      step=factor * found.step,
      state=found.state,
      peak=found.state + round(added * (found.peak - found.state)),
    )

  def _find_nearest(
    self, candidate: _Candidate, weights: Mapping[str, int]
  ) -> Attempt | None:
    """Returns the most similar program, by weights of the layouts' fields."""
    return max(
      (a for a in self.attempts if a.plan is not None and get_peak(a.plan)),
      key=lambda attempt: sum(
        weight
        for field, weight in weights.items()
        if getattr(attempt.candidate.layout, field)
        == getattr(candidate.layout, field)
      ),
      default=None,
    )

  def add(self, changed: _Candidate, like: _Candidate) -> _Candidate:
    """Adds a candidate that the analytical estimates cannot distinguish.

    Args:
      changed: The candidate.
      like: A candidate with the same layout.
    """
    self._predicted[changed] = self._predicted[like]
    return changed

  def keep_kernel(self, kind: layouts.Attention) -> None:
    """Drops the candidates with another kernel that this one can replace."""
    self.candidates = [
      c
      for c in self.candidates
      if c.layout.attention is kind or axes.SEQUENCE in c.layout.mesh
    ]

  def is_too_slow(self, candidate: _Candidate) -> bool:
    """Returns whether a step should take more than twice as long.

    Args:
      candidate: Compared with the job as it is; both by analytical estimates.
    """
    now = self._predicted[self.space.current].step
    return self._predicted[candidate].step > advice.MAX_SLOWDOWN * now

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
      log(f"  compiling {typed} ...")
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


def log(text: str) -> None:
  """Prints a line of progress."""
  print(text, flush=True)


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
