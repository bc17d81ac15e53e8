r"""Warm starts: a run that begins with values of another run's checkpoint.

```python
def warm_start(self):  # A method of an experiment.
  return fdl.Config(
    warm_start.WarmStart,
    checkpoint="gs://bucket/runs/base",
    patterns=((r"params/head/.*", None),),
  )
```

It is for the beginning of a run only: where the run's own folder has a
checkpoint, that one is used.
"""

import dataclasses

from paxon.runner.checkpoints import name_patterns


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
  """Where initial values come from, and which.

  Every variable of the model is read from the source under its own name, or
  under the one that `patterns` give. Shapes must be equal.

  Attributes:
    checkpoint: The folder of a run, of its checkpoints, or of one of them.
    step: Which checkpoint; `None` for the newest when the run begins.
    patterns: Ordered pairs: a regular expression that matches a whole name of
      this model, and a template of the source's name, or `None` to leave the
      initial value. The first that matches holds.
    may_be_missing: Regular expressions of whole names of this model that keep
      their initial values where the source does not have them.
    averaged: Reads what the source evaluates with, the average of its
      parameters, instead of the parameters.
    cast: Whether floating-point values may be stored in another dtype than
      the source's.
    training_state: Whether the step, the optimizer's state and the average of
      parameters are read too, so that schedules go on where the source's were.
      What belongs to a variable goes the variable's way; what belongs to none
      keeps its name. The data begins at its beginning in any case.
  """

  checkpoint: str
  step: int | None = None
  patterns: tuple[tuple[str, str | None], ...] = ()
  may_be_missing: tuple[str, ...] = ()
  averaged: bool = False
  cast: bool = False
  training_state: bool = False

  def __post_init__(self) -> None:
    if not self.checkpoint.strip():
      raise ValueError(
        "WarmStart.checkpoint is empty; give the folder of a run or of a"
        " checkpoint."
      )
    if self.step is not None and self.step < 0:
      raise ValueError(f"WarmStart.step must not be negative, got {self.step}.")
    name_patterns.check(self.patterns, field="WarmStart.patterns")
    for index, expression in enumerate(self.may_be_missing):
      name_patterns.compile_expression(
        expression, place=f"WarmStart.may_be_missing[{index}]"
      )
    if self.averaged and self.training_state:
      raise ValueError(
        "WarmStart.averaged and WarmStart.training_state are both set, but an"
        " optimizer's state belongs to parameters that are not averaged; set"
        " one of them."
      )
