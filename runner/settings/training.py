r"""Settings of training: checkpoints, warm starts, early stopping, NaN.

Experiments return them from the methods of the same names:

```python
def warm_start(self):
  return fdl.Config(
    training.WarmStart,
    checkpoint="gs://bucket/runs/base",
    patterns=((r"params/head/.*", None),),
  )
```
"""

from collections.abc import Iterable
import dataclasses
import enum
import math
import re
from typing import TypeAlias

from paxon.sharding import checks

# A regular expression over whole names of the model's variables, and a template
# of the source's name (`\1`, `\g<word>`), which may end with an index or slice
# of its first axis (`[0]`, `[1::2]`); None keeps the initial value.
Pattern: TypeAlias = tuple[str, str | None]


class Goal(enum.Enum):
  """Whether smaller or larger values of a metric are better."""

  MIN = "min"
  MAX = "max"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
  """Which checkpoints of a run are kept; all others are deleted.

  A checkpoint is kept if any rule applies.

  Attributes:
    newest: Number of newest checkpoints to keep; None keeps all.
    every_minutes: Also keeps one checkpoint per interval, forever: the first,
      then each saved at least this long after the last one kept by this rule.
    best: Number of best checkpoints by `metric` to keep. Only checkpoints whose
      step was evaluated count; NaN never does.
    metric: `split/name`, such as `validation/bits_per_byte`.
    goal: Whether small or large values are better.
  """

  newest: int | None = 3
  every_minutes: float | None = None
  best: int = 0
  metric: str | None = None
  goal: Goal = Goal.MIN

  def __post_init__(self) -> None:
    checks.check_positive(self, "newest", "every_minutes")
    checks.check_non_negative(self, "best")
    if (self.best > 0) != (self.metric is not None):
      raise ValueError(
        "Retention.best and Retention.metric must be set together, got"
        f" best={self.best} and metric={self.metric!r}."
      )
    if self.metric is not None:
      _check_metric(self, self.metric)

  @property
  def split(self) -> str | None:
    """The split of `metric`."""
    return None if self.metric is None else self.metric.partition("/")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
  """Initial values from another run's checkpoint.

  Used only if the run has no checkpoint of its own. Every variable is read from
  the source under its own name, or the name given by `patterns`; shapes must be
  equal, except for `repeated_axes`.

  Attributes:
    checkpoint: Path of a run, of its checkpoints, or of one checkpoint.
    step: Step of the checkpoint; None for the newest.
    patterns: Ordered pairs of a regular expression and a template; the first
      expression that matches a whole name of this model gives the source's
      name. A template of None keeps the initial value. At the end of a
      template, `[1::2]` takes every second layer of a stack, `[0]` one layer.
    may_be_missing: Regular expressions of names that keep their initial values
      if the source does not have them.
    averaged: Whether to read the source's averaged parameters (EMA).
    cast: Whether floating-point values may change dtype.
    training_state: Whether to restore the step, the optimizer state and
      averaged parameters too, so that schedules continue. State of a variable
      follows the variable's pattern. Data starts at the beginning.
    repeated_axes: Logical axes that arrays of the source may lack; their
      entries are copies. `("experts",)` starts a mixture of experts from a
      dense model (sparse upcycling, https://arxiv.org/abs/2212.05055).
    repeat_noise: Standard deviation of normal noise in the copies of variables,
      independent for each entry, divided by the root mean square of the source.
      0 makes equal copies.
    repeat_seed: Seed of the noise.
    others: More sources, for tasks with several models. A variable that one of
      their patterns matches is read from that source alone.
  """

  checkpoint: str
  step: int | None = None
  patterns: tuple[Pattern, ...] = ()
  may_be_missing: tuple[str, ...] = ()
  averaged: bool = False
  cast: bool = False
  training_state: bool = False
  repeated_axes: tuple[str, ...] = ()
  repeat_noise: float = 0.0
  repeat_seed: int = 0
  others: tuple["WarmStart", ...] = ()

  def __post_init__(self) -> None:
    for index, other in enumerate(self.others):
      if not other.patterns or other.training_state or other.others:
        raise ValueError(
          f"WarmStart.others[{index}] must have patterns, and neither"
          " training_state nor others."
        )
    if not self.checkpoint.strip():
      raise ValueError(
        "WarmStart.checkpoint is empty; set the path of a run or a checkpoint."
      )
    checks.check_non_negative(self, "step")
    check_patterns(self.patterns, field="WarmStart.patterns")
    for index, expression in enumerate(self.may_be_missing):
      compile_expression(expression, field=f"WarmStart.may_be_missing[{index}]")
    checks.check_non_negative(self, "repeat_noise", "repeat_seed")
    if self.repeat_noise and not self.repeated_axes:
      raise ValueError(
        f"WarmStart.repeat_noise is {self.repeat_noise}, but repeated_axes is"
        ' empty; set the axes of the copies, such as ("experts",).'
      )
    if self.averaged and self.training_state:
      raise ValueError(
        "WarmStart.averaged and WarmStart.training_state are both set, but the"
        " optimizer state belongs to parameters that are not averaged; set one"
        " of them."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
  """When training ends before its last step.

  Attributes:
    metric: `split/name`, such as `validation/bits_per_byte`.
    goal: Whether small or large values are better.
    patience: Ends training after this many consecutive evaluations without
      improvement over the best. NaN is no improvement. None waits for `target`.
    min_delta: Minimum change that counts as an improvement.
    target: Ends training at the first evaluation that reaches this value.
  """

  metric: str = "validation/bits_per_byte"
  goal: Goal = Goal.MIN
  patience: int | None = 3
  min_delta: float = 0.0
  target: float | None = None

  def __post_init__(self) -> None:
    _check_metric(self, self.metric)
    checks.check_positive(self, "patience")
    checks.check_non_negative(self, "min_delta")
    if self.patience is None and self.target is None:
      raise ValueError(
        "EarlyStopping.patience and EarlyStopping.target are both None, so"
        " training would never end early; set one of them."
      )
    if self.target is not None and math.isnan(self.target):
      raise ValueError("EarlyStopping.target must be a number, got nan.")

  @property
  def split(self) -> str:
    """The split of `metric`."""
    return self.metric.partition("/")[0]


class NonFinitePolicy(enum.Enum):
  """Policies for a value that is not finite."""

  STOP = "stop"
  ROLL_BACK = "roll_back"
  IGNORE = "ignore"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite:
  """Policy for a loss, gradient or state that is not finite.

  No such state is saved, whatever the policy, unless it is `IGNORE`. With
  `Learner.skip` the update of such a step is skipped first.

  Attributes:
    policy: `STOP` ends the run with an error that names the step, the value
      and the data; `ROLL_BACK` restores the newest checkpoint and continues
      with the data after the batch; `IGNORE` trains on.
    limit: Largest number of roll-backs of a process, and of skipped updates in
      sequence (`Learner.skip`); the next one ends the run.
  """

  policy: NonFinitePolicy = NonFinitePolicy.STOP
  limit: int = 10

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "limit")


