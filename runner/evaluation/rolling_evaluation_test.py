"""Tests for evaluations that go on where the one before ended."""

import dataclasses
import functools
import itertools
import json
import operator
import shutil

from etils import epath
import jax
import pytest

from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import evaluate, evaluation
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import prefetch, restore, stop_signals
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train

_BATCHES = 2


def _make(**knobs):
  knobs = {
    "checkpoint_every_steps": 4,
    "eval_every_steps": 4,
    "rolling_batches": _BATCHES,
    "max_new_tokens": 0,
    "num_layers": 1,
  } | knobs
  return testing.make(**knobs)


def _states(number):
  """The input's states before each of some evaluations."""
  source = _make()[0].eval_inputs["rolling"]
  states = []
  for _ in range(number):
    states.append(source.get_state())
    for _ in range(_BATCHES):
      prefetch.next_batch(source, rolling=True)
  return states


def _open():
  job, _ = _make(num_train_steps=12)
  return session_lib.open_session(job, devices=jax.devices()[:1])


def _saved(folder, step):
  """What a checkpoint says of the data."""
  path = folder / run_dirs.CHECKPOINTS / str(step) / "data" / "metadata"
  return restore.from_stored_positions(json.loads(path.read_text()))


def _records(path):
  return {
    record.step: record.values["loss"]
    for record in metrics_file.read(path)
    if record.split == "rolling"
  }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A run of 8 steps, which then was made longer."""
  path = epath.Path(tmp_path_factory.mktemp("run"))
  for num_train_steps in (8, 12):
    train.run(*_make(num_train_steps=num_train_steps), path)
  return path


@pytest.mark.nightly
def test_every_checkpoint_has_the_position_before_its_evaluation(folder):
  # The evaluation at step 8 is recorded, so the second run has skipped it.
  for step, expected in zip((4, 8, 12), _states(3), strict=True):
    _, rolling = _saved(folder, step)
    assert rolling == {"rolling": expected}
  # The input has ended and begun again on the way.
  source = _make()[0].eval_inputs["rolling"]
  assert _BATCHES < len(list(source)) < 3 * _BATCHES


def test_evaluating_a_checkpoint_reads_the_batches_of_its_evaluation(folder):
  job, _ = _make(num_train_steps=12)
  closed = []
  for name, source in ({"train": job.train_input} | job.eval_inputs).items():
    source.close = functools.partial(closed.append, name)
  assert evaluate.run(job, folder) == 0
  assert closed == ["train", *job.eval_inputs]
  trained = _records(folder / run_dirs.METRICS)
  assert trained.keys() == {4, 8, 12}
  found = _records(folder / run_dirs.EVAL / run_dirs.METRICS)
  assert found == {12: pytest.approx(trained[12], rel=1e-6)}


def test_an_evaluation_takes_every_batch_of_a_split_each_time():
  job, _ = _make(num_train_steps=12)
  whole = job.eval_inputs["validation"]
  weights = [float(batch["weights"].sum()) for batch in whole]
  assert len(weights) > 1
  each = dataclasses.replace(
    whole, eval_loop_num_batches=1, reset_for_eval=False
  )
  job = dataclasses.replace(job, eval_inputs={"whole": whole, "each": each})
  session = session_lib.open_session(job, devices=jax.devices()[:1])
  evaluator, state = evaluation.Evaluator(session), session.initial_state()
  results = [evaluator.evaluate(state) for _ in weights]
  losses = [result["each"]["loss"] for result in results]
  mean = sum(map(operator.mul, losses, weights)) / sum(weights)
  assert [result["whole"]["loss"] for result in results] == pytest.approx(
    [mean] * len(weights), rel=1e-6
  )


def test_a_stopped_evaluation_is_repeated_on_the_same_batches(
  folder,
):
  session = _open()
  path = folder / run_dirs.CHECKPOINTS
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    state = restore.restore_for_evaluation(session, checkpoints, path)
  source = session.job.eval_inputs["rolling"]
  before = source.get_state()
  assert before == _states(3)[2]
  evaluator = evaluation.Evaluator(session)
  asked = itertools.count(1)
  batches = len(list(_make()[0].eval_inputs["validation"]))
  # In the middle of the second split.
  results = evaluator.evaluate(
    state, is_stopped=lambda: next(asked) == batches + 2
  )
  assert results is None
  assert source.get_state() == before
  assert evaluator.positions(12) == {"rolling": before}
  results = evaluator.evaluate(state)
  assert results is not None
  trained = _records(folder / run_dirs.METRICS)[12]
  assert results["rolling"]["loss"] == pytest.approx(trained, rel=1e-6)
  # The evaluation at a checkpoint's step is not in its position.
  assert evaluator.positions(12) == {"rolling": before}
  assert evaluator.positions(13) == {"rolling": source.get_state()}
  assert source.get_state() != before


class _Sums(evaluation.Evaluator):
  """Tells which batches it read, without a model."""

  def _evaluate_split(self, split, source, state, is_stopped, outputs):
    if source.reset_for_eval:
      return {"loss": 0.0}
    batches = (prefetch.next_batch(source, rolling=True) for _ in range(2))
    return {"loss": float(sum(b["targets"].sum() for b in batches))}


class _Once(_Sums):
  """Is asked to stop during its first evaluation."""

  def evaluate(self, state, *, is_stopped=lambda: False):
    is_stopped.__self__.requested = "SIGTERM"
    return super().evaluate(state, is_stopped=is_stopped)


@dataclasses.dataclass
class _Followed:
  """A copy of the run's checkpoints that followers evaluate."""

  path: epath.Path
  patch: pytest.MonkeyPatch

  def follow(self, kind):
    """Another process, and the figures after it."""
    self.patch.setattr(evaluation, "Evaluator", kind)
    evaluate.Follower(
      session=_open(), run_dir=self.path, stop=stop_signals.StopSignals()
    ).run()
    return _records(self.figures)

  @property
  def figures(self):
    return self.path / run_dirs.EVAL / run_dirs.METRICS


