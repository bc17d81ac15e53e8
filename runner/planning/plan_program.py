"""`--mode=plan`: what an experiment will cost on hardware that is not here."""

from collections.abc import Sequence
import dataclasses
import os
import sys

from etils import epath
import fiddle as fdl

from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import plan_page, report, result, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import (
  child,
  job_lint,
  plan_cache,
  run_mesh,
  search,
)
from paxon.sharding import mesh as mesh_lib

PLAN = "plan.json"
PAGE = "plan.html"

# The largest programs known take under five minutes on two cores.
_TIME_LIMIT = 1800.0


def run(
  job: job_lib.Job,
  config: "fdl.Config[job_lib.Job]",
  *,
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  to: Sequence[targets.Target],
  run_dir: epath.Path,
  is_searched: bool = False,
) -> int:
  """Plans a job, prints the plans and writes `plan.json` and `plan.html`.

  A target that cannot be planned does not lose the others: what is wrong with
  it stands in its row.

  Args:
    job: The resolved configuration, built.
    config: The resolved configuration.
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    to: What to plan for.
    run_dir: A folder, which exists.
    is_searched: Whether meshes, remat policies and microbatches are explored.

  Returns:
    The exit status: 1 if the program fits on none of the targets.

  Raises:
    UserError: There is a plan for none of the targets, or one of them cannot be
      searched for.
  """
  if is_searched:
    _check_searchable(to)
  shapes = job_lint.shapes_of(job)
  # All of them before the first compiler starts.
  subjects = [
    _subject(target, shapes, job, config, experiment, overrides, is_searched)
    for target in to
  ]
  plans: list[result.Plan] = []
  failures: list[result.Failure] = []
  for target, subject in zip(to, subjects, strict=True):
    found = subject
    if isinstance(subject, _Subject):
      found = _plan(subject.request, subject.config, subject.overrides)
      if isinstance(found, result.Plan):
        found = _with_changes(
          found,
          subject.request,
          subject.job,
          subject.config,
          subject.overrides,
          is_searched=is_searched,
        )
    if isinstance(found, result.Plan):
      plans.append(found)
      print(report.to_text(found), flush=True)
    elif isinstance(found, result.Failure):
      failures.append(found)
      if len(to) > 1:
        print(f"{target}: no plan: {found.message}\n", flush=True)
  if not plans:
    raise user_error.UserError("; ".join(f.message for f in failures))
  if len(to) > 1:
    print("\n" + report.to_table(plans, failures))
  _write(run_dir / PLAN, result.to_json(tuple(plans), tuple(failures)))
  _write(run_dir / PAGE, plan_page.to_html(plans, failures))
  fits = [plan.memory.fit is not result.Fit.DOES_NOT_FIT for plan in plans]
  return 0 if any(fits) else 1


def _write(path: epath.Path, text: str) -> None:
  try:
    files.write_text(path, text)
  except OSError as error:
    raise user_error.UserError(
      f"{os.fspath(path)} cannot be written ({error.strerror or error})."
    ) from error
  print(f"plan: {os.fspath(path)}", flush=True)


@dataclasses.dataclass(frozen=True)
class _Request:
  """What is planned for a target, whatever is changed to make it fit."""

  experiment: str
  target: targets.Target
  shapes: job_lint.JobShapes
  findings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Subject:
  """A job as it is planned for a target, where its mesh is chosen."""

  request: _Request
  job: job_lib.Job
  config: "fdl.Config[job_lib.Job]"
  overrides: Sequence[overrides_lib.Override]


def _subject(
  target: targets.Target,
  shapes: job_lint.JobShapes,
  job: job_lib.Job,
  config: "fdl.Config[job_lib.Job]",
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  is_searched: bool,
) -> _Subject | result.Failure:
  """Returns what to plan for a target, or what is wrong with it."""
  if job.mesh == mesh_lib.AUTO:
    try:
      choice = run_mesh.choose(
        job,
        experiment=experiment,
        overrides=overrides,
        target=target,
        is_compiled=not is_searched,
      )
    except user_error.UserError as error:
      return result.Failure(target=target.text, message=str(error))
    print(f"{target}: {choice.line}", flush=True)
    overrides = choice.overrides(overrides)
    config = resolving.resolve(experiment, overrides).config
    job = resolving.build(config)
  findings = _lint(job, target, shapes)
  if isinstance(findings, result.Failure):
    return findings
  request = _Request(experiment, target, shapes, findings)
  return _Subject(request, job, config, overrides)


