"""Looks for changes of a job: the smallest that fits, or the best of many.

The algorithms are in `runner/plan/search`; here are the answers to what they
ask: arithmetic on shapes in this process, traces in a second one, and compiled
programs in one of their own each.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Final

import fiddle as fdl
import jax.numpy as jnp

from paxon.runner import job as job_lib
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import advice, quantized_products, result
from paxon.runner.plan import target as targets
from paxon.runner.plan.search import (
  candidates,
  changes,
  communication,
  cost,
  exploring,
  fixing,
  meshes,
  oracle,
)
from paxon.runner.planning import (
  job_lint,
  mesh_figures,
  search_space,
  tracer,
)
from paxon.sharding import mesh as mesh_lib

_Kind = candidates.Kind

# A change is looked for after every plan that does not fit, so it must not take
# long; exploring is asked for.
_FIX_TRACES: Final = 60
_FIX_COMPILES: Final = 4
_FIX_MESHES: Final = 4
_EXPLORE_TRACES: Final = 80
_EXPLORE_COMPILES: Final = 6
_EXPLORE_MESHES: Final = 6
_SECONDS: Final = 900.0
_TRACE_SECONDS: Final = 300.0

Plan = Callable[
  [fdl.Config[job_lib.Job], Sequence[overrides_lib.Override]],
  result.Plan | result.Failure,
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """What is changed.

  Attributes:
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    config: The resolved configuration.
    job: The same, built.
    shapes: Of its variables and batch.
    target: What it is planned for.
    plan: How it is planned, with more overrides than those of the command line.
    is_compiled: Whether the target's compiler is here.
    say: Is told what is going on.
  """

  experiment: str
  overrides: Sequence[overrides_lib.Override]
  config: fdl.Config[job_lib.Job]
  job: job_lib.Job
  shapes: job_lint.JobShapes
  target: targets.Target
  plan: Plan
  is_compiled: bool
  say: Callable[[str], None] = lambda text: print(text, flush=True)


def is_needed(plan: result.Plan) -> bool:
  """Whether a plan does not fit, as far as can be told.

  Args:
    plan: Compiled, or by analytical estimate.
  """
  memory = plan.memory
  if memory.fit is not result.Fit.UNKNOWN:
    return memory.fit is result.Fit.DOES_NOT_FIT
  if memory.usable is None or memory.forecast is None:
    return False
  return memory.forecast > memory.usable


def problem(target: targets.Target) -> str | None:
  """Returns why nothing can be searched for on a target, or None.

  Args:
    target: What is planned for.
  """
  kind = target.hardware
  if kind.usable_bytes is None or kind.peak_flops() is None:
    return (
      f"for {target} there is nothing to search by: neither the memory nor the"
      f" rates of a {kind.name} device are known; name another target, such as"
      " h200:1x8"
    )
  return None


def fix(subject: Subject, before: result.Plan) -> result.Plan:
  """Returns a plan that does not fit with the smallest change that does.

  Args:
    subject: What may be changed.
    before: Its plan, which does not fit.
  """
  usable = before.memory.usable
  if usable is None or problem(subject.target) is not None:
    return before
  answers = _Answers(subject, before)
  space = _space(subject, answers, _FIX_MESHES, only_thriftier=True)
  subject.say("looking for the smallest change that fits ...")
  budget = oracle.Budget(
    traces=_FIX_TRACES, compiles=_FIX_COMPILES, seconds=_SECONDS
  )
  with _tracer(subject) as answers.tracer:
    correction = answers.corrected()
    found = fixing.smallest(
      space,
      answers,
      usable=usable,
      budget=budget,
      correction=correction,
      is_compiled=subject.is_compiled,
      say=subject.say,
    )
    verified = changes.verified(found, before=before)
    if found.forecast is not None:
      verified = (
        changes.of_forecast(
          found.forecast,
          before=answers.forecast(candidates.Candidate()),
          usable=usable,
          correction=correction,
        ),
      )
  notes, words = before.notes, before.advice
  if answers.whole_state() > usable * subject.target.num_devices:
    words = (
      advice.devices_for(
        answers.whole_state(),
        usable=usable,
        num_devices=subject.target.num_devices,
      ),
      *words[1:],
    )
  if found.is_cut_short:
    notes += (
      "The search for a change that fits was cut short; --plan_search goes on"
      " longer.",
    )
  return dataclasses.replace(
    before, verified_changes=verified, advice=words, notes=notes
  )


def explore(subject: Subject, before: result.Plan) -> result.Plan:
  """Returns a plan with the Pareto front of `--plan_search`.

  Args:
    subject: What may be changed.
    before: Its plan.
  """
  usable = before.memory.usable
  assert usable is not None
  answers = _Answers(subject, before)
  space = _space(subject, answers, _EXPLORE_MESHES, only_thriftier=False)
  subject.say(
    f"searching {1 + len(space.meshes)} meshes,"
    f" {1 + len(space.remat)} remat policies and up to"
    f" {2 ** len(space.microbatches)} times as many microbatches, for at most"
    f" {_SECONDS / 60:.0f} minutes ..."
  )
  budget = oracle.Budget(
    traces=_EXPLORE_TRACES, compiles=_EXPLORE_COMPILES, seconds=_SECONDS
  )
  with _tracer(subject) as answers.tracer:
    correction = answers.corrected()
    found = exploring.explore(
      space,
      answers,
      usable=usable,
      budget=budget,
      correction=correction,
      is_compiled=subject.is_compiled,
      say=subject.say,
    )
    front = changes.front_of(found.attempts, before=before)
    if not subject.is_compiled:
      front = tuple(
        changes.of_forecast(
          forecast,
          before=answers.forecast(candidates.Candidate()),
          usable=usable,
          correction=correction,
        )
        for forecast in found.forecasts
      )
  return dataclasses.replace(
    before, search=front, notes=(*before.notes, *_remarks(subject, found))
  )


def _remarks(subject: Subject, found: exploring.Explored) -> list[str]:
  notes = []
  if found.is_cut_short:
    notes.append("--plan_search was cut short before all was traced.")
  if not subject.is_compiled:
    notes.append(
      "--plan_search used analytical estimates only: nothing could be compiled."
    )
  if not found.forecasts:
    notes.append(
      "--plan_search found nothing that fits by meshes, remat policies and"
      " microbatches."
    )
  return notes


def _tracer(subject: Subject) -> tracer.Tracer:
  return tracer.Tracer(
    subject.experiment,
    subject.overrides,
    subject.target,
    time_limit=_TRACE_SECONDS,
  )


class _Answers:
  """Answers about candidates, each worked out once."""

  def __init__(self, subject: Subject, before: result.Plan) -> None:
    self._subject = subject
    self._before = before
    self._figures = mesh_figures.MeshFigures(
      subject.job, subject.shapes, subject.target
    )
    self._forecasts: dict[candidates.Candidate, oracle.Forecast | None] = {}
    self.tracer: tracer.Tracer | None = None

  def traffic(self, candidate: candidates.Candidate) -> communication.Traffic:
    """Returns what a candidate's mesh makes devices send."""
    return self._figures.traffic(
      self._mesh(candidate),
      itemsize=_itemsize(self._before.flops.by_dtype),
      num_microbatches=self._parts(candidate),
      narrow=quantized_products.variable_paths(self._before.quantized_matmuls),
    )

  def is_possible(self, candidate: candidates.Candidate) -> bool:
    """Whether sizes divide."""
    return self._figures.is_possible(
      self._mesh(candidate), num_microbatches=self._parts(candidate)
    )

  def shares_work(self, candidate: candidates.Candidate) -> bool:
    """Whether no axis of its mesh has all devices do the same work."""
    return self._figures.shares_work(self._mesh(candidate))

  def state(self, candidate: candidates.Candidate) -> int:
    """Returns the bytes of the state on a device.

    With a narrower momentum it is as large, at most.
    """
    if candidate.of_kind(_Kind.DTYPE) is not None:
      return 0
    return self._figures.state(self._mesh(candidate))

  def whole_state(self) -> int:
    """Returns the bytes of the state, not split."""
    return self._figures.whole_state()

  def forecast(self, candidate: candidates.Candidate) -> oracle.Forecast | None:
    """Returns the analytical estimates."""
    if candidate not in self._forecasts:
      self._forecasts[candidate] = self._traced(candidate)
    return self._forecasts[candidate]

  def compiled(self, candidate: candidates.Candidate) -> result.Plan | None:
    """Returns the compiled plan."""
    subject = self._subject
    if not candidate.choices:
      return self._before
    given = (*subject.overrides, *_overrides(candidate))
    resolved = resolving.resolve(subject.experiment, given)
    found = subject.plan(resolved.config, given)
    if isinstance(found, result.Failure):
      subject.say(f"  no plan: {found.message}")
      return None
    return found

  def corrected(self) -> oracle.Correction:
    """Returns what the plan of the experiment as it is says of forecasts."""
    correction = oracle.Correction()
    unchanged = self.forecast(candidates.Candidate())
    if unchanged is not None:
      correction.learn(unchanged, self._before.memory.peak)
    return correction

  def _traced(self, candidate: candidates.Candidate) -> oracle.Forecast | None:
    assert self.tracer is not None
    # What is unchanged was traced for its plan.
    plan = (
      self.tracer.plan(_overrides(candidate))
      if candidate.choices
      else self._before
    )
    if isinstance(plan, result.Failure) or plan.memory.forecast is None:
      return None
    return oracle.Forecast(
      candidate=candidate,
      arguments=plan.memory.state_and_batch,
      peak=plan.memory.forecast,
      cost=cost.of(
        plan.flops.by_dtype,
        self.traffic(candidate),
        kind=self._subject.target.hardware,
        num_devices=self._subject.target.num_devices,
      ),
      recomputed_share=plan.flops.recomputed / max(plan.flops.hardware, 1),
    )

  def _mesh(self, candidate: candidates.Candidate) -> str:
    if candidate.of_kind(_Kind.MESH) is None:
      return self._subject.job.mesh
    return search_space.assigned(candidate, _Kind.MESH)

  def _parts(self, candidate: candidates.Candidate) -> int:
    text = search_space.assigned(candidate, _Kind.MICROBATCHES)
    return int(text or self._subject.job.task.learner.num_microbatches)


