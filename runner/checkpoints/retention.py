"""Selection of the checkpoints to keep.

Decided at each save from the checkpoints on disk and the recorded evaluations
only, so that an interrupted run keeps the same checkpoints as an uninterrupted
one.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import math

from paxon.runner import user_error
from paxon.runner.settings import training
from paxon.sharding import suggestions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
  """A complete checkpoint.

  Attributes:
    step: Number of completed training steps.
    time: When it was saved, in seconds since the epoch.
  """

  step: int
  time: float


def metric_value(
  retention: training.Retention, results: Mapping[str, Mapping[str, float]]
) -> float | None:
  """Returns the metric of an evaluation that ranks checkpoints.

  None without a metric, its split or targets in it.

  Raises:
    UserError: The evaluation has the split but not the metric.
  """
  if retention.metric is None:
    return None
  split, _, name = retention.metric.partition("/")
  if not results.get(split):
    return None
  if name not in results[split]:
    known = [f"{split}/{each}" for each in results[split]]
    raise user_error.UserError(
      f"Retention.metric is {retention.metric!r}, which the evaluation does not"
      f" have{suggestions.suggest(retention.metric, known, count=2)}"
    )
  return results[split][name]


def reasons_to_keep(
  retention: training.Retention,
  saved: Iterable[Saved],
  *,
  value: Callable[[int], float | None] = lambda step: None,
) -> dict[int, list[str]]:
  """Returns the reasons to keep each complete checkpoint, by step.

  Checkpoints without a reason are deleted.
  """
  ordered = sorted(saved, key=lambda each: each.step)
  reasons: dict[int, list[str]] = {each.step: [] for each in ordered}
  newest = len(ordered) if retention.newest is None else retention.newest
  for each in ordered[max(0, len(ordered) - newest) :]:
    reasons[each.step].append("newest")
  for step in _best_steps(retention, reasons, value):
    reasons[step].append(f"best {retention.metric}")
  for step in _spaced_steps(retention.every_minutes, ordered):
    reasons[step].append(f"one every {retention.every_minutes:g} minutes")
  return reasons


def _best_steps(
  retention: training.Retention,
  steps: Iterable[int],
  value: Callable[[int], float | None],
) -> list[int]:
  if not retention.best:
    return []
  sign = 1.0 if retention.goal is training.Goal.MIN else -1.0
  ranked = []
  for step in steps:
    metric = value(step)
    if metric is not None and not math.isnan(metric):
      ranked.append((sign * metric, step))
  # Ties keep the older checkpoint, which needed less training.
  return [step for _, step in sorted(ranked)[: retention.best]]


def _spaced_steps(
  every_minutes: float | None, ordered: Iterable[Saved]
) -> list[int]:
  if every_minutes is None:
    return []
  kept: list[Saved] = []
  for each in ordered:
    if not kept or each.time - kept[-1].time >= 60 * every_minutes:
      kept.append(each)
  return [each.step for each in kept]
