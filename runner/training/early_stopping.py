"""Ends a training whose evaluations get no better.

The verdict is a function of the evaluations recorded in the run's metrics, and
of nothing that a process remembers, so an interrupted run ends at the same step
as an undisturbed one.
"""

from collections.abc import Mapping
import dataclasses
import math

from paxon.runner import user_error
from paxon.runner.checkpoints import retention
from paxon.runner.configuration import suggestions


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
  """When to end a training before its last step.

  Attributes:
    metric: `split/name`, such as `validation/bits_per_byte`.
    goal: Whether small or large values are good.
    patience: Training ends after so many evaluations, one after the other, that
      are no better than the best before them. NaN is never better. `None` waits
      for the target alone.
    min_delta: A value is better only if it is so by more than this.
    target: Training ends with the first evaluation that is at least as good;
      `None` is no target.
  """

  metric: str = "validation/bits_per_byte"
  goal: retention.Goal = retention.Goal.MIN
  patience: int | None = 3
  min_delta: float = 0.0
  target: float | None = None

  def __post_init__(self) -> None:
    if not all(self.metric.partition("/")):
      raise ValueError(
        "EarlyStopping.metric must be split/name, such as validation/loss, got"
        f" {self.metric!r}."
      )
    if self.patience is None and self.target is None:
      raise ValueError(
        "EarlyStopping.patience and target are both None, so it would never"
        " end a training; set one of them."
      )
    if self.target is not None and math.isnan(self.target):
      raise ValueError("EarlyStopping.target must be a number, got nan.")
    if self.patience is not None and self.patience <= 0:
      raise ValueError(
        f"EarlyStopping.patience must be positive, got {self.patience}."
      )
    if not 0 <= self.min_delta < math.inf:
      raise ValueError(
        "EarlyStopping.min_delta must be finite and not negative, got"
        f" {self.min_delta}."
      )

  @property
  def split(self) -> str:
    """The split whose metric is watched."""
    return self.metric.partition("/")[0]

  def value(self, results: Mapping[str, Mapping[str, float]]) -> float:
    """Returns the metric of one evaluation.

    Args:
      results: Values by metric by split.

    Raises:
      UserError: The evaluation has no such metric.
    """
    split, _, name = self.metric.partition("/")
    if name not in results.get(split, {}):
      known = [f"{s}/{n}" for s, values in results.items() for n in values]
      raise user_error.UserError(
        f"EarlyStopping.metric is {self.metric!r}, which the evaluation does"
        f" not give{suggestions.hint(self.metric, known, count=2)}"
      )
    return results[split][name]

  def reason(self, values: Mapping[int, float]) -> str | None:
    """Returns why to stop, or `None` to go on.

    Args:
      values: The metric by the step of its evaluation.
    """
    sign = 1.0 if self.goal is retention.Goal.MIN else -1.0
    if self.target is not None:
      for step, value in sorted(values.items()):
        if sign * value <= sign * self.target:
          return (
            f"{self.metric} is {value:.6g} at step {step}, and the target is"
            f" {self.target:.6g}"
          )
    if self.patience is None:
      return None
    best_step, best, waited = None, math.inf, 0
    for step, value in sorted(values.items()):
      if sign * value < best - (0.0 if best == math.inf else self.min_delta):
        best_step, best, waited = step, sign * value, 0
      else:
        waited += 1
    if waited < self.patience:
      return None
    text = f"{self.metric} has not got better for {waited} evaluations"
    if best_step is None:
      return f"{text} and was never a number"
    return f"{text}; its best is {sign * best:.6g}, of step {best_step}"