def _itemsize(flops_by_dtype: Mapping[str, int]) -> int:
  """Returns the bytes of an element of most products that are not narrow."""
  wide = {
    dtype: count
    for dtype, count in flops_by_dtype.items()
    if not quantized_products.is_narrow(dtype)
  }
  most = max(wide, key=lambda name: wide[name], default="float32")
  return jnp.dtype(most or "float32").itemsize


def _space(
  subject: Subject,
  answers: _Answers,
  num_meshes: int,
  *,
  only_thriftier: bool,
) -> candidates.Space:
  config = subject.config
  space = candidates.Space(
    remat=search_space.remat_choices(config, only_thriftier=only_thriftier),
    microbatches=search_space.microbatch_choices(
      config, rows=subject.job.train_input.global_batch_size
    ),
    dtypes=search_space.dtype_choices(config),
  )
  return dataclasses.replace(
    space, meshes=_meshes(subject, answers)[:num_meshes]
  )


def _meshes(
  subject: Subject, answers: _Answers
) -> tuple[candidates.Choice, ...]:
  """Other meshes that can hold the state, those that send least first."""
  number = subject.target.num_devices
  current = mesh_lib.MeshSpec.parse(subject.job.mesh)
  given = [
    str(spec)
    for spec in meshes.factorizations(
      current, num_devices=number, num_slices=subject.target.slices
    )
    if spec.resolve(number) != current.resolve(number)
  ]
  found = []
  for choice in search_space.mesh_choices(given):
    candidate = candidates.Candidate((choice,))
    if not (answers.is_possible(candidate) and answers.shares_work(candidate)):
      continue
    if answers.state(candidate) <= (subject.target.hardware.usable_bytes or 0):
      found.append((answers.traffic(candidate), choice))
  kind = subject.target.hardware

  def seconds(entry: tuple[communication.Traffic, candidates.Choice]) -> float:
    return cost.of({}, entry[0], kind=kind, num_devices=number).total

  return tuple(choice for _, choice in sorted(found, key=seconds))


def _overrides(
  candidate: candidates.Candidate,
) -> tuple[overrides_lib.Override, ...]:
  pairs = (assignment.partition("=") for assignment in candidate.assignments)
  return tuple(overrides_lib.Override(path, text) for path, _, text in pairs)
