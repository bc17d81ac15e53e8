"""Evaluation of a task with the task's own metric functions.

Results may arrive in any order, repeatedly, from any host, and with padding
among them. They are joined to the examples by id: each example counts once,
with its own target.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from paxon.inputs import optional_library, packed_input, packing
from paxon.inputs.seqio_tasks import task_source, task_stream

PREDICT = "predict"
SCORE = "score"
_OUTPUTS = ("scores", "predictions")


class TaskMetrics:
  """Collects the results of one evaluation and computes the task's metrics."""

  def __init__(
    self,
    source: task_source.TaskSource,
    *,
    kinds: Sequence[str] = (SCORE, PREDICT),
  ) -> None:
    """Looks up the task's metric functions of some kinds.

    `SCORE` are those of the log likelihood of targets, `PREDICT` those of
    generated texts.

    Raises:
      ValueError: A kind, or the type of a metric, is neither of them.
    """
    for kind in kinds:
      if kind not in (SCORE, PREDICT):
        raise ValueError(
          f"kinds must be of {SCORE!r} and {PREDICT!r}, got {kind!r}."
        )
    task = source.seqio_task
    objects = task.metric_objs[: len(task.metric_objs) - len(task.metric_fns)]
    self._source = source
    self._functions = {
      SCORE: list(task.score_metric_fns) if SCORE in kinds else [],
      PREDICT: list(task.predict_metric_fns) if PREDICT in kinds else [],
    }
    self._objects: dict[str, list[Any]] = {SCORE: [], PREDICT: []}
    for metric in objects:
      kind = _kind(metric)
      if kind in kinds:
        self._objects[kind].append(metric)
    self._rows: dict[int, dict[str, Any]] = {}

  @property
  def needs_scores(self) -> bool:
    """Whether a metric needs scores."""
    return bool(self._functions[SCORE] or self._objects[SCORE])

  @property
  def needs_predictions(self) -> bool:
    """Whether a metric needs generated texts."""
    return bool(self._functions[PREDICT] or self._objects[PREDICT])

  def add(self, rows: Mapping[str, np.ndarray]) -> None:
    """Adds the results of a batch; those of other tasks' ids are left out.

    These are `example_ids` and `example_weights` [B]; as needed `scores` [B],
    the log likelihood of each sequence's targets, and `predictions` int [B, T].
    """
    size = len(self._source)
    for row, number in enumerate(
      (rows["example_ids"] - self._source.first_id).tolist()
    ):
      if rows["example_weights"][row] and 0 <= number < size:
        self._rows.setdefault(
          number, {k: rows[k][row] for k in _OUTPUTS if k in rows}
        )

  def compute(self) -> dict[str, float]:
    """Returns the task's metrics of the added examples, numbers only.

    Raises:
      ValueError: Nothing was added, or two metrics have one name.
    """
    if not self._rows:
      raise ValueError(
        f"No example of the task {self._source.task!r} was evaluated, so it"
        " has no metrics."
      )
    numbers = sorted(self._rows)
    examples = [self._source.all_features(number) for number in numbers]
    found: dict[str, float] = {}
    for kind, name in ((SCORE, "scores"), (PREDICT, "predictions")):
      if not (self._functions[kind] or self._objects[kind]):
        continue
      outputs = np.stack([self._rows[number][name] for number in numbers])
      for values in self._values(kind, examples, outputs):
        for key, value in values.items():
          if key in found:
            raise ValueError(
              f"Two metrics of the task {self._source.task!r} have the name"
              f" {key!r}."
            )
          number = _number(value)
          if number is not None:
            found[key] = number
    return found

  def lines(self) -> Iterator[dict[str, Any]]:
    """Yields the texts and outputs of each added example, as JSON values.

    Texts are those before postprocessing.
    """
    task = self._source.seqio_task
    vocabulary = task.output_features["targets"].vocabulary
    for number, row in sorted(self._rows.items()):
      example = self._source.all_features(number)
      assert example is not None
      line: dict[str, Any] = {"task": self._source.task, "example": number}
      line |= {k: _text(task, example, k) for k in task.output_features}
      if "scores" in row:
        line["score"] = float(row["scores"])
      if "predictions" in row:
        line["prediction"] = vocabulary.decode(row["predictions"].tolist())
      yield line

  @property
  def is_empty(self) -> bool:
    """Whether no result was added."""
    return not self._rows

  def _values(
    self, kind: str, examples: list[Any], outputs: np.ndarray
  ) -> list[Mapping[str, Any]]:
    task = self._source.seqio_task
    given: Any = outputs
    if kind == PREDICT:
      vocabulary = task.output_features["targets"].vocabulary
      texts = [vocabulary.decode(row.tolist()) for row in outputs]
      given = [
        _postprocess(task, text, example, is_target=False)
        for text, example in zip(texts, examples, strict=True)
      ]
    targets = [_target(task, example) for example in examples]
    values = [fn(targets, given) for fn in self._functions[kind]]
    for metric in self._objects[kind]:
      result = metric.from_model_output(
        examples, outputs, task.output_features
      ).compute()
      name = getattr(metric, "__name__", type(metric).__name__)
      values.append(result if isinstance(result, Mapping) else {name: result})
    return values