class PatternError(ValueError):
  """A pattern that is not valid, or has no effect."""


def check_patterns(patterns: Iterable[object], *, field: str) -> None:
  """Checks the syntax of patterns, which are set in `field`.

  Raises:
    PatternError: An expression is not valid, or a template refers to a group
      that its expression does not have.
  """
  for index, pattern in enumerate(patterns):
    where = f"{field}[{index}]"
    match pattern:
      case (str(expression), str() | None as template):
        pass
      case _:
        raise PatternError(
          f"{where} must be a pair of a regular expression and a template or"
          f" None, got {pattern!r}."
        )
    compiled = compile_expression(expression, field=where)
    if template is None:
      continue
    if not template:
      raise PatternError(
        f"{where} has an empty template; set the source's name, or None to"
        " keep initial values."
      )
    try:
      # Parses the template even though nothing matches.
      compiled.sub(template, "")
    except (re.error, IndexError) as error:
      raise PatternError(
        f"{where}: the template {template!r} does not fit the expression"
        f" {expression!r} with {compiled.groups} groups: {error}."
      ) from error


def compile_expression(expression: str, *, field: str) -> re.Pattern[str]:
  """Compiles a regular expression, which is set in `field`.

  Raises:
    PatternError: The expression is not valid.
  """
  try:
    return re.compile(expression)
  except re.error as error:
    raise PatternError(
      f"{field} is not a regular expression: {expression!r} ({error})."
    ) from error


def _check_metric(owner: object, metric: str) -> None:
  if not all(metric.partition("/")):
    raise ValueError(
      f"{type(owner).__name__}.metric must be split/name, such as"
      f" validation/loss, got {metric!r}."
    )
