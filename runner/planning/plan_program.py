"""`--mode=plan`: what an experiment will cost on hardware that is not here."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
import os

from etils import epath
import fiddle as fdl

from paxon.runner import experiment as experiment_lib
from paxon.runner import files, units, user_error
from paxon.runner import job as job_lib
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import (
  child_process,
  network,
  plan_page,
  report,
  result,
  topology,
)
from paxon.runner.plan import target as targets
from paxon.runner.planning import (
  job_lint,
  largest_batch,
  questions,
  run_mesh,
  search,
)
from paxon.runner.planning import subject as subject_lib
from paxon.sharding import axes
from paxon.sharding import mesh as mesh_lib
from paxon.sharding import rules as rules_lib

PLAN = "plan.json"
PAGE = "plan.html"

_NO_QUESTIONS = questions.Questions()


def run(
  job: job_lib.Job,
  config: "fdl.Config[job_lib.Job]",
  *,
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  to: Sequence[targets.Target],
  run_dir: epath.Path,
  is_searched: bool = False,
  asked: questions.Questions = _NO_QUESTIONS,
) -> int:
  """Plans a job, prints the plans and writes `plan.json` and `plan.html`.

  A target that cannot be planned does not stop the others; its error stands in
  the table.

  Args:
    job: The resolved configuration, built.
    config: The resolved configuration.
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    to: Target of the plan.
    run_dir: An existing directory.
    is_searched: Whether layouts are searched.
    asked: The other flags of plans.

  Returns:
    The exit status: 1 if the program fits on none of the targets.

  Raises:
    UserError: There is a plan for none of the targets, or one of them cannot be
      searched for.
  """
  if is_searched:
    _check_searchable(to)
  given = subject_lib.Subject(
    experiment=experiment,
    overrides=overrides,
    config=config,
    job=job,
    shapes=job_lint.get_shapes(job),
    target=to[0],
  )
  plans: list[result.Plan] = []
  failures: list[result.Failure] = []
  if asked.cells():
    for target in to:
      _plan_grid(target, given, asked, plans, failures)
  else:
    # Errors of all targets come before the first compiler starts.
    subjects = [
      _choose_mesh(_with_target(given, target), is_searched=is_searched)
      for target in to
    ]
    for target, subject in zip(to, subjects, strict=True):
      found = _plan_target(subject, asked, is_searched=is_searched)
      if isinstance(found, result.Plan):
        plans.append(found)
        print(report.to_text(found), flush=True)
      else:
        failures.append(found)
        if len(to) > 1:
          print(f"{target}: no plan: {found.message}\n", flush=True)
      if asked.wants_largest:
        _find_batch(subject, found, asked)
      if asked.days is not None:
        _find_size(questions.Size(target, found), given, asked)
  if not plans:
    raise user_error.UserError(
      "; ".join(dict.fromkeys(f.message for f in failures))
    )
  if len(to) > 1:
    print("\n" + report.to_table(plans, failures))
  _write(run_dir / PLAN, result.to_json(tuple(plans), tuple(failures)))
  _write(run_dir / PAGE, plan_page.to_html(plans, failures))
  fits = [plan.memory.fit is not result.Fit.DOES_NOT_FIT for plan in plans]
  return 0 if any(fits) else 1


def make_plan(
  experiment: experiment_lib.Experiment, target: str
) -> result.Plan:
  """Returns the plan of an experiment for one target, for a notebook.

  Other processes compile, so it may be called when JAX has started; they find
  the experiment by its name, so its class must be in a module.

  Args:
    experiment: The experiment with its knobs.
    target: As `--target` takes it, such as `h200:1x8`.

  Raises:
    UserError: The target or the experiment is not valid, or cannot be planned.
  """
  name = experiment.import_path()
  if name.startswith("__main__."):
    raise user_error.UserError(
      f"{name} is defined in a notebook or program; write it to a module, which"
      " the compiling process can import."
    )
  try:
    to = targets.parse(target)
  except ValueError as error:
    raise user_error.UserError(str(error)) from error
  given = subject_lib.resolve(name, resolving.to_overrides(experiment), to)
  found = _plan_target(_choose_mesh(given), _NO_QUESTIONS)
  if isinstance(found, result.Failure):
    raise user_error.UserError(found.message)
  return found


def plan_best(
  given: subject_lib.Subject, asked: questions.Questions = _NO_QUESTIONS
) -> result.Plan:
  """Returns the plan of the fastest layout that fits.

  If none fits, it is the plan of the job as it is, with all that were tried.

  Args:
    given: The job.
    asked: Further questions.

  Raises:
    UserError: The job cannot be planned, or layouts cannot be compared.
  """
  _check_searchable([given.target])
  subject = _choose_mesh(given, is_searched=True)
  first = _plan_target(subject, _NO_QUESTIONS, is_searched=True)
  if isinstance(subject, result.Failure) or isinstance(first, result.Failure):
    failure = first if isinstance(first, result.Failure) else subject
    assert isinstance(failure, result.Failure)
    raise user_error.UserError(failure.message)
  fitting = (result.Fit.FITS.value, result.Fit.TIGHT.value)
  best = next(
    (c for c in first.search if c.compiled and c.fit in fitting), None
  )
  if best is None:
    return questions.answer(first, asked)
  parsed = map(overrides_lib.parse_argument, best.overrides)
  more = [override for override in parsed if override is not None]
  found = subject.plan(
    more, with_other_programs=False, decode_steps=asked.decode
  )
  if isinstance(found, result.Failure):
    raise user_error.UserError(found.message)
  found = dataclasses.replace(
    found, search=first.search, num_layouts=first.num_layouts
  )
  return questions.answer(found, asked)


def _plan_target(
  subject: subject_lib.Subject | result.Failure,
  asked: questions.Questions,
  *,
  is_searched: bool = False,
  is_alone: bool = True,
) -> result.Plan | result.Failure:
  """Plans a job, and answers what is asked.

  Args:
    subject: The job, or why there is none.
    asked: Flags of plans.
    is_searched: Whether layouts are searched.
    is_alone: Whether no other size is planned: then also other programs, and
      changes that make it fit.
  """
  if isinstance(subject, result.Failure):
    return subject
  has_others = is_alone and asked.has_others(subject.target)
  found = subject.plan(
    with_other_programs=has_others,
    decode_steps=asked.decode if is_alone else (),
  )
  if isinstance(found, result.Failure):
    return found
  # Whether training fits is not the question then.
  if is_alone and not asked.decode:
    if is_searched:
      found = search.explore(subject, found)
    elif found.memory.fit is result.Fit.DOES_NOT_FIT:
      found = search.fix(subject, found)
  return questions.answer(found, asked)


def _plan_grid(
  target: targets.Target,
  given: subject_lib.Subject,
  asked: questions.Questions,
  plans: list[result.Plan],
  failures: list[result.Failure],
) -> None:
  """Plans and prints the grid of a target; adds its best plan to `plans`."""
  cells = asked.cells()
  subjects = [_subject_of_cell(target, given, cell) for cell in cells]
  plan = functools.partial(_plan_target, asked=asked, is_alone=False)
  found = child_process.in_parallel(plan, subjects)
  failed = [
    dataclasses.replace(
      each,
      target=" ".join([str(target), *(f"{k}={n}" for k, n in cell.items())]),
    )
    for each, cell in zip(found, cells, strict=True)
    if isinstance(each, result.Failure)
  ]
  best = questions.best(found)
  if best is not None:
    print(report.to_text(best))
    plans.append(best)
  else:
    failures += failed
  print(f"plans for {target} by length and batch")
  made = [each for each in found if isinstance(each, result.Plan)]
  print(report.to_table(made, failed) + "\n", flush=True)


def _subject_of_cell(
  target: targets.Target, given: subject_lib.Subject, cell: Mapping[str, int]
) -> subject_lib.Subject | result.Failure:
  more = [overrides_lib.Override(k, str(n)) for k, n in cell.items()]
  overrides = subject_lib.merge(given.overrides, more)
  try:
    changed = subject_lib.resolve(given.experiment, overrides, target)
  except user_error.UserError as error:
    return result.Failure(target=target.text, message=str(error))
  return _choose_mesh(changed)


def _find_batch(
  subject: subject_lib.Subject | result.Failure,
  found: result.Plan | result.Failure,
  asked: questions.Questions,
) -> None:
  """Prints the largest batch that fits on a target, and what was compiled."""
  if isinstance(subject, result.Failure) or isinstance(found, result.Failure):
    return
  if not found.compiled and found.memory.compiler_error is None:
    print("largest batch that fits: not known, because nothing was compiled\n")
    return
  job = subject.job
  spec = rules_lib.to_partition_spec((axes.BATCH,), rules=job.rules)
  shards = math.prod(
    found.mesh.get(axis, 1) for axis in rules_lib.as_tuple(spec[0])
  )

  def make(batch: int) -> result.Plan | result.Failure:
    override = overrides_lib.Override(questions.BATCH, str(batch))
    made = subject.plan([override])
    if isinstance(made, result.Failure):
      return made
    return questions.answer(made, asked)

  largest = largest_batch.find(
    job.train_input.global_batch_size,
    found,
    make,
    unit=shards * job.task.learner.num_microbatches,
  )
  print(f"plans for {found.target} by batch")
  print(report.to_table(list(largest.plans.values())))
  print(f"{_describe_batch(largest, shards)}\n", flush=True)


def _describe_batch(found: largest_batch.Found, shards: int) -> str:
  if found.batch is None:
    return "largest batch that fits: none"
  least = "" if found.is_certain else "at least "
  peak = found.plans[found.batch].memory.peak
  assert peak is not None
  return (
    f"largest batch that fits: {least}{found.batch:,}"
    f" ({found.batch / shards:,g} per shard), peak {units.size(peak)}"
  )


def _find_size(
  first: questions.Size, given: subject_lib.Subject, asked: questions.Questions
) -> None:
  """Prints the sizes of a target's kind, up to one that is fast enough."""

  def make(target: targets.Target) -> result.Plan | result.Failure:
    subject = _choose_mesh(_with_target(given, target))
    return _plan_target(subject, asked, is_alone=False)

  assert asked.days is not None
  found = questions.find_size(first, asked.days, make)
  print(
    f"sizes of {first.target.hardware.name} to train in"
    f" {questions.to_days(asked.days)}"
  )
  print(questions.to_size_table(found, asked.days) + "\n", flush=True)


