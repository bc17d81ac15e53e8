"""The evaluations that a run has recorded, also those of earlier processes."""

from collections.abc import Iterable, Mapping

from paxon.runner.monitoring import metrics_file
from paxon.runner.settings import training
from paxon.runner.training import early_stopping

Results = Mapping[str, Mapping[str, float]]


class EvaluationLog:
  """Evaluations by step, each of all splits or of none."""

  def __init__(
    self,
    records: Iterable[metrics_file.Record] = (),
    *,
    splits: Iterable[str],
    until: int = 0,
  ) -> None:
    """Takes over what was recorded.

    Args:
      records: Lines of a run's metrics.
      splits: Those of an evaluation.
      until: Lines of later steps are left out: the run makes them again.
    """
    self._splits = frozenset(splits)
    self._results: dict[int, dict[str, Mapping[str, float]]] = {}
    self._made: set[int] = set()
    for record in records:
      if record.split in self._splits and record.step <= until:
        self._results.setdefault(record.step, {})[record.split] = record.values

  def add(self, step: int, results: Results) -> None:
    """Records an evaluation of all splits."""
    self._results[step] = dict(results)
    self._made.add(step)

  def at(self, step: int) -> Results | None:
    """Returns the evaluation at a step, `None` if it is not complete."""
    results = self._results.get(step, {})
    return results if results.keys() == self._splits else None

  def is_made_here(self, step: int) -> bool:
    """Whether this process made the evaluation at a step."""
    return step in self._made

  def reason_to_stop(
    self, rule: training.EarlyStopping, *, every_steps: int
  ) -> str | None:
    """Returns why training ends early, or `None` to go on.

    Args:
      rule: When to end.
      every_steps: Only evaluations at its multiples count. One at the end of a
        run that was made longer later would not be there in one that was as
        long from the start.

    Raises:
      UserError: The evaluations do not have the rule's metric.
    """
    return early_stopping.reason_to_stop(
      rule,
      {
        step: early_stopping.metric_value(rule, results)
        for step, results in self._results.items()
        if step % every_steps == 0 and self.at(step) is not None
      },
    )