def _plan(
  request: _Request,
  config: "fdl.Config[job_lib.Job]",
  overrides: Sequence[overrides_lib.Override],
) -> result.Plan | result.Failure:
  """Plans for a target in a process of its own, or takes an earlier plan."""
  target = request.target
  is_compiled = not topology.missing(target)

  def find_key() -> str | None:
    return plan_cache.make_key(
      config,
      target,
      is_compiled=is_compiled,
      shapes=request.shapes,
      environ=os.environ,
      others=(request.experiment,),
    )

  def make() -> result.Plan:
    print(f"planning for {target} ...", flush=True)
    return child.plan(
      request.experiment,
      overrides,
      target,
      is_compiled=is_compiled,
      time_limit=_TIME_LIMIT,
    )

  try:
    found = plan_cache.plan(make, find_key=find_key, environ=os.environ)
  except user_error.UserError as error:
    return result.Failure(target=target.text, message=str(error))
  except RuntimeError as error:
    first, _, rest = str(error).partition("\n")
    print(rest, file=sys.stderr)
    return result.Failure(target=target.text, message=f"{first.rstrip(':')}.")
  missing = _how_to_compile(target, topology.missing(target))
  return dataclasses.replace(
    found,
    # Other assignments may lead to the same configuration.
    overrides=tuple(f"--fdl.{o.path}={o.text}" for o in overrides),
    findings=request.findings,
    notes=(*found.notes, *missing),
  )


def _with_changes(
  found: result.Plan,
  request: _Request,
  job: job_lib.Job,
  config: "fdl.Config[job_lib.Job]",
  overrides: Sequence[overrides_lib.Override],
  *,
  is_searched: bool,
) -> result.Plan:
  """Adds what makes it fit if it does not, and what was searched for."""

  def plan(
    config: "fdl.Config[job_lib.Job]",
    overrides: Sequence[overrides_lib.Override],
  ) -> result.Plan | result.Failure:
    return _plan(request, config, overrides)

  subject = search.Subject(
    experiment=request.experiment,
    overrides=overrides,
    config=config,
    job=job,
    shapes=request.shapes,
    target=request.target,
    plan=plan,
    is_compiled=not topology.missing(request.target),
  )
  if is_searched:
    return search.explore(subject, found)
  if found.memory.fit is result.Fit.DOES_NOT_FIT:
    return search.fix(subject, found)
  return found


def _check_searchable(to: Sequence[targets.Target]) -> None:
  for target in to:
    problem = search.problem(target)
    if problem is not None:
      raise user_error.UserError(f"--plan_search: {problem}.")


def _lint(
  job: job_lib.Job, target: targets.Target, shapes: job_lint.JobShapes
) -> tuple[str, ...] | result.Failure:
  """Returns the lint's warnings, or what is wrong with the target."""
  try:
    findings = job_lint.check(
      job,
      num_devices=target.num_devices,
      num_slices=target.slices,
      shapes=shapes,
    )
  except user_error.UserError as error:
    return result.Failure(target=target.text, message=str(error))
  errors = [f.message for f in findings if f.is_error]
  if errors:
    message = f"mesh {job.mesh!r} on {target}: {'; '.join(errors)}."
    return result.Failure(target=target.text, message=message)
  return tuple(finding.message for finding in findings)


def _how_to_compile(
  target: targets.Target, missing: Sequence[str]
) -> tuple[str, ...]:
  if not missing:
    return ()
  return (
    f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
    f" installed, so nothing was compiled for {target}: temporaries, peak and"
    " collectives are not known. To compile: bazel run --config=plan"
    " //runner:main -- --mode=plan ...",
  )
