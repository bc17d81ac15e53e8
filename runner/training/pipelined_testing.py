"""The tiny language model of tests, in stages or by a schedule."""

import fiddle as fdl

from paxon.pipeline import spmd_pipeline, stage_sharding
from paxon.pipeline.schedules import generators, lowering, scheduled_stack
from paxon.runner import job as job_lib
from paxon.runner.training import testing
from paxon.sharding import rules as rules_lib


class PipelinedLm(testing.TinyLm):
  """The tiny model in stages, or in none.

  Attributes:
    num_stages: None is no pipeline.
    schedule: A name of `generators.SCHEDULES`; None is GPipe.
    residuals: Values that forward operations of a schedule save.
  """

  max_new_tokens = 0
  num_layers = 2

  num_stages: int | None = None
  schedule: str | None = None
  residuals: str = "recompute"

  def adjust(self, config: fdl.Config[job_lib.Job]) -> None:
    """Puts a pipeline in the place of the stack."""
    schedule, residuals = self.schedule, self.residuals
    if self.num_stages is not None:
      stack = fdl.Config(
        spmd_pipeline.PipelinedStack,
        **config.task.model.stack.__arguments__,
        num_stages=self.num_stages,
        num_microbatches=4,
      )
      if schedule is not None:
        fdl.update_callable(stack, scheduled_stack.ScheduledStack)
        stack.schedule = generators.find(schedule)
        stack.residuals = lowering.Residuals(residuals)
      config.task.model.stack = stack

  def sharding_rules(self) -> rules_lib.Rules:
    """Returns rules that store each stage's layers with it."""
    rules = super().sharding_rules()
    if self.num_stages is None:
      return rules
    return stage_sharding.with_stages(
      rules, num_stages=self.num_stages, num_groups=self.num_layers
    )
