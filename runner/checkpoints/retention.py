"""Which checkpoints of a run are kept, and which are deleted.

A checkpoint is kept if any of the rules wants it: it is one of the newest, one
of the best, or the first since enough time. The decision is made at each save
from what is on disk and from the run's recorded evaluations, and from nothing
that a process remembers, so a run that is interrupted keeps what an undisturbed
one keeps.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import enum
import math

from paxon.runner import user_error
from paxon.runner.configuration import suggestions


class Goal(enum.Enum):
  """Which values of a metric are better."""

  MIN = "min"
  MAX = "max"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
  """A complete checkpoint.

  Attributes:
    step: The number of training steps before it.
    time: When it was saved, in seconds since the epoch.
  """

  step: int
  time: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
  """Which checkpoints are kept.

  Attributes:
    newest: How many of the newest; `None` for all.
    every_minutes: One for each such interval is kept for ever: the first, and
      then each that was saved at least so long after the last one kept for
      this reason. `None` for none.
    best: How many of the best by `metric`; 0 for none. Only a checkpoint whose
      own step was evaluated can be one. NaN is never good.
    metric: `split/name`, such as `validation/bits_per_byte`.
    goal: Whether small or large values are good.
  """

  newest: int | None = 3
  every_minutes: float | None = None
  best: int = 0
  metric: str | None = None
  goal: Goal = Goal.MIN

  def __post_init__(self) -> None:
    if self.newest is not None and self.newest <= 0:
      raise ValueError(
        "Retention.newest must be positive, or None for all, got"
        f" {self.newest}."
      )
    if self.every_minutes is not None and not (
      0 < self.every_minutes < math.inf
    ):
      raise ValueError(
        "Retention.every_minutes must be positive and finite, or None, got"
        f" {self.every_minutes}."
      )
    if self.best < 0:
      raise ValueError(f"Retention.best must not be negative, got {self.best}.")
    if (self.best > 0) != (self.metric is not None):
      raise ValueError(
        "Retention.best and Retention.metric are set together or not at all,"
        f" got best={self.best} and metric={self.metric!r}."
      )
    if self.metric is not None and not all(self.metric.partition("/")):
      raise ValueError(
        "Retention.metric must be split/name, such as validation/loss, got"
        f" {self.metric!r}."
      )

  @property
  def split(self) -> str | None:
    """The split whose metric is watched; `None` if none is."""
    return None if self.metric is None else self.metric.partition("/")[0]

  def value(self, results: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the metric of one evaluation; `None` without one.

    Args:
      results: Values by metric by split.

    Raises:
      UserError: The evaluation has the split and not the metric.
    """
    if self.metric is None:
      return None
    split, _, name = self.metric.partition("/")
    if split not in results:
      return None
    if name not in results[split]:
      known = [f"{split}/{each}" for each in results[split]]
      raise user_error.UserError(
        f"Retention.metric is {self.metric!r}, which the evaluation does not"
        f" give{suggestions.hint(self.metric, known, count=2)}"
      )
    return results[split][name]

  def reasons(
    self,
    saved: Iterable[Saved],
    *,
    value: Callable[[int], float | None] = lambda step: None,
  ) -> dict[int, list[str]]:
    """Returns why each checkpoint is kept, by step; no reason is deletion.

    Args:
      saved: All complete checkpoints.
      value: Gives the metric at a step; `None` where it is not known.
    """
    ordered = sorted(saved, key=lambda each: each.step)
    reasons: dict[int, list[str]] = {each.step: [] for each in ordered}
    newest = len(ordered) if self.newest is None else self.newest
    for each in ordered[max(0, len(ordered) - newest) :]:
      reasons[each.step].append("newest")
    for step in self._best(reasons, value):
      reasons[step].append(f"best {self.metric}")
    for step in self._spaced(ordered):
      reasons[step].append(f"one every {self.every_minutes:g} minutes")
    return reasons

  def _best(
    self, steps: Iterable[int], value: Callable[[int], float | None]
  ) -> list[int]:
    if not self.best:
      return []
    sign = 1.0 if self.goal is Goal.MIN else -1.0
    ranked = []
    for step in steps:
      figure = value(step)
      if figure is not None and not math.isnan(figure):
        ranked.append((sign * figure, step))
    # Of equal ones the older, which had to be trained less.
    return [step for _, step in sorted(ranked)[: self.best]]

  def _spaced(self, ordered: Iterable[Saved]) -> list[int]:
    if self.every_minutes is None:
      return []
    kept: list[Saved] = []
    for each in ordered:
      if not kept or each.time - kept[-1].time >= 60 * self.every_minutes:
        kept.append(each)
    return [each.step for each in kept]
