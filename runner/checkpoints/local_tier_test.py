"""Tests of checkpoints on local disks, of one process and of several."""

import json
import os
import resource
import shutil

from etils import epath
import jax
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import (
  checkpointer,
  local_tier,
  local_tier_programs,
  named_tree,
)
from paxon.runner.hosts import testing as forks_lib

SPECS = local_tier_programs.make_specs()


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(local_tier_programs.__name__, folder) as made:
    yield made


class _Hosts:
  """Hosts with a disk each, and a run directory."""

  def __init__(self, forks, folder):
    self._forks, self._folder = forks, folder
    (folder / "run").mkdir()

  def disk(self, name):
    return self._folder / name

  def run(self, disks, *, steps=()):
    """Runs a process per disk, on 4 devices; returns the result of each."""
    address = f"localhost:{forks_lib.free_port()}"
    results = [self._folder / f"result-{i}" for i in range(len(disks))]
    processes = [
      self._forks.start(
        "local_tier",
        [
          os.fspath(self._folder / "run"),
          os.fspath(self.disk(disk)),
          json.dumps(steps),
          os.fspath(results[i]),
          address,
          str(len(disks)),
          str(i),
        ],
        devices=4 // len(disks),
      )
      for i, disk in enumerate(disks)
    ]
    statuses = [process.wait() for process in processes]
    assert not any(statuses), [process.output() for process in processes]
    self.said = [process.output() for process in processes]
    return [json.loads(result.read_text()) for result in results]


@pytest.fixture(name="hosts")
def _hosts(forks, tmp_path):
  return _Hosts(forks, tmp_path)


def _check(results, step):
  for each in results:
    assert each["found"]["step"] == step
    assert each["found"]["data"] == {"batch": step}
    assert all(each["found"]["equal"].values()), each


def test_one_host_has_the_shards_of_two(hosts):
  results = hosts.run("ab", steps=[2, 4])
  assert [each["step"] for each in results] == [4, 4]
  # Both are there; then one comes back with an empty disk; then one is left.
  _check(hosts.run("ab"), 4)
  assert "step 4\n" in hosts.said[0]
  shutil.rmtree(hosts.disk("a"))
  _check(hosts.run("ab"), 4)
  assert "step 4; 1 of 2 processes read shards of another host" in hosts.said[0]
  _check(hosts.run("b"), 4)


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("left", "is_complete"),
  [
    pytest.param("dcba", True, id="none-lost"),
    pytest.param("bcd", True, id="first-lost"),
    pytest.param("acd", True, id="another-lost"),
    pytest.param("ab", False, id="two-lost"),
  ],
)
def test_shards_of_four_are_read_from_their_neighbours(
  hosts, left, is_complete
):
  hosts.run("abcd", steps=[3])
  for lost in set("abcd") - set(left):
    shutil.rmtree(hosts.disk(lost))
  # With a new host in place of the lost one, because arrays need 4 devices.
  if len(left) == 3:
    left += "x"
  results = hosts.run(left)
  if is_complete:
    _check(results, 3)
    return
  assert [each["found"] for each in results] == [None, None]
  assert "checkpoint of step 3 is incomplete, and not used" in hosts.said[0]


@pytest.mark.nightly
def test_a_damaged_shard_is_read_from_the_neighbour(hosts):
  hosts.run("ab", steps=[5])
  (path,) = hosts.disk("b").glob("*/*/1/data.bin")
  content = bytearray(path.read_bytes())
  content[-3] ^= 16
  path.write_bytes(content)
  _check(hosts.run("ab"), 5)
  assert f"{path} on " in hosts.said[1]


@pytest.mark.nightly
def test_processes_of_one_host_share_a_disk(hosts):
  hosts.run("aaaa", steps=[1, 2, 3])
  assert len(list(hosts.disk("a").glob("*/*/*/index.json"))) == 4
  _check(hosts.run("aa"), 3)


def _save(tier, step):
  shardings = local_tier_programs.make_shardings()
  values = local_tier_programs.make_values(step)
  tree = local_tier_programs.place(values, shardings)
  tier.save(step, tree, specs=SPECS, data={"batch": step})
  return tree


def _restore(tier):
  shardings = local_tier_programs.make_shardings(swapped=True)
  return tier.restore(specs=SPECS, shardings=shardings)


def _assert_has(restored, step):
  assert restored.step == step
  assert restored.data == {"batch": step}
  for name, expected in local_tier_programs.make_values(step).items():
    np.testing.assert_array_equal(np.asarray(restored.tree[name]), expected)


