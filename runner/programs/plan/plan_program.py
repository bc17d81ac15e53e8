"""`--mode=plan`: what an experiment will cost on hardware that is not here."""

from collections.abc import Sequence
import dataclasses
import os

from etils import epath

from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import report, result, topology
from paxon.runner.plan import target as targets
from paxon.runner.programs.plan import child, job_lint

PLAN = "plan.json"

# The largest programs known take under five minutes on two cores.
_TIME_LIMIT = 1800.0


def run(
  job: job_lib.Job,
  *,
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  to: Sequence[targets.Target],
  run_dir: epath.Path,
) -> int:
  """Plans a job, prints the plans and writes `plan.json`.

  Args:
    job: The resolved configuration, built.
    experiment: As `--exp` takes it.
    overrides: Assignments of the command line.
    to: What to plan for.
    run_dir: A folder, which exists.

  Returns:
    The exit status: 1 if the program fits on none of the targets.

  Raises:
    UserError: The job cannot run on one of the targets.
  """
  # All of them before the first compiler starts.
  warnings = [_lint(job, target) for target in to]
  plans = []
  for target, findings in zip(to, warnings, strict=True):
    missing = topology.missing(target)
    plan = child.plan(
      experiment,
      overrides,
      target,
      is_compiled=not missing,
      time_limit=_TIME_LIMIT,
    )
    notes = (*plan.notes, *_how_to_compile(target, missing))
    plan = dataclasses.replace(plan, findings=findings, notes=notes)
    print(report.to_text(plan), flush=True)
    plans.append(plan)
  if len(plans) > 1:
    print("\n" + report.to_table(plans))
  files.write_text(run_dir / PLAN, result.to_json(tuple(plans)))
  print(f"plan: {os.fspath(run_dir / PLAN)}", flush=True)
  fits = [plan.memory.fit is not result.Fit.DOES_NOT_FIT for plan in plans]
  return 0 if any(fits) else 1


def _lint(job: job_lib.Job, target: targets.Target) -> tuple[str, ...]:
  """Returns the lint's warnings.

  Raises:
    UserError: It found an error.
  """
  findings = job_lint.check(
    job, num_devices=target.num_devices, num_slices=target.slices
  )
  errors = [f.message for f in findings if f.is_error]
  if errors:
    raise user_error.UserError(
      f"mesh {job.mesh!r} on {target}: {'; '.join(errors)}."
    )
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