def test_a_follower_resumes_where_the_last_one_ended(
  folder, tmp_path, monkeypatch, capsys
):
  ignored = shutil.ignore_patterns(run_dirs.EVAL)
  shutil.copytree(folder, tmp_path / "run", ignore=ignored)
  followed = _Followed(epath.Path(tmp_path / "run"), monkeypatch)
  source = _make()[0].eval_inputs["rolling"]
  expected = {}
  # The newest checkpoint comes first.
  for step in (12, 8, 4):
    batches = (prefetch.next_batch(source, rolling=True) for _ in range(2))
    expected[step] = float(sum(b["targets"].sum() for b in batches))
  assert expected[12] != expected[8]
  assert followed.follow(_Once) == {12: expected[12]}
  # It ended before its figures were written: they are of the same batches.
  followed.figures.unlink()
  assert followed.follow(_Once) == {12: expected[12]}
  assert followed.follow(_Once) == {12: expected[12], 8: expected[8]}
  assert followed.follow(_Sums) == expected
  assert "warning" not in capsys.readouterr().out
  positions = followed.path / run_dirs.EVAL / run_dirs.POSITIONS
  positions.write_text("{}")
  with pytest.raises(user_error.UserError, match=r"positions\.json does not"):
    followed.follow(_Sums)


def test_a_position_of_other_data_starts_again_with_a_warning():
  inputs = _make()[0].eval_inputs
  source = inputs["rolling"]
  first = source.get_state()
  source.get_next()
  moved = source.get_state()
  lines = restore.restore_rolling_positions(
    inputs,
    {"rolling": {**moved, "data": {**moved["data"], "num_documents": 99}}},
  )
  (line,) = lines
  assert line.startswith("the evaluation of 'rolling' starts at its first")
  assert "num_documents 99" in line
  assert source.get_state() == first
  # One that is gone is nobody's; one that is new begins at the start.
  assert restore.restore_rolling_positions(inputs, {"gone": {}}) == []
  assert source.get_state() == first


def test_what_is_stored_without_rolling_inputs_is_the_training_position():
  position = {"epoch": 1}
  assert restore.to_stored_positions(position, {}) == position
  assert restore.from_stored_positions(position) == (position, {})
  stored = restore.to_stored_positions(position, {"a": {"b": 2}})
  assert restore.from_stored_positions(stored) == (position, {"a": {"b": 2}})
