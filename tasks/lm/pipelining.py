"""Knobs that split the layers of a model into the stages of a pipeline.

They stand beside the model, never in a second copy of it: the same experiment
runs with stages and without, and its checkpoints do not know.
"""

from collections.abc import Callable
from typing import Any, Literal

import fiddle as fdl

from paxon.pipeline import spmd_pipeline, stage_rules
from paxon.pipeline.schedules import by_name, lowering, scheduled_stack, table
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

  The mesh's axis `stage` has the stages. A batch passes through them in
  microbatches, given by their number or by their size.

  Attributes:
    num_layers: Number of layers, of one kind.
    num_stages: Into how many stages the layers are split; None is no pipeline.
    num_pipeline_microbatches: How many microbatches a batch is cut into.
    pipeline_microbatch_size: Rows of a microbatch, over all devices.
    circular_repeats: How often a microbatch goes around the stages, each of
      which then holds that many parts of the stack; None is once.
    stream_io: Whether inputs and outputs are kept by the stages in turns, so
      that sending them overlaps with computing; None is not.
    pipeline_schedule: The order of forward and backward work in training, by a
      name of `pipeline.schedules.by_name` (`gpipe`, `1f1b_two_slots`,
      `interleaved_two_slots`, `zb_h1`, ...). None is all forward work first,
      and what JAX makes of it. For a function of your own that makes a table,
      override `schedule_maker`.
    pipeline_residuals: What a schedule's forward operations keep: `recompute`,
      the inputs of their layers; `save`, all that gradients need, which
      zero-bubble schedules need to gain time. None is `recompute`.
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

  def pipelined(self, stack: fdl.Config[Any]) -> fdl.Config[Any]:
    """Returns the stack in stages, or as it is where there are none.

    What a layer would keep for the backward pass, a tick of the pipeline keeps
    of all layers of a stage, as in Pax.

    Args:
      stack: Of all layers.

    Raises:
      UserError: A knob of pipelines is set, and there are no stages.
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

  def schedule_maker(self) -> Callable[..., table.Table] | None:
    """Returns what makes the table of the schedule; None for no schedule.

    Raises:
      UserError: There is no schedule of that name.
    """
    if self.pipeline_schedule is None:
      return None
    try:
      return by_name.find(self.pipeline_schedule)
    except ValueError as error:
      raise user_error.UserError(
        f"{type(self).__name__}.pipeline_schedule: {error}"
      ) from error

  def _repeats(self) -> int:
    """Returns how many parts of the stack a stage holds."""
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
    return made.pieces.num_chunks

  def _check_no_residuals(self) -> None:
    if self.pipeline_residuals is not None:
      raise user_error.UserError(
        f"{type(self).__name__}.pipeline_residuals={self.pipeline_residuals} is"
        " of a schedule, and there is none; set pipeline_schedule, or"
        " pipeline_residuals=None."
      )

  def _check_no_knobs(self) -> None:
    for knob in _KNOBS:
      value = getattr(self, knob)
      if value is not None:
        raise user_error.UserError(
          f"{type(self).__name__}.{knob}={value} is of a pipeline, and without"
          f" num_stages there is none; set num_stages, or {knob}=None."
        )

  def sharding_rules(self) -> rules_lib.Rules:
    """Returns the rules of the rule set, with stages where there are some."""
    rules = super().sharding_rules()
    if self.num_stages is None:
      return rules
    return stage_rules.with_stages(
      rules,
      num_stages=self.num_stages,
      num_groups=self.num_layers,
      circular_repeats=self._repeats(),
      streaming=bool(self.stream_io),
    )

  def toy_stages(self) -> Any:
    """Returns the experiment, of toy size already, with two stages.

    For an even number of devices up to 8, and batches of eight rows.
    """
    if self.num_stages is None:
      return self
    repeats = self.circular_repeats
    if self.schedule_maker() is None and repeats is not None:
      repeats = 2
    # A schedule says how many chunks a stage has.
    parts = self._repeats() if repeats is None else repeats
    return self.replace(
      mesh="stage=2,fsdp=-1",
      num_layers=2 * parts,
      num_stages=2,
      num_pipeline_microbatches=2,
      pipeline_microbatch_size=None,
      circular_repeats=repeats,
    )
