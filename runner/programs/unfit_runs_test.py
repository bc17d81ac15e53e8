"""Tests that a folder that cannot be gone on in is told in one line."""

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.programs import testing, train

SHORT = {"num_train_steps": 2, "checkpoint_every_steps": 1}


@pytest.fixture(name="folder")
def _folder(tmp_path):
  return epath.Path(tmp_path)


def _train(folder, **knobs):
  return train.run(*testing.make(**SHORT | knobs), folder)


def test_a_start_that_failed_binds_nobody(folder):
  with pytest.raises(user_error.UserError, match=r"global_batch_size \(12\)"):
    _train(folder, global_batch_size=12)
  assert _train(folder, global_batch_size=8) == 0
  with pytest.raises(user_error.UserError, match=r"size is 8 there and 16"):
    _train(folder, global_batch_size=16)


def test_a_damaged_checkpoint_can_be_removed(folder, capsys):
  _train(folder)
  (folder / "checkpoints" / "2" / "metadata" / "metadata").write_text("")
  with pytest.raises(user_error.UserError, match=r"/2 cannot .*remove"):
    _train(folder)
  (folder / "checkpoints" / "2").rmtree()
  assert _train(folder) == 0
  assert "continuing from the checkpoint of step 1" in capsys.readouterr().out


def test_damaged_figures(folder):
  _train(folder)
  file = folder / "metrics.jsonl"
  file.write_text(file.read_text()[:-9])
  with pytest.raises(user_error.UserError, match=r"metrics.*, line \d+,"):
    _train(folder, num_train_steps=3)


def test_a_finished_run_says_so(folder, capsys):
  _train(folder, num_train_steps=3)
  capsys.readouterr()
  _train(folder)
  expected = "step 3 is there already, and num_train_steps is 2: nothing to tr"
  assert expected in capsys.readouterr().out
