"""Tests for discovery and metadata of checkpoints."""

import dataclasses
import json
import time

from etils import epath
import jax.numpy as jnp
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import (
  checkpointer,
  stored_checkpoint,
  unreadable,
)
from paxon.sharding import variables

SPECS = [
  variables.VariableSpec("step", (), jnp.dtype("int32"), ()),
  variables.VariableSpec(
    "params/up", (2, 3), jnp.dtype("bfloat16"), ("embed", None)
  ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  path = epath.Path(tmp_path_factory.mktemp("run"))
  values = [jnp.asarray(0, jnp.int32), jnp.zeros((2, 3), jnp.bfloat16)]
  with checkpointer.Checkpointer(path / "checkpoints") as checkpoints:
    for step in (5, 20, 100):
      checkpoints.save(step, values, specs=SPECS, data={})
  return path


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/100"])
def test_latest_is_found_from_any_directory(run, below):
  found = stored_checkpoint.find_checkpoint(run / below)
  assert (found.step, found.folder) == (100, run / "checkpoints")
  assert found.path == run / "checkpoints" / "100"
  assert found.run_path == run


def test_metadata_is_read(run):
  before = time.time()
  found = stored_checkpoint.find_checkpoint(run, step=20)
  assert before - 600 < found.time <= before
  assert list(found.arrays) == ["step", "params/up"]
  up = found.arrays["params/up"]
  assert (up.shape, up.dtype, up.axes) == ((2, 3), "bfloat16", ("embed", None))
  assert (up.size, up.num_bytes) == (6, 12)
  assert list(found.variables()) == ["params/up"]
  assert stored_checkpoint.total_bytes(found.arrays.values()) == 16


def test_steps_are_ascending(run):
  assert stored_checkpoint.find_steps(run)[1] == [5, 20, 100]
  assert stored_checkpoint.find_steps(run / "checkpoints" / "20")[1] == [20]


def test_a_checkpoint_that_is_deleted_is_not_damaged(run, monkeypatch):
  # As listed before the run has deleted the newest one.
  find_steps, listed = stored_checkpoint.find_steps, []

  def find_deleted(path):
    folder, found = find_steps(path)
    listed.append(found)
    return folder, found if len(listed) > 1 else [*found, 200]

  monkeypatch.setattr(stored_checkpoint, "find_steps", find_deleted)
  found = stored_checkpoint.find_checkpoint(run)
  assert found.step == 100
  gone = dataclasses.replace(found, step=200)
  for read in (
    stored_checkpoint.verify,
    stored_checkpoint.fingerprint,
    lambda stored: stored_checkpoint.read_numpy(stored, ["step"]),
    lambda stored: stored_checkpoint.read_metadata(stored.folder, 200),
  ):
    with pytest.raises(unreadable.DeletedCheckpointError, match=r"200 was del"):
      read(gone)


def test_a_directory_that_changes_is_listed_again():
  results = [FileNotFoundError(), FileNotFoundError(), [3]]

  def make():
    result = results.pop(0)
    if isinstance(result, Exception):
      raise result
    return result

  assert unreadable.list_again(make) == [3]
  results.append(FileNotFoundError())
  with pytest.raises(FileNotFoundError):
    unreadable.list_again(make, is_repeated=False)


def test_configuration_is_optional(tmp_path):
  folder = epath.Path(tmp_path)
  assert stored_checkpoint.read_config(folder) is None
  (folder / "config.txt").write_text("<root>: a.B\nseed = 3\n")
  assert stored_checkpoint.read_config(folder) == {"<root>": "a.B", "seed": "3"}


def test_missing_checkpoints_are_named(run, tmp_path):
  empty = epath.Path(tmp_path)
  with pytest.raises(user_error.UserError, match=r"/none does not exist; pass"):
    stored_checkpoint.find_checkpoint(empty / "none")
  with pytest.raises(user_error.UserError, match="contains no checkpoint"):
    stored_checkpoint.find_checkpoint(empty)
  with pytest.raises(
    user_error.UserError, match=r"no checkpoint of step 7; it has 5, 20, 100\."
  ):
    stored_checkpoint.find_checkpoint(run, step=7)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", r"3 cannot be read: its metadata is missing or damaged"),
    ("{}", r"missing or damaged \(KeyError\)"),
    ("[]", r"missing or damaged"),
    (
      json.dumps({"format_version": 99, "arrays": {}}),
      r"format version 99, but this program reads version 2 only",
    ),
  ],
)
def test_damaged_metadata_is_named(tmp_path, text, message):
  folder = epath.Path(tmp_path)
  (folder / "3" / "metadata").mkdir(parents=True)
  (folder / "3" / "metadata" / "metadata").write_text(text)
  with pytest.raises(user_error.UserError, match=message):
    stored_checkpoint.read_metadata(folder, 3)


def test_variables_are_selected():
  names = ("params/a", "fp8/b", "step", "opt_state/0/mu/params/a")
  assert [stored_checkpoint.is_variable(n) for n in names] == [
    *(True, True),
    *(False, False),
  ]
