"""Tests that a folder that cannot be gone on in is told in one line."""

import re

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest

from paxon.runner import user_error
from paxon.runner.evaluation import evaluate
from paxon.runner.hosts import agreement
from paxon.runner.session import session as session_lib
from paxon.runner.training import resume_checks, testing, train

SHORT = {
  "num_train_steps": 2,
  "checkpoint_every_steps": 1,
  "max_new_tokens": 0,
}


@pytest.fixture(name="folder")
def _folder(tmp_path):
  return epath.Path(tmp_path)


def _train(folder, **knobs):
  return train.run(*testing.make(**SHORT | knobs), folder)


def test_a_run_without_a_checkpoint_may_change_its_configuration(folder):
  with pytest.raises(user_error.UserError, match=r"global_batch_size \(3\)"):
    _train(folder, global_batch_size=3)
  _train(folder, global_batch_size=8)
  with pytest.raises(user_error.UserError, match=r"size was 8 and is now 16"):
    _train(folder, global_batch_size=16)


def test_whether_there_is_a_checkpoint_is_the_first_processs_word(
  folder, monkeypatch
):
  def from_first(make):
    return 8 if getattr(make, "__name__", "") == "latest_step" else make()

  def check(config, run_dir, **arguments):
    raise user_error.UserError("compared with the stored configuration")

  monkeypatch.setattr(agreement, "from_first", from_first)
  monkeypatch.setattr(resume_checks, "check", check)
  with pytest.raises(user_error.UserError, match="compared with the stored"):
    _train(folder)


def test_a_stack_that_changes_the_dtype_is_one_line():
  config = testing.TinyLm(**SHORT).job()
  config.task.model.embedding.dtype = jnp.bfloat16
  with (
    # As in programs; strict promotion would raise an error before.
    jax.numpy_dtype_promotion("standard"),
    pytest.raises(
      user_error.UserError,
      match=r"stack returns another dtype .* bfloat16.* float32.*Set the same",
    ),
  ):
    session_lib.open_session(fdl.build(config))


def _damage(folder, step):
  (folder / "checkpoints" / str(step) / "data" / "metadata").write_text("{")


@pytest.mark.nightly
def test_the_checkpoint_before_a_damaged_one_is_used(folder, capsys):
  _train(folder)
  _damage(folder, 2)
  capsys.readouterr()
  _train(folder)
  told = capsys.readouterr()
  lines = [line for line in told.err.splitlines() if "checkpoint" in line]
  assert len(lines) == 1
  assert re.search(
    r"/2 is damaged: data/metadata has 1 bytes instead of \d+; using"
    r" the one of step 1 instead$",
    lines[0],
  )
  assert "resuming from the checkpoint of step 1" in told.out
  # Step 2 was made and saved anew.
  _train(folder)
  told = capsys.readouterr()
  assert "step 2 already exists" in told.out
  assert "damaged" not in told.err
  for step in (1, 2):
    _damage(folder, step)
  with pytest.raises(
    user_error.UserError,
    match=r"All .*/2 is damaged: .*/1 is damaged: .*Start",
  ):
    _train(folder)
  job, _ = testing.make(**SHORT)
  with pytest.raises(
    user_error.UserError, match=r"All checkpoints are damaged: "
  ):
    evaluate.run(job, folder)
  assert not (folder / "checkpoints" / "3").exists()


def test_damaged_metrics(folder):
  _train(folder)
  file = folder / "metrics.jsonl"
  file.write_text(file.read_text()[:-9])
  with pytest.raises(user_error.UserError, match=r"metrics.*, line \d+,"):
    _train(folder, num_train_steps=3)


@pytest.mark.nightly
def test_a_finished_run_reports_it(folder, capsys):
  _train(folder, num_train_steps=3)
  capsys.readouterr()
  _train(folder)
  expected = "step 3 already exists, and num_train_steps is 2: nothing to tr"
  assert expected in capsys.readouterr().out
