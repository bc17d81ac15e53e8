"""One epoch of a task, evaluated with the task's own metric functions."""

import dataclasses

from paxon.inputs import packed_input, packing
from paxon.inputs.seqio_tasks import task_metrics, task_stream


@dataclasses.dataclass(kw_only=True, eq=False)
class TaskEvalInput(packed_input.PackedInput):
  """Rows of one example each, with what results are joined by.

  Whoever evaluates it asks `row_metrics` for a collector and gives it, of each
  batch, the scores and the predictions of rows.

  Attributes:
    metric_kinds: Of metrics to compute: `score`, and `predict`, which has to
      generate a text for each example. Only those that the task has count.
  """

  metric_kinds: tuple[str, ...] = (task_metrics.SCORE, task_metrics.PREDICT)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.packing is not packing.Packing.NONE:
      raise ValueError(
        "TaskEvalInput.packing must be NONE: results are joined by rows, got"
        f" {self.packing.name}."
      )
    stream = self.examples
    if not isinstance(stream, task_stream.TaskStream) or not stream.provenance:
      raise ValueError(
        "TaskEvalInput.examples must be a TaskStream with provenance, by which"
        " results are joined."
      )

  def row_metrics(self) -> task_metrics.TaskMetrics:
    """Returns a new collector of results.

    Raises:
      ValueError: The stream is of several tasks, which have metrics each.
    """
    stream = self.examples
    assert isinstance(stream, task_stream.TaskStream)
    if len(stream.sources) > 1:
      raise ValueError(
        f"{stream.name_in_registry} is a mixture of {sorted(stream.sources)};"
        " make an evaluation split of each task."
      )
    (source,) = stream.sources.values()
    return task_metrics.TaskMetrics(source, kinds=self.metric_kinds)
