"""Tests for the evaluation that follows a run's checkpoints."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, stored_checkpoint
from paxon.runner.evaluation import evaluate
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import restore as restore_lib
from paxon.runner.session import run_files, stop_signals
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing

KNOBS = {"num_train_steps": 6, "checkpoint_every_steps": 2}


@pytest.fixture(scope="module")
def session():
  return session_lib.open_session(testing.make(**KNOBS)[0])


@pytest.fixture(scope="module")
def state(session):
  return session.initial_state()


@pytest.fixture(name="run_dir")
def _run_dir(tmp_path):
  return epath.Path(tmp_path)


class _Checkpoints:
  """Checkpoints of untrained states, at steps that are chosen."""

  def __init__(self, run_dir, session, state):
    self._run_dir, self._session, self._state = run_dir, session, state

  def save(self, *steps):
    folder = self._run_dir / "checkpoints"
    with checkpointer.Checkpointer(folder) as checkpoints:
      for step in steps:
        state = dataclasses.replace(self._state, step=self._state.step + step)
        checkpoints.save(step, state, specs=self._session.state_specs, data={})

  def path(self, step):
    return self._run_dir / "checkpoints" / str(step)

  def finish(self, step):
    run_files.mark_finished(self._run_dir, step=step, job=self._session.job)


@pytest.fixture(name="checkpoints")
def _checkpoints(run_dir, session, state):
  return _Checkpoints(run_dir, session, state)


def _follow(session, run_dir, *events):
  """Runs a follower; each pause takes the next event, the last one signals."""
  stop = stop_signals.StopSignals()
  left = list(events)

  def sleep(seconds):
    if left:
      left.pop(0)()
    else:
      stop.requested = "SIGTERM"

  evaluate.Follower(
    session=session, run_dir=run_dir, stop=stop, pause_seconds=0.1, sleep=sleep
  ).run()
  assert not left


def _figures(run_dir):
  return metrics_file.read(run_dir / "eval" / "metrics.jsonl")


@pytest.mark.nightly
def test_waits_and_takes_the_newest_first_until_the_run_is_finished(
  session, run_dir, checkpoints, capsys
):
  _follow(
    session,
    run_dir,
    lambda: None,
    lambda: checkpoints.save(2, 4),
    lambda: (checkpoints.save(6), checkpoints.finish(6)),
  )
  assert [record.step for record in _figures(run_dir)] == [4, 2, 6]
  out = capsys.readouterr().out
  assert out.count("waiting for a checkpoint in ") == 1
  assert "step 4: validation: bits_per_byte" in out
  assert out.endswith("the run is finished; checkpoints evaluated: 3\n")
  # Once more: nothing is left, and nothing is made again.
  _follow(session, run_dir)
  assert "step 4" not in capsys.readouterr().out


def test_a_damaged_and_a_deleted_checkpoint_are_skipped(
  session, run_dir, checkpoints, capsys, monkeypatch
):
  checkpoints.save(2, 4, 6)
  checkpoints.finish(6)
  (checkpoints.path(6) / "metadata" / "metadata").write_text("")
  restore = checkpointer.Checkpointer.restore

  def deleting(self, step, **kwargs):
    if step == 4:
      checkpoints.path(4).rmtree()
    return restore(self, step, **kwargs)

  monkeypatch.setattr(checkpointer.Checkpointer, "restore", deleting)
  _follow(session, run_dir)
  out = capsys.readouterr().out.splitlines()
  assert out[0].startswith("skipping step 6: The checkpoint ")
  assert out[1] == "skipping step 4: the run has deleted its checkpoint"
  assert [record.step for record in _figures(run_dir)] == [2]


def _delete_while_read(checkpoints, monkeypatch, *, step, saved=()):
  """The first reader of a step finds that the run has deleted it."""
  verify = checkpointer.Checkpointer.verify

  def deleting(self, wanted):
    if wanted == step and checkpoints.path(step).exists():
      checkpoints.save(*saved)
      checkpoints.path(step).rmtree()
    return verify(self, wanted)

  monkeypatch.setattr(checkpointer.Checkpointer, "verify", deleting)


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_damaged(
  session, run_dir, checkpoints, capsys, monkeypatch
):
  folder = run_dir / "checkpoints"
  checkpoints.save(2)
  _delete_while_read(checkpoints, monkeypatch, step=2, saved=(4,))
  _, state = restore_lib.read_for_evaluation(session, folder)
  assert int(state.step) == 4
  assert "damaged" not in capsys.readouterr().err
  # There is none while the run saves another.
  monkeypatch.setattr(stored_checkpoint, "_WAIT_SECONDS", 0.1)
  _delete_while_read(checkpoints, monkeypatch, step=4)
  with pytest.raises(user_error.UserError, match=r"has no other yet; try ag"):
    restore_lib.read_for_evaluation(session, folder)
  # It comes a little later.
  monkeypatch.setattr(stored_checkpoint, "_WAIT_SECONDS", 60.0)
  (folder / "6.orbax-checkpoint-tmp").mkdir()
  threading.Timer(0.5, checkpoints.save, [6]).start()
  _, state = restore_lib.read_for_evaluation(session, folder)
  assert int(state.step) == 6
  checkpoints.save(2, 4)
  _delete_while_read(checkpoints, monkeypatch, step=2)
  with pytest.raises(user_error.UserError, match=r"deleted its .* of step 2 w"):
    restore_lib.read_for_evaluation(session, folder, step=2)


def test_evaluation_uses_the_checkpoint_before_a_damaged_one(
  session, run_dir, checkpoints, capsys
):
  checkpoints.save(2, 4)
  (checkpoints.path(4) / "metadata" / "metadata").write_text("[" * 20_000)
  _, state = restore_lib.read_for_evaluation(session, run_dir / "checkpoints")
  assert int(state.step) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "4 is damaged: metadata/metadata" in line
  assert line.endswith("using the one of step 2 instead")


class _Listed(checkpointer.Checkpointer):
  """A folder that this process has listed before a checkpoint was there."""

  def __init__(self, tree):
    self._tree = tree

  def steps(self):
    return []

  def refresh(self):
    pass

  def restore(self, step, *, specs, shardings, stored_dtypes=False):
    return checkpointer.Restored(tree=self._tree, data={}, step=step)


def test_the_first_process_decides_which_checkpoint_is_newest(
  session, state, run_dir, monkeypatch
):
  checkpoints = _Listed(state)
  with pytest.raises(user_error.UserError, match="There is no checkpoint in"):
    restore_lib.restore_for_evaluation(session, checkpoints, run_dir)
  monkeypatch.setattr(restore_lib.agreement, "from_first", lambda make: 8)
  found = restore_lib.restore_for_evaluation(session, checkpoints, run_dir)
  assert found is state


def test_an_unfinished_checkpoint_is_no_checkpoint_yet(
  session, run_dir, checkpoints
):
  checkpoints.save(2, 4)
  # The name of one that is still being written, on a local disk.
  path = checkpoints.path(4)
  path.rename(path.parent / "4.orbax-checkpoint-tmp")
  _follow(session, run_dir)
  assert [record.step for record in _figures(run_dir)] == [2]


def test_a_checkpoint_that_comes_again_is_evaluated(
  session, run_dir, checkpoints, capsys
):
  checkpoints.save(2)
  metadata = checkpoints.path(2) / "metadata" / "metadata"
  metadata.write_text("")

  def again():
    checkpoints.path(2).rmtree()
    # Files' times are in seconds.
    time.sleep(1.1)
    checkpoints.save(2)
    checkpoints.finish(2)

  _follow(session, run_dir, again)
  assert [record.step for record in _figures(run_dir)] == [2]
  assert "skipping step 2" in capsys.readouterr().out


def test_a_run_that_ended_early_is_finished_and_one_made_longer_is_not(
  session, run_dir, checkpoints, capsys
):
  checkpoints.save(2)
  checkpoints.finish(2)
  _follow(session, run_dir)
  assert "checkpoints evaluated: 1\n" in capsys.readouterr().out
  longer = session_lib.open_session(
    testing.make(**KNOBS | {"num_train_steps": 8})[0]
  )
  _follow(longer, run_dir)
  assert "stopped by SIGTERM; the same command res" in capsys.readouterr().out


def test_rejects_another_model(run_dir, checkpoints):
  checkpoints.save(2)
  other = session_lib.open_session(testing.make(embed_dim=32)[0])
  with pytest.raises(user_error.UserError, match=r"has shape .*16\) in the ch"):
    _follow(other, run_dir)


@pytest.mark.nightly
def test_a_trainer_and_a_follower_as_two_processes(tmp_path, capsys):
  folder = epath.Path(tmp_path)
  knobs = KNOBS | {"delay": 0.3, "eval_every_steps": 2}
  trainer = subprocess.Popen(
    [
      *(sys.executable, "-W", "error", "-m", testing.__name__),
      os.fspath(tmp_path),
      *(f"{name}={value}" for name, value in knobs.items()),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
  )
  try:
    assert evaluate.run(testing.make(**knobs)[0], folder, continuous=True) == 0
    output, _ = trainer.communicate()
  finally:
    trainer.kill()
  assert trainer.returncode == 0, output
  assert "the run is finished" in capsys.readouterr().out
  followed = {record.step: record.values for record in _figures(folder)}
  own = {
    record.step: record.values
    for record in metrics_file.read(folder / "metrics.jsonl")
    if record.split == "validation"
  }
  assert followed.keys() == own.keys() == {2, 4, 6}
  for step, values in own.items():
    assert followed[step]["loss"] == pytest.approx(values["loss"], rel=1e-5)
  assert (folder / "eval" / "events" / "validation").is_dir()


def test_a_signal_ends_it(session, run_dir, capsys):
  with stop_signals.StopSignals(when="after this batch") as stop:
    follower = evaluate.Follower(
      session=session,
      run_dir=run_dir,
      stop=stop,
      sleep=lambda seconds: signal.raise_signal(signal.SIGTERM),
    )
    assert not follower.run()
  waiting, noted, ended = capsys.readouterr().out.splitlines()
  assert waiting.startswith("waiting for a checkpoint in ")
  assert noted.startswith("SIGTERM: stopping after this batch; send it again")
  assert ended == "stopped by SIGTERM; the same command resumes"


def test_the_mark_of_a_finished_run(run_dir, session):
  assert run_files.read_finished(run_dir) is None
  run_files.mark_finished(run_dir, step=4, job=session.job)
  assert run_files.read_finished(run_dir) == run_files.FinishedMarker(
    step=4, num_train_steps=6
  )
  run_files.clear_finished(run_dir)
  run_files.clear_finished(run_dir)
  assert run_files.read_finished(run_dir) is None
