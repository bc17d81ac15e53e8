"""Tests for the rule that ends a training early."""

import math

import pytest

from paxon.runner import user_error
from paxon.runner.evaluation import evaluation
from paxon.runner.settings import training

MAX = training.Goal.MAX


def _stop_step(values, **fields):
  """Returns the first step at which a run of these values ends."""
  rule = training.EarlyStopping(**fields)
  for count in range(1, len(values) + 1):
    made = enumerate(map(float, values[:count]), start=1)
    if evaluation.reason_to_stop(rule, dict(made)) is not None:
      return count
  return None


@pytest.mark.parametrize(
  ("values", "fields", "step"),
  [
    pytest.param([3, 2, 1, 0], {"patience": 1}, None, id="better-each-time"),
    pytest.param([3, 2, 2, 1], {"patience": 1}, 3, id="equal-is-no-better"),
    pytest.param([3, 2, 2.5, 1, 4, 4], {"patience": 2}, 6, id="counts-anew"),
    pytest.param([1, 2, 3, 3, 2], {"patience": 2, "goal": MAX}, 5, id="max"),
    pytest.param([1, 2, 3], {"patience": 2}, 3, id="min-of-rising"),
    pytest.param([3, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3, id="d"),
    pytest.param(
      [3, 2.9, 2.4], {"patience": 2, "min_delta": 0.5}, None, id="e"
    ),
    pytest.param([math.nan] * 2, {"patience": 2}, 2, id="nan"),
    pytest.param([math.nan, 9, 8], {"patience": 2}, None, id="after-nan"),
    pytest.param(
      [math.inf, 5], {"patience": 2, "min_delta": 1.0}, None, id="i"
    ),
    pytest.param([3, 2], {"patience": None, "target": 2.0}, 2, id="target"),
    pytest.param([3, 4, 5], {"patience": None, "target": 2.0}, None, id="far"),
    pytest.param([3, 4, 1], {"patience": 1, "target": 2.0}, 2, id="no-hope"),
    pytest.param(
      [1, math.nan, 2],
      {"patience": None, "target": 2.0, "goal": MAX},
      3,
      id="t",
    ),
  ],
)
def test_stops_where_the_definition_stops(values, fields, step):
  assert _stop_step(values, **fields) == step


def test_the_order_in_which_evaluations_were_recorded_does_not_matter():
  rule = training.EarlyStopping(patience=2)
  values = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.6}
  reason = evaluation.reason_to_stop(rule, dict(reversed(values.items())))
  assert reason == evaluation.reason_to_stop(rule, values)
  assert "improved for 2 evaluations; best 2 at step 20" in reason


def test_the_best_of_a_maximum_keeps_its_sign():
  rule = training.EarlyStopping(patience=1, goal=MAX)
  assert "best 0.5 at step 1" in evaluation.reason_to_stop(
    rule, {1: 0.5, 2: 0.25}
  )


def test_value_reads_the_metric_of_its_split():
  rule = training.EarlyStopping(metric="a/loss")
  assert (
    evaluation.early_stopping_value(
      rule, {"a": {"loss": 1.0}, "b": {"loss": 2.0}}
    )
    == 1.0
  )


@pytest.mark.parametrize(
  ("metric", "hint"),
  [
    ("a/lss", r"did you mean 'a/loss'"),
    ("b/loss", r"did you mean 'a/loss'"),
    ("zzz/qqq", r"known: a/accuracy, a/loss"),
  ],
)
def test_a_metric_that_is_not_measured_names_the_close_ones(metric, hint):
  rule = training.EarlyStopping(metric=metric)
  with pytest.raises(
    user_error.UserError, match=rf"metric is '{metric}', which .*{hint}"
  ):
    evaluation.early_stopping_value(rule, {"a": {"loss": 1.0, "accuracy": 0.5}})
