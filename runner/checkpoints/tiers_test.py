"""Tests of checkpoints in a run directory and on a local disk."""

from unittest import mock

from etils import epath
import numpy as np
import pytest

from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.checkpoints import (
  checkpointer,
  local_tier_programs,
  tiers,
)
from paxon.runner.settings import training

SPECS = local_tier_programs.make_specs()


def _open(tmp_path):
  return tiers.open_tiers(
    epath.Path(tmp_path / "run"),
    str(tmp_path / "disk"),
    retention=training.Retention(),
  )


def _save(saver, step):
  shardings = local_tier_programs.make_shardings()
  values = local_tier_programs.make_values(step)
  tree = local_tier_programs.place(values, shardings)
  saver.save(step, tree, specs=SPECS, data={"batch": step})


def _assert_restores(opened, step):
  assert opened.latest_step() == step
  restored = opened.restore(
    step, specs=SPECS, shardings=local_tier_programs.make_shardings()
  )
  assert (restored.step, restored.data) == (step, {"batch": step})
  for name, expected in local_tier_programs.make_values(step).items():
    np.testing.assert_array_equal(np.asarray(restored.tree[name]), expected)


def _crash(opened):
  """Closes without the end of a run, which deletes local checkpoints."""
  opened.wait()
  with mock.patch.object(opened.local, "clear"):
    opened.close()


def test_the_newest_of_either_tier_is_read(tmp_path):
  opened = _open(tmp_path)
  assert opened.latest_step() is None
  _save(opened.local, 1)
  _crash(opened)
  for saves_locally, step in ((False, 2), (True, 3), (True, 4), (False, 5)):
    with mock.patch.object(tiers.local_tier.LocalTier, "clear"):
      opened = _open(tmp_path)
    _save(opened.local if saves_locally else opened, step)
    opened.wait()
    _assert_restores(opened, step)
    _crash(opened)
    opened = _open(tmp_path)
    _assert_restores(opened, step)
    _crash(opened)


def test_a_damaged_tier_leaves_the_other(tmp_path):
  opened = _open(tmp_path)
  _save(opened, 2)
  _save(opened.local, 3)
  _crash(opened)
  (path,) = tmp_path.glob("disk/*/*/0/data.bin")
  content = path.read_bytes()
  path.write_bytes(content[:-1])
  opened = _open(tmp_path)
  _assert_restores(opened, 2)
  _crash(opened)
  path.write_bytes(content)
  (tmp_path / "run/checkpoints/2/data/metadata").write_text("{}")
  opened = _open(tmp_path)
  _assert_restores(opened, 3)
  with pytest.raises(checkpointer.DamagedCheckpointError):
    opened.restore(
      2, specs=SPECS, shardings=local_tier_programs.make_shardings()
    )
  _crash(opened)


def test_local_checkpoints_are_deleted_once_the_store_has_a_newer_one(tmp_path):
  with _open(tmp_path) as opened:
    _save(opened.local, 1)
    opened.wait()
  assert list(tmp_path.glob("disk/*/1.*"))
  with _open(tmp_path) as opened:
    _save(opened, 2)
  assert not list(tmp_path.glob("disk/*"))


def test_a_start_without_the_directory_ends_older_local_checkpoints(tmp_path):
  with _open(tmp_path) as opened:
    _save(opened.local, 3)
  retention = training.Retention()
  run_dir = epath.Path(tmp_path / "run")
  with tiers.open_tiers(run_dir, None, retention=retention) as opened:
    # It repeats steps 1 and 2, maybe with another learning rate.
    _save(opened, 2)
  with _open(tmp_path) as opened:
    assert opened.latest_step() == 2


def test_without_a_directory_there_is_one_tier(tmp_path):
  with tiers.open_tiers(
    epath.Path(tmp_path), None, retention=training.Retention()
  ) as opened:
    assert type(opened) is checkpointer.Checkpointer
    job = mock.create_autospec(job_lib.Job, local_checkpoint_every_steps=None)
    assert tiers.list_savers(opened, job) == []
  assert not (tmp_path / "local_checkpoints.json").exists()


@pytest.mark.parametrize(
  ("folder", "every_steps", "message"),
  [
    (
      None,
      5,
      "local_checkpoint_every_steps=5 requires --local_checkpoint_dir, a dir",
    ),
    (
      "/tmp/x",
      None,
      "--local_checkpoint_dir=/tmp/x requires"
      " --fdl.local_checkpoint_every_steps=N",
    ),
    (" ", 5, "--local_checkpoint_dir is empty; set a directory"),
    ("gs://a/b", 5, "--local_checkpoint_dir=gs://a/b must be a directory on a"),
    (
      "/runs/first/local",
      5,
      "--local_checkpoint_dir=/runs/first/local must be outside of the run",
    ),
  ],
)
def test_flag_and_knob_are_checked(folder, every_steps, message):
  job = mock.create_autospec(
    job_lib.Job, local_checkpoint_every_steps=every_steps
  )
  with pytest.raises(user_error.UserError, match=message):
    tiers.check(job, folder, run_dir=epath.Path("/runs/first"))


@pytest.mark.parametrize(
  ("folder", "every_steps"), [(None, None), ("/runs/local", 5)]
)
def test_flag_and_knob_fit(folder, every_steps):
  job = mock.create_autospec(
    job_lib.Job, local_checkpoint_every_steps=every_steps
  )
  tiers.check(job, folder, run_dir=epath.Path("/runs/first"))
