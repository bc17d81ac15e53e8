"""Early stopping: ends training when evaluations stop improving.

Decided from the recorded evaluations only, so that an interrupted run ends at
the same step as an uninterrupted one.
"""

from collections.abc import Mapping
import math

from paxon.runner import user_error
from paxon.runner.settings import training
from paxon.sharding import suggestions


def metric_value(
  rule: training.EarlyStopping, results: Mapping[str, Mapping[str, float]]
) -> float:
  """Returns the monitored metric of one evaluation.

  Args:
    rule: Names the metric.
    results: Values by metric by split.

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
  """Returns why training stops, or None to continue.

  Args:
    rule: When to stop.
    values: The metric by the step of its evaluation.
  """
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
