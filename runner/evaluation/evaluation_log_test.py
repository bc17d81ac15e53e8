"""Tests for the record of a run's evaluations."""

import pytest

from paxon.runner import user_error
from paxon.runner.evaluation import evaluation
from paxon.runner.monitoring import metrics_file
from paxon.runner.settings import training

RULE = training.EarlyStopping(metric="a/loss", patience=2)


def _records(*lines):
  return [
    metrics_file.Record(step=step, split=split, values={"loss": float(loss)})
    for step, split, loss in lines
  ]


def test_an_evaluation_counts_when_all_its_splits_are_there():
  records = _records(
    (2, "a", 1), (2, "b", 2), (4, "a", 3), (0, "baseline/x", 0)
  )
  log = evaluation.EvaluationLog(records, splits=["a", "b"], until=4)
  assert log.at(2) == {"a": {"loss": 1.0}, "b": {"loss": 2.0}}
  assert log.at(4) is None
  assert log.at(0) is None
  assert not log.is_from_this_process(2)
  log.add(4, {"a": {"loss": 3.0}, "b": {"loss": 4.0}})
  assert log.at(4) == {"a": {"loss": 3.0}, "b": {"loss": 4.0}}
  assert log.is_from_this_process(4)


def test_without_splits_every_evaluation_is_complete():
  assert evaluation.EvaluationLog(splits=[]).at(3) == {}


def test_lines_of_steps_that_are_made_again_are_left_out():
  records = _records((2, "a", 1), (4, "a", 3))
  log = evaluation.EvaluationLog(records, splits=["a"], until=3)
  assert log.at(2) is not None
  assert log.at(4) is None


def test_going_on_gives_the_verdict_of_a_run_that_was_not_interrupted():
  lines = [(2, "a", 3), (4, "a", 1), (6, "a", 2), (8, "a", 2)]
  whole = evaluation.EvaluationLog(splits=["a"])
  verdicts = []
  for step, _, loss in lines:
    whole.add(step, {"a": {"loss": float(loss)}})
    verdicts.append(whole.reason_to_stop(RULE, every_steps=2))
  assert [verdict is None for verdict in verdicts] == [True, True, True, False]
  for cut in range(len(lines)):
    log = evaluation.EvaluationLog(
      _records(*lines), splits=["a"], until=lines[cut][0]
    )
    assert log.reason_to_stop(RULE, every_steps=2) == verdicts[cut]


def test_evaluations_between_the_regular_ones_do_not_count():
  records = _records((2, "a", 1), (3, "a", 2), (4, "a", 2), (5, "a", 2))
  log = evaluation.EvaluationLog(records, splits=["a"], until=5)
  assert log.reason_to_stop(RULE, every_steps=2) is None
  assert log.reason_to_stop(RULE, every_steps=1) is not None


def test_a_missing_metric_is_an_error():
  log = evaluation.EvaluationLog(_records((2, "a", 1)), splits=["a"], until=2)
  rule = training.EarlyStopping(metric="a/los")
  with pytest.raises(user_error.UserError, match=r"did you mean 'a/loss'"):
    log.reason_to_stop(rule, every_steps=2)