def _with_target(
  given: subject_lib.Subject, target: targets.Target
) -> subject_lib.Subject:
  """Returns the same job on a target."""
  is_compiled = not topology.missing(target)
  return dataclasses.replace(given, target=target, is_compiled=is_compiled)


def _write(path: epath.Path, text: str) -> None:
  try:
    files.write_text(path, text)
  except OSError as error:
    raise user_error.UserError(
      f"{os.fspath(path)} cannot be written ({error.strerror or error})."
    ) from error
  print(f"plan: {os.fspath(path)}", flush=True)


def _choose_mesh(
  subject: subject_lib.Subject, *, is_searched: bool = False
) -> subject_lib.Subject | result.Failure:
  """Returns a job with its mesh and warnings, or what is wrong with it."""
  target = subject.target
  if subject.job.mesh == mesh_lib.AUTO:
    try:
      choice = run_mesh.choose(
        subject.job,
        experiment=subject.experiment,
        overrides=subject.overrides,
        target=target,
        is_compiled=not is_searched,
      )
    except user_error.UserError as error:
      return result.Failure(target=target.text, message=str(error))
    print(f"{target}: {choice.line}", flush=True)
    subject = subject_lib.resolve(
      subject.experiment,
      choice.overrides(subject.overrides),
      target,
      shapes=subject.shapes,
    )
  findings = _lint(subject.job, target, subject.shapes)
  if isinstance(findings, result.Failure):
    return findings
  return dataclasses.replace(subject, findings=findings)


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
  if not errors:
    problem = network.find_problem(target, mesh_lib.MeshSpec.parse(job.mesh))
    errors += [] if problem is None else [problem]
  if errors:
    message = f"mesh {job.mesh!r} on {target}: {'; '.join(errors)}."
    return result.Failure(target=target.text, message=message)
  return tuple(finding.message for finding in findings)