class MixtureMetrics:
  """Metrics of the tasks of a mixture, each named `TASK/METRIC`."""

  def __init__(self, tasks: Mapping[str, TaskMetrics]) -> None:
    """Takes the collector of each task."""
    self._tasks = tasks

  @property
  def needs_scores(self) -> bool:
    """Whether a metric needs scores."""
    return any(task.needs_scores for task in self._tasks.values())

  @property
  def needs_predictions(self) -> bool:
    """Whether a metric needs generated texts."""
    return any(task.needs_predictions for task in self._tasks.values())

  def add(self, rows: Mapping[str, np.ndarray]) -> None:
    """Adds the results of a batch, see `TaskMetrics.add`."""
    for task in self._tasks.values():
      task.add(rows)

  def compute(self) -> dict[str, float]:
    """Returns the metrics of tasks with an example in the evaluation."""
    return {
      f"{name}/{key}": value
      for name, task in self._tasks.items()
      if not task.is_empty
      for key, value in task.compute().items()
    }

  def lines(self) -> Iterator[dict[str, Any]]:
    """Yields the lines of each task, see `TaskMetrics.lines`."""
    for task in self._tasks.values():
      yield from task.lines()


def _kind(metric: Any) -> str:
  """Returns the kind of a metric object, `SCORE` or `PREDICT`."""
  types = optional_library.seqio().metrics.ModelOutputType
  kinds = {types.SCORE: SCORE, types.PREDICTION: PREDICT}
  found = getattr(metric, "model_output_type", None)
  if found not in kinds:
    raise ValueError(
      f"The metric {metric!r} is computed from {found!r}; only scores and"
      " predictions are supported."
    )
  return kinds[found]


def _text(task: Any, example: Mapping[str, Any], name: str) -> Any:
  """Returns the text of a feature, decoded if the task keeps its ids only."""
  text = example.get(f"{name}_pretokenized")
  if text is None:
    vocabulary = task.output_features[name].vocabulary
    text = vocabulary.decode(np.asarray(example[name]).tolist())
  text = text.item() if isinstance(text, np.ndarray) else text
  return text.decode() if isinstance(text, bytes) else text


def _target(task: Any, example: Mapping[str, Any]) -> Any:
  """Returns the target of an example as metric functions expect it."""
  text = _text(task, example, "targets")
  return _postprocess(task, text, example, is_target=True)


def _postprocess(
  task: Any, text: Any, example: Mapping[str, Any], *, is_target: bool
) -> Any:
  if task.postprocessor is None:
    return text
  return task.postprocessor(text, example=example, is_target=is_target)


def _number(value: Any) -> float | None:
  value = getattr(value, "value", value)
  try:
    return float(value)
  except (TypeError, ValueError):
    return None


@dataclasses.dataclass(kw_only=True, eq=False)
class TaskEvalInput(packed_input.PackedInput):
  """One epoch of a task or mixture, one example per sequence, with ids.

  The evaluation gets a collector from `row_metrics` and adds the scores and
  predictions of each batch to it.

  Attributes:
    metric_kinds: Metrics to compute, if the task has them: `score`, and
      `predict`, which generates a text for each example.
  """

  metric_kinds: tuple[str, ...] = (SCORE, PREDICT)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.packing is not packing.Packing.NONE:
      raise ValueError(
        "TaskEvalInput.packing must be NONE, one example per sequence, got"
        f" {self.packing.name}."
      )
    stream = self.examples
    if not isinstance(stream, task_stream.TaskStream) or not stream.provenance:
      raise ValueError(
        "TaskEvalInput.examples must be a TaskStream with provenance=True, to"
        " join results to examples."
      )

  def row_metrics(self) -> TaskMetrics | MixtureMetrics:
    """Returns a new collector of results, of `metric_kinds`."""
    return self._collect(self.metric_kinds)

  def text_metrics(self) -> TaskMetrics | MixtureMetrics:
    """Returns a new collector of results, of the kind `predict` only."""
    return self._collect((PREDICT,))

  def _collect(self, kinds: Sequence[str]) -> TaskMetrics | MixtureMetrics:
    stream = self.examples
    assert isinstance(stream, task_stream.TaskStream)
    tasks = {
      name: TaskMetrics(source, kinds=kinds)
      for name, source in stream.sources.items()
    }
    if len(tasks) > 1:
      return MixtureMetrics(tasks)
    (metrics,) = tasks.values()
    return metrics
