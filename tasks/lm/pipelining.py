"""Experiment knobs that split the layers of a model into pipeline stages.

The same experiment runs with and without stages, and its checkpoints are the
same.
"""

from typing import Any, Literal

import fiddle as fdl

from paxon.pipeline import spmd_pipeline, stage_sharding
from paxon.pipeline.schedules import generators, lowering, scheduled_stack
from paxon.runner import experiment, user_error
from paxon.sharding import rules as rules_lib

_KNOBS = (
  "num_stages",
  "num_pipeline_microbatches",
  "pipeline_microbatch_size",
  "circular_repeats",
  "stream_io",
  "pipeline_schedule",
  "pipeline_residuals",
)


class Pipelining(experiment.Experiment):
  """An experiment whose layers can be the stages of a pipeline.

  Stages are placed on the mesh axis `stage`. A batch passes through them in
  microbatches, given by their number or by their size.

  Attributes:
    num_layers: Number of layers.
    num_stages: Number of stages; None disables the pipeline.
    num_pipeline_microbatches: Microbatches per batch.
    pipeline_microbatch_size: Sequences per microbatch, over all devices.
    circular_repeats: Number of layer chunks per stage; a microbatch passes
      through all stages as many times. None is 1.
    stream_io: Whether each stage holds a share of the inputs and outputs, so
      that sending them overlaps with compute.
    pipeline_schedule: Order of forward and backward passes in training: `1f1b`,
      `1f1b_two_slots` or `interleaved_two_slots`. None is GPipe: all forward
      passes, then all backward passes. For a custom table, override
      `schedule_maker`.
    pipeline_residuals: Values that forward passes of a schedule save:
      `recompute` saves layer inputs, `save` all residuals. None is `recompute`.
  """

  num_layers: int
  num_stages: int | None = None
  num_pipeline_microbatches: int | None = None
  pipeline_microbatch_size: int | None = None
  circular_repeats: int | None = None
  stream_io: bool | None = None
  pipeline_schedule: str | None = None
  pipeline_residuals: Literal["recompute", "save"] | None = None

  def without_pipeline(self) -> Any:
    """Returns the same experiment with a plain stack of its layers."""
    return self.replace(**dict.fromkeys(_KNOBS))

  def split_stack(self, stack: fdl.Config[Any]) -> fdl.Config[Any]:
    """Returns the stack split into stages, or unchanged without stages.

    The stack's `remat_policy` becomes the policy of a tick of the pipeline,
    which runs all layers of a stage, as in Pax.

    Raises:
      UserError: A pipeline knob is set without `num_stages`.
    """
    if self.num_stages is None:
      self._check_no_knobs()
      return stack
    fields: dict[str, Any] = {
      str(name): value for name, value in stack.__arguments__.items()
    }
    made = fdl.Config(
      spmd_pipeline.PipelinedStack,
      **{**fields, "remat_policy": None},
      iteration_policy=fields.get("remat_policy"),
      num_stages=self.num_stages,
      num_microbatches=self.num_pipeline_microbatches,
      microbatch_size=self.pipeline_microbatch_size,
      circular_repeats=self._repeats(),
      streaming=bool(self.stream_io),
    )
    schedule = self.schedule_maker()
    if schedule is None:
      self._check_no_residuals()
      return made
    fdl.update_callable(made, scheduled_stack.ScheduledStack)
    made.schedule = schedule
    if self.pipeline_residuals is not None:
      made.residuals = lowering.Residuals(self.pipeline_residuals)
    return made

  def schedule_maker(self) -> generators.Schedule | None:
    """Returns the function that makes the schedule's table; None for GPipe.

    Raises:
      UserError: `pipeline_schedule` is not the name of a schedule.
    """
    if self.pipeline_schedule is None:
      return None
    try:
      return generators.find(self.pipeline_schedule)
    except ValueError as error:
      raise user_error.UserError(
        f"{type(self).__name__}.pipeline_schedule: {error}"
      ) from error

  def _repeats(self) -> int:
    """Returns the number of chunks on each stage."""
    schedule = self.schedule_maker()
    if self.circular_repeats is not None:
      return self.circular_repeats
    if schedule is None:
      return 1
    number, size = self.num_pipeline_microbatches, self.pipeline_microbatch_size
    if number is None:
      number = self.global_batch_size // (size or self.global_batch_size)
    try:
      made = schedule(num_stages=self.num_stages, num_microbatches=number)
    except ValueError as error:
      raise user_error.UserError(
        f"{type(self).__name__}.pipeline_schedule={self.pipeline_schedule}:"
        f" {error}"
      ) from error
    return made.num_chunks

  def _check_no_residuals(self) -> None:
    if self.pipeline_residuals is not None:
      raise user_error.UserError(
        f"{type(self).__name__}.pipeline_residuals={self.pipeline_residuals}"
        " needs a schedule; set pipeline_schedule, or pipeline_residuals=None."
      )

  def _check_no_knobs(self) -> None:
    for knob in _KNOBS:
      value = getattr(self, knob)
      if value is not None:
        raise user_error.UserError(
          f"{type(self).__name__}.{knob}={value} needs a pipeline; set"
          f" num_stages, or {knob}=None."
        )

  def sharding_rules(self) -> rules_lib.Rules:
    """Returns the sharding rules, with stages if there is a pipeline."""
    rules = super().sharding_rules()
    if self.num_stages is None:
      return rules
    return stage_sharding.with_stages(
      rules,
      num_stages=self.num_stages,
      num_groups=self.num_layers,
      circular_repeats=self._repeats(),
      streaming=bool(self.stream_io),
    )

  def toy_stages(self) -> Any:
    """Returns the experiment, already of toy size, with two stages.

    It runs on an even number of devices up to 8, with batches of 8 sequences.
    """
    if self.num_stages is None:
      return self
    repeats = self.circular_repeats
    if self.schedule_maker() is None and repeats is not None:
      repeats = 2
    chunks = self._repeats() if repeats is None else repeats
    return self.replace(
      mesh="stage=2,fsdp=-1",
      num_layers=2 * chunks,
      num_stages=2,
      num_pipeline_microbatches=2,
      pipeline_microbatch_size=None,
      circular_repeats=repeats,
    )
