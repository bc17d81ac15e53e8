"""Tests that numeric fields of learners reject NaN and infinity."""

from collections.abc import Sequence
import dataclasses
import math

import pytest

from paxon.learners import learner, parameter_average, schedules, skipping
from paxon.learners.optimizers import adafactor, adamw, lion, sgd

RATE = schedules.Constant(value=0.1)
PARTS = (
  RATE,
  schedules.WarmupCosine(peak=0.1, warmup_steps=1, total_steps=4),
  schedules.WarmupLinear(peak=0.1, warmup_steps=1, total_steps=4),
  schedules.WarmupRsqrt(peak=0.1, warmup_steps=1),
  schedules.WarmupExponential(
    peak=0.1, warmup_steps=1, total_steps=4, end=0.01
  ),
  schedules.WarmupStableDecay(
    peak=0.1, warmup_steps=1, decay_steps=1, total_steps=4
  ),
  schedules.PiecewiseConstant(boundaries=(2,), values=(0.1, 0.2)),
  schedules.PiecewiseLinear(steps=(0, 2), values=(0.1, 0.2)),
  adafactor.Adafactor(schedule=RATE),
  adamw.AdamW(schedule=RATE),
  lion.Lion(schedule=RATE),
  sgd.Sgd(schedule=RATE),
  learner.Learner(optimizer=sgd.Sgd(schedule=RATE)),
  skipping.SkipUpdates(),
  parameter_average.ParameterAverage(decay=0.5),
)

_NUMBERS = (str(float), str(float | None), str(Sequence[float]))


def _cases():
  for part in PARTS:
    for field in dataclasses.fields(part):
      if str(field.type) in _NUMBERS:
        for bad in (math.nan, math.inf, -math.inf):
          name = f"{type(part).__name__}.{field.name}-{bad}"
          yield pytest.param(part, field.name, bad, id=name)


@pytest.mark.parametrize(("part", "field", "bad"), list(_cases()))
def test_numeric_fields_must_be_finite(part, field, bad):
  value = getattr(part, field)
  new = (*value[:-1], bad) if isinstance(value, tuple) else bad
  with pytest.raises(
    ValueError, match=rf"{type(part).__name__}\.\w+ must .*{bad}"
  ):
    dataclasses.replace(part, **{field: new})


def test_every_class_has_numeric_fields():
  assert len({case.id.partition(".")[0] for case in _cases()}) == len(PARTS)