@pytest.fixture(name="tier")
def _tier(tmp_path):
  tier = local_tier.LocalTier(tmp_path / "disk", epath.Path(tmp_path / "run"))
  yield tier
  tier.close()


def _open(tmp_path):
  return local_tier.LocalTier(tmp_path / "disk", epath.Path(tmp_path / "run"))


def _steps(tmp_path):
  return sorted(
    int(path.name.partition(".")[0]) for path in tmp_path.glob("disk/*/*.*")
  )


def test_a_save_is_a_copy(tier):
  tree = _save(tier, 1)
  jax.jit(lambda x: jax.tree.map(lambda y: 0 * y, x), donate_argnums=0)(tree)
  tier.wait()
  _assert_has(_restore(tier), 1)


def test_the_newest_complete_save_is_kept(tier, tmp_path):
  _save(tier, 1)
  _save(tier, 2)
  assert tier.step == 1
  _save(tier, 3)
  assert tier.step == 2
  tier.wait()
  assert _steps(tmp_path) == [3]
  _assert_has(_restore(_open(tmp_path)), 3)


def test_an_incomplete_save_is_not_read(tier, tmp_path, capsys):
  _save(tier, 1)
  tier.wait()
  (old,) = tmp_path.glob("disk/*/1.*")
  shutil.copytree(old, old.parent / "2.abc")
  (old.parent / "2.abc" / "0" / "index.json").unlink()
  _assert_has(_restore(_open(tmp_path)), 1)
  said = capsys.readouterr().err
  assert "local checkpoint of step 2 is incomplete, and not used" in said


def test_a_damaged_save_is_not_used(tier, tmp_path, capsys):
  _save(tier, 1)
  tier.wait()
  (path,) = tmp_path.glob("disk/*/1.*/0/data.bin")
  path.write_bytes(path.read_bytes()[:-1])
  assert _open(tmp_path).step is None
  assert f"{path} on" in capsys.readouterr().err
  # Also if it is damaged while the run trains.
  with pytest.raises(checkpointer.DamagedCheckpointError, match="of step 1"):
    _restore(tier)
  assert tier.step is None


def test_a_full_disk_is_reported_once(tier, tmp_path, capsys):
  _save(tier, 1)
  tier.wait()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
  try:
    for step in (2, 3):
      _save(tier, step)
      tier.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  said = capsys.readouterr().err
  assert said.count("warning: the local checkpoint of step") == 1
  assert "step 2 could not be written (File too large on " in said
  assert tier.step == 1
  assert _steps(tmp_path) == [1]
  _save(tier, 4)
  tier.wait()
  _assert_has(_restore(_open(tmp_path)), 4)


def test_runs_do_not_read_each_other(tier, tmp_path):
  _save(tier, 1)
  tier.wait()
  other = local_tier.LocalTier(tmp_path / "disk", epath.Path(tmp_path / "new"))
  assert other.step is None
  other.clear()
  _assert_has(_restore(_open(tmp_path)), 1)


def test_a_copy_of_a_run_is_another_run(tier, tmp_path, capsys):
  _save(tier, 1)
  tier.wait()
  shutil.copytree(tmp_path / "run", tmp_path / "copy")
  copy = local_tier.LocalTier(tmp_path / "disk", epath.Path(tmp_path / "copy"))
  assert copy.step is None
  copy.clear()
  assert f"checkpoints of {tmp_path}/run are not" in capsys.readouterr().err
  _assert_has(_restore(_open(tmp_path)), 1)


@pytest.mark.parametrize("run", ["", "..", "A" * 32, 7])
def test_a_damaged_name_deletes_nothing(tmp_path, run):
  path = tmp_path / "run" / "local_checkpoints.json"
  path.parent.mkdir()
  path.write_text(json.dumps({"run": run, "directory": f"{path.parent}"}))
  with pytest.raises(user_error.UserError, match="does not hold a run"):
    _open(tmp_path)
  assert not [*(tmp_path / "disk").iterdir()]


def test_another_model_does_not_fit(tier):
  _save(tier, 1)
  tier.wait()
  specs = dict(SPECS)
  del specs["rows"]
  with pytest.raises(
    named_tree.CheckpointMismatchError,
    match=r"The local checkpoint of step 1 does not match .*params/rows",
  ):
    tier.restore(specs=specs, shardings=dict.fromkeys(specs))


def test_a_directory_that_cannot_be_written_to(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(
    user_error.UserError,
    match=r"--local_checkpoint_dir=.*/file cannot be written to on .*: Not a",
  ):
    local_tier.LocalTier(tmp_path / "file", epath.Path(tmp_path / "run"))
  assert not (tmp_path / "run").exists()
