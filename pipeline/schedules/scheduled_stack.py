"""A stack whose training step is run by an explicit schedule.

`ScheduledStack` is a `PipelinedStack`: same call, same variables, and so is its
forward pass where there is no backward one, in evaluation and decoding. What it
adds is the table by which a training step orders forward and backward
operations; `scheduled_gradients` runs it.
"""

from collections.abc import Callable
import functools
from typing import Any, ClassVar

from paxon.pipeline import microbatch_rows, placement, spmd_pipeline
from paxon.pipeline.schedules import lowering, one_f_one_b, operation, table

# `(*, num_stages, num_microbatches) -> table`.
Schedule = Callable[..., table.Table]


class ScheduledStack(spmd_pipeline.PipelinedStack):
  """A `PipelinedStack` with a schedule for training.

  Attributes:
    schedule: A function (or what is hashable like one) that makes the table;
      called with `num_stages` and `num_microbatches`.
      `circular_repeats` is the number of its chunks on each stage.
    residuals: What forward operations keep for backward ones. Where they keep
      what gradients need and the table parts gradients of inputs from those of
      weights, the layers of a chunk are compiled one by one.

  With a schedule `residuals` takes the place of `iteration_policy`, which is
  that of the forward pass by itself. Layers that have a `remat_policy` keep
  what it says.
  """

  # Lets a runner find such a stack without importing the executor.
  has_schedule: ClassVar[bool] = True

  schedule: Schedule = one_f_one_b.two_slots
  residuals: lowering.Residuals = lowering.Residuals.RECOMPUTE

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.streaming:
      raise ValueError(
        "ScheduledStack.streaming must be False: a schedule's table says what"
        " stages are given, got True."
      )
    rest = self.num_layers % len(self.blocks)
    if rest:
      raise ValueError(
        f"ScheduledStack.num_layers ({self.num_layers}) must be a multiple of"
        f" its {len(self.blocks)} blocks: {rest} layers are of no stage."
      )
    if self.num_microbatches is not None:
      self._made(self.num_microbatches)

  def num_groups(self) -> int:
    """Returns how often the pattern of blocks is repeated."""
    return self._num_groups()

  def table_for(self, batch: int) -> table.Table:
    """Returns the table for a batch.

    Args:
      batch: Its rows.

    Raises:
      ValueError: They cannot be cut into such microbatches, the mesh has no
        such stages, or the schedule does not suit the numbers.
    """
    placement.check_mesh(self.num_stages)
    number = microbatch_rows.number(
      batch,
      num_microbatches=self.num_microbatches,
      microbatch_size=self.microbatch_size,
      shards=placement.row_shards(),
      shrink=False,
    )
    self._check_rows(batch, number)
    return self._made(number)

  def unrolls(self, made: table.Table) -> bool:
    """Returns whether the layers of a chunk are compiled one by one.

    Args:
      made: The table.
    """
    saves = self.residuals is lowering.Residuals.SAVE
    kinds = {op.kind for _, op in made.places()}
    is_split = operation.Kind.WEIGHT_GRADIENT in kinds
    return not self.scan or (saves and is_split)

  def layer_call(self, static: dict[str, Any]) -> Callable[..., Any]:
    """Returns `(block, x, index, *args) -> x`.

    Args:
      static: Keyword arguments of the layers.
    """
    return self._call(static, prevent_cse=False)

  def _made(self, number: int) -> table.Table:
    made = _table(self.schedule, self.num_stages, number)
    for field, wanted, got in (
      ("num_stages", self.num_stages, made.pieces.num_stages),
      ("circular_repeats", self.circular_repeats, made.pieces.num_chunks),
      ("num_microbatches", number, made.num_microbatches),
    ):
      if wanted != got:
        what = {"circular_repeats": "chunks on each stage"}.get(
          field, field.removeprefix("num_")
        )
        raise ValueError(
          f"ScheduledStack.{field} is {wanted}, and the table of schedule"
          f" {made.name!r} has {got} {what}; they must agree."
        )
    return made


# Linen makes a module anew wherever it is bound.
@functools.lru_cache(maxsize=8)
def _table(schedule: Schedule, stages: int, microbatches: int) -> table.Table:
  return schedule(num_stages=stages, num_microbatches=microbatches)
