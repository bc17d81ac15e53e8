"""A stack whose training step runs by an explicit pipeline schedule.

`ScheduledStack` is a `PipelinedStack`: the same call, variables and forward
pass (in evaluation and decoding). Its training step follows a table of forward
and backward operations (`scheduled_gradients`).
"""

from collections.abc import Sequence
import functools
import re

from flax import linen as nn

from paxon.learners import gradients, metrics, variable_groups
from paxon.pipeline import spmd_pipeline, stage_sharding
from paxon.pipeline import stages as stages_lib
from paxon.pipeline.schedules import (
  generators,
  linen_functions,
  lowering,
  scheduled_gradients,
  table,
)


class ScheduledStack(spmd_pipeline.PipelinedStack):
  """A `PipelinedStack` with a schedule for training.

  `circular_repeats` must be the schedule's number of chunks on each stage.
  `iteration_policy` applies to the forward pass alone; in training `residuals`
  takes its place. Layers with a `remat_policy` save what that policy says.

  Attributes:
    schedule: A hashable function that returns the table, called with
      `num_stages` and `num_microbatches`.
    residuals: Values that forward operations save for backward operations.
  """

  schedule: generators.Schedule = generators.one_f_one_b_two_slots
  residuals: lowering.Residuals = lowering.Residuals.RECOMPUTE

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.streaming:
      raise ValueError(
        "ScheduledStack.streaming must be False, got True: the schedule decides"
        " what each stage receives."
      )
    rest = self.num_layers % len(self.blocks)
    if rest:
      raise ValueError(
        f"ScheduledStack.num_layers ({self.num_layers}) must be a multiple of"
        f" its {len(self.blocks)} blocks; {rest} layers are left over."
      )
    if self.num_microbatches is not None:
      self._make_table(self.num_microbatches)

  def table_for(self, batch: int) -> table.Table:
    """Returns the table for a batch of that size.

    Raises:
      ValueError: The batch does not divide into the microbatches, or the mesh
        or the schedule does not support the numbers.
    """
    stage_sharding.check_mesh(self.num_stages)
    number = stages_lib.count_microbatches(
      batch,
      num_microbatches=self.num_microbatches,
      microbatch_size=self.microbatch_size,
      shards=stage_sharding.count_microbatch_shards(),
      shrink=False,
    )
    self._check_size(batch, number)
    return self._make_table(number)

  def make_gradient_fn(
    self,
    model: nn.Module,
    *,
    loss_fn_of: linen_functions.LossFnOf,
    metric_fns: Sequence[metrics.MetricFn],
    specs: variable_groups.Specs,
  ) -> gradients.GradientFn:
    """Returns `(variables, batch, rngs) -> Gradients`, by the schedule.

    Args:
      model: Has this stack as its field `stack`.
      loss_fn_of: Returns the loss function of a model like it.
      metric_fns: Evaluated on each microbatch and its outputs.
      specs: A `VariableSpec` for each variable.

    Raises:
      ValueError: A variable changes in a way that a schedule cannot combine.
    """
    return scheduled_gradients.make_gradient_fn(
      model,
      loss_fn_of=loss_fn_of,
      metric_fns=metric_fns,
      specs=specs,
      table_for=self.table_for,
      residuals=self.residuals,
    )

  def check_program(self, text: str) -> None:
    """Raises ValueError if a compiled step, HLO text, would deadlock."""
    if count_branch_permutes(text):
      raise ValueError(
        "the compiler puts collective-permutes inside branches that only some"
        " stages execute, so the step would deadlock. Split batch or weights"
        " over fewer mesh axes, or train without pipeline_schedule."
      )

  def _make_table(self, num_microbatches: int) -> table.Table:
    made = _table(self.schedule, self.num_stages, num_microbatches)
    for field, expected, got, what in (
      ("num_stages", self.num_stages, made.num_stages, "stages"),
      (
        "circular_repeats",
        self.circular_repeats,
        made.num_chunks,
        "chunks on each stage",
      ),
      (
        "num_microbatches",
        num_microbatches,
        made.num_microbatches,
        "microbatches",
      ),
    ):
      if expected != got:
        raise ValueError(
          f"ScheduledStack.{field} ({expected}) must be {got}: schedule"
          f" {made.name!r} has {got} {what}."
        )
    return made


# Linen creates a module again wherever it is bound.
@functools.lru_cache(maxsize=8)
def _table(
  schedule: generators.Schedule, stages: int, microbatches: int
) -> table.Table:
  return schedule(num_stages=stages, num_microbatches=microbatches)


_NAME = re.compile(r"%([\w.\-]+)")
_BRANCHES = re.compile(
  r" conditional\(.*?(?:branch_computations=\{([^}]*)\}"
  r"|true_computation=(%[\w.\-]+), false_computation=(%[\w.\-]+))"
)


def count_branch_permutes(text: str) -> int:
  """Returns the number of collective-permutes in branches of a program.

  Stages run different branches. A collective-permute inside a branch waits for
  all devices, including those of other stages, so the program deadlocks. Chunks
  contain none, but the partitioner may insert one where an activation changes
  its sharding inside a chunk.

  Such programs were seen to hang on CPU. None was run on GPUs, where XLA puts
  all devices into the group of a permute unless
  `xla_gpu_collective_permute_connected_components` is set
  (https://github.com/openxla/xla/pull/40505).
  """
  bodies: dict[str, list[str]] = {}
  name = ""
  for line in text.splitlines():
    if line.startswith(("%", "ENTRY")):
      name = _NAME.findall(line)[0]
      bodies[name] = []
    elif name:
      bodies[name].append(line)
  todo = {
    called
    for lines in bodies.values()
    for line in lines
    for groups in _BRANCHES.findall(line)
    for called in _NAME.findall(" ".join(groups))
  }
  inside: set[str] = set()
  while todo:
    current = todo.pop()
    inside.add(current)
    called = _NAME.findall("\n".join(bodies[current]))
    todo |= {other for other in called if other in bodies} - inside
  return sum(
    " collective-permute" in line.partition("metadata=")[0]
    and "-done(" not in line
    for current in inside
    for line in bodies[current]
  )
