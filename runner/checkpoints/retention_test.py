"""Tests for retention."""

import json
import math

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, golden, retention
from paxon.runner.settings import training

MINUTE = 60.0


def _kept(rule, times, values=None):
  saved = [retention.Saved(step=s, time=t) for s, t in times.items()]
  reasons = retention.reasons_to_keep(rule, saved, value=(values or {}).get)
  assert list(reasons) == sorted(times)
  return [step for step, why in reasons.items() if why]


def _every(minutes, *steps):
  """Times of steps that were saved so many minutes apart."""
  return {s: 1000.0 + i * minutes * MINUTE for i, s in enumerate(steps)}


def test_the_default_is_the_three_newest():
  assert _kept(training.Retention(), _every(1, 1, 5, 10, 20)) == [5, 10, 20]


def test_none_keeps_all():
  rule = training.Retention(newest=None)
  assert _kept(rule, _every(1, *range(50))) == list(range(50))


@pytest.mark.parametrize(
  ("goal", "kept"),
  [(training.Goal.MIN, [3, 5, 6]), (training.Goal.MAX, [1, 4, 6])],
)
def test_the_best_are_kept(goal, kept):
  rule = training.Retention(
    newest=1, best=2, metric="validation/loss", goal=goal
  )
  # Step 2 was not evaluated; step 6 is the newest, not evaluated yet.
  values = {1: 9.0, 2: None, 3: 1.0, 4: 8.0, 5: 1.0}
  assert _kept(rule, _every(1, 1, 2, 3, 4, 5, 6), values) == kept


def test_of_equal_ones_the_older_and_never_nan():
  rule = training.Retention(newest=1, best=1, metric="validation/loss")
  values = {1: math.nan, 2: 1.0, 3: 1.0}
  assert _kept(rule, _every(1, 1, 2, 3, 4), values) == [2, 4]
  assert _kept(rule, _every(1, 1, 2), {1: math.nan}) == [2]


def test_one_per_interval_is_kept_for_ever_however_often_it_is_decided():
  rule = training.Retention(newest=2, every_minutes=10.0)
  times = _every(4, *range(1, 13))
  assert _kept(rule, times) == [1, 4, 7, 10, 11, 12]
  # Decided at each save, from what the decisions before have left.
  left = {}
  for step, time in times.items():
    left[step] = time
    left = {s: left[s] for s in _kept(rule, left)}
  assert list(left) == [1, 4, 7, 10, 11, 12]


def test_reasons_are_named():
  rule = training.Retention(
    newest=1, every_minutes=1.5, best=1, metric="validation/loss"
  )
  saved = [retention.Saved(step=s, time=float(s)) for s in (1, 2, 3)]
  assert retention.reasons_to_keep(rule, saved, value={2: 0.1}.get) == {
    1: ["one every 1.5 minutes"],
    2: ["best validation/loss"],
    3: ["newest"],
  }


def test_the_metric_of_an_evaluation():
  rule = training.Retention(best=1, metric="validation/bits_per_byte")
  assert rule.split == "validation"
  assert (
    retention.metric_value(rule, {"validation": {"bits_per_byte": 2.5}}) == 2.5
  )
  assert retention.metric_value(rule, {}) is None
  assert (
    retention.metric_value(training.Retention(), {"validation": {"loss": 1.0}})
    is None
  )
  with pytest.raises(
    user_error.UserError, match=r"'validation/bits_per_byte', which the evalu"
  ):
    retention.metric_value(rule, {"validation": {"bits_per_bytes": 2.5}})


def _names(folder):
  return sorted(int(path.name) for path in folder.iterdir())


def _save(checkpoints, step):
  checkpoints.save(step, golden.values(), specs=golden.specs(), data={})
  checkpoints.wait()


def test_deleted_after_a_later_save_and_across_restarts(tmp_path):
  folder = epath.Path(tmp_path)
  rule = training.Retention(newest=1, best=1, metric="validation/loss")
  values = {}
  for step, value in ((1, 5.0), (2, 3.0), (3, 4.0)):
    # Each in a new one, as after a restart.
    with checkpointer.Checkpointer(folder, retention=rule) as checkpoints:
      checkpoints.rank_by(values.get)
      _save(checkpoints, step)
    # Evaluated after the save.
    values[step] = value
  assert _names(tmp_path) == [2, 3]
  with checkpointer.Checkpointer(folder, retention=rule) as checkpoints:
    checkpoints.rank_by(values.get)
    _save(checkpoints, 4)
  assert _names(tmp_path) == [2, 4]


def test_times_are_stored_in_the_checkpoint(tmp_path, monkeypatch):
  folder = epath.Path(tmp_path)
  rule = training.Retention(newest=1, every_minutes=10.0)
  for step in range(1, 7):
    now = 1e9 + 4 * MINUTE * step
    monkeypatch.setattr(checkpointer.time, "time", lambda now=now: now)
    with checkpointer.Checkpointer(folder, retention=rule) as checkpoints:
      _save(checkpoints, step)
    stored = folder / str(step) / "metadata" / "metadata"
    assert json.loads(stored.read_text())["time"] == now
  monkeypatch.undo()
  assert _names(tmp_path) == [1, 4, 6]


def test_a_damaged_one_does_not_count(tmp_path):
  folder = epath.Path(tmp_path)
  rule = training.Retention(newest=1)
  with checkpointer.Checkpointer(folder) as checkpoints:
    for step in (1, 5):
      _save(checkpoints, step)
  with checkpointer.Checkpointer(folder, retention=rule) as checkpoints:
    checkpoints.skip(5)
    _save(checkpoints, 2)
    assert checkpoints.steps() == [2]
  # The good one is not deleted in its favor, and it is not deleted either.
  assert _names(tmp_path) == [2, 5]
