"""Recorded evaluations of a run, and early stopping.

Early stopping is decided from the recorded evaluations only, so that an
interrupted run ends at the same step as an uninterrupted one.
"""

from collections.abc import Iterable, Mapping
import math

from paxon.runner import user_error
from paxon.runner.monitoring import metrics_file
from paxon.runner.settings import training
from paxon.runner.training import run_metrics
from paxon.sharding import suggestions


class EvaluationLog:
  """A run's evaluations by step, including those of earlier processes."""

  def __init__(
    self,
    records: Iterable[metrics_file.Record] = (),
    *,
    splits: Iterable[str],
    until: int = 0,
  ) -> None:
    """Reads the recorded evaluations up to a step; later ones are repeated."""
    self._splits = frozenset(splits)
    self._results: dict[int, dict[str, Mapping[str, float]]] = {}
    self._made: set[int] = set()
    for record in records:
      if record.split in self._splits and record.step <= until:
        self._results.setdefault(record.step, {})[record.split] = record.values

  def add(self, step: int, results: run_metrics.Results) -> None:
    """Records an evaluation of all splits."""
    self._results[step] = dict(results)
    self._made.add(step)

  def at(self, step: int) -> run_metrics.Results | None:
    """Returns the evaluation at a step, `None` if it is incomplete."""
    results = self._results.get(step, {})
    return results if results.keys() == self._splits else None

  def complete(self) -> dict[int, run_metrics.Results]:
    """Returns the complete evaluations by step."""
    return {
      step: results
      for step, results in sorted(self._results.items())
      if results.keys() == self._splits
    }

  def is_from_this_process(self, step: int) -> bool:
    """Whether this process evaluated at a step, not an earlier one."""
    return step in self._made

  def reason_to_stop(
    self, rule: training.EarlyStopping, *, every_steps: int
  ) -> str | None:
    """Returns why training stops early, `None` if it does not.

    Args:
      rule: The job's early stopping.
      every_steps: Only evaluations at its multiples count. The one at the end
        of a run that was extended later would not exist in a run that was as
        long from the start.

    Raises:
      UserError: The evaluations do not have the rule's metric.
    """
    return reason_to_stop(
      rule,
      {
        step: early_stopping_value(rule, results)
        for step, results in self._results.items()
        if step % every_steps == 0 and self.at(step) is not None
      },
    )


def early_stopping_value(
  rule: training.EarlyStopping, results: run_metrics.Results
) -> float:
  """Returns the monitored metric of one evaluation.

  Raises:
    UserError: The evaluation does not have the metric.
  """
  split, _, name = rule.metric.partition("/")
  if name not in results.get(split, {}):
    known = [f"{s}/{n}" for s, values in results.items() for n in values]
    raise user_error.UserError(
      f"EarlyStopping.metric is {rule.metric!r}, which the evaluation does not"
      f" have{suggestions.suggest(rule.metric, known, count=2)}"
    )
  return results[split][name]


def reason_to_stop(
  rule: training.EarlyStopping, values: Mapping[int, float]
) -> str | None:
  """Returns why training stops, from the metric by step; None to continue."""
  sign = 1.0 if rule.goal is training.Goal.MIN else -1.0
  if rule.target is not None:
    for step, value in sorted(values.items()):
      if sign * value <= sign * rule.target:
        return (
          f"{rule.metric} is {value:.6g} at step {step}, and the target is"
          f" {rule.target:.6g}"
        )
  if rule.patience is None:
    return None
  best_step, best, waited = None, math.inf, 0
  for step, value in sorted(values.items()):
    if sign * value < best - (0.0 if best == math.inf else rule.min_delta):
      best_step, best, waited = step, sign * value, 0
    else:
      waited += 1
  if waited < rule.patience:
    return None
  text = f"{rule.metric} has not improved for {waited} evaluations"
  if best_step is None:
    return f"{text} and was never a number"
  return f"{text}; best {sign * best:.6g} at step {best_step}"
