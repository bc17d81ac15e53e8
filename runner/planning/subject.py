"""A job on a target, and the plan of it or of a change of it."""

from collections.abc import Sequence
import dataclasses

import fiddle as fdl

from paxon.runner import job as job_lib
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.plan import result, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import job_lint, plan_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """A job on a target.

  Attributes:
    experiment: As `--exp` takes it.
    overrides: Overrides of the command line.
    config: The resolved configuration.
    job: The same, built.
    shapes: Of its variables and batch.
    target: The devices.
    findings: Warnings of the sharding lint.
    is_compiled: Whether searches compile.
  """

  experiment: str
  overrides: Sequence[overrides_lib.Override]
  config: "fdl.Config[job_lib.Job]"
  job: job_lib.Job
  shapes: job_lint.JobShapes
  target: targets.Target
  findings: tuple[str, ...] = ()
  is_compiled: bool = True

  def plan(
    self,
    more: Sequence[overrides_lib.Override] = (),
    *,
    with_other_programs: bool = False,
    decode_steps: Sequence[tuple[int, int]] = (),
  ) -> result.Plan | result.Failure:
    """Plans the job; called by threads.

    Args:
      more: Overrides that change it; they win over those of the command line.
      with_other_programs: Whether to compile evaluation and decoding too.
      decode_steps: Sequences and slots of decoding steps to plan.

    Raises:
      UserError: The overrides are wrong.
    """
    given, config = self.overrides, self.config
    if more:
      given = merge(given, more)
      config = resolving.resolve(self.experiment, given).config
    found = plan_cache.plan_for(
      self.target,
      config,
      given,
      experiment=self.experiment,
      shapes=self.shapes,
      with_other_programs=with_other_programs,
      decode_steps=decode_steps,
    )
    if isinstance(found, result.Failure):
      return found
    return dataclasses.replace(found, findings=self.findings)


def resolve(
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  target: targets.Target,
  *,
  shapes: job_lint.JobShapes | None = None,
) -> Subject:
  """Returns the job of an experiment.

  Args:
    experiment: As `--exp` takes it.
    overrides: Overrides of the command line.
    target: The devices.
    shapes: Of its variables and batch, if they are known.

  Raises:
    UserError: The overrides are wrong, or the input has no batch.
  """
  config = resolving.resolve(experiment, overrides).config
  job = resolving.build(config)
  return Subject(
    experiment=experiment,
    overrides=overrides,
    config=config,
    job=job,
    shapes=shapes or job_lint.get_shapes(job),
    target=target,
    is_compiled=not topology.missing(target),
  )


def merge(
  given: Sequence[overrides_lib.Override],
  more: Sequence[overrides_lib.Override],
) -> tuple[overrides_lib.Override, ...]:
  """Returns overrides, later ones in place of earlier ones of the same path."""
  paths = {override.path for override in more}
  return (*(o for o in given if o.path not in paths), *more)
