"""Tests for the stored configuration of a run."""

import json

from etils import epath
import pytest

from paxon.runner import run_dir, user_error
from paxon.runner.training import stored_config, testing


def _config(**knobs):
  return testing.make(**knobs)[1]


def _stored(tmp_path, **knobs):
  """A folder in which a run has stored its configuration."""
  folder = epath.Path(tmp_path)
  stored_config.store(_config(**knobs), folder)
  return folder


def test_text_and_json_are_stored(tmp_path):
  folder = _stored(tmp_path)
  assert "num_train_steps = 12" in (folder / run_dir.CONFIG_TEXT).read_text()
  json.loads((folder / run_dir.CONFIG_JSON).read_text())


def test_the_same_configuration_has_no_changes(tmp_path):
  assert stored_config.check(_config(), _stored(tmp_path)) == []


def test_a_folder_without_a_configuration_admits_any(tmp_path):
  assert stored_config.check(_config(), epath.Path(tmp_path)) == []


def test_a_longer_run_may_go_on_and_its_schedule_with_it(tmp_path):
  folder = _stored(tmp_path)
  changes = stored_config.check(_config(num_train_steps=24), folder)
  assert "num_train_steps is 12 there and 24 here" in changes
  assert len(changes) == 2
  assert any("schedule.total_steps is 12 there" in line for line in changes)


@pytest.mark.parametrize(
  "knobs",
  [{"mesh": "fsdp=-1"}, {"eval_every_steps": 2}, {"max_new_tokens": 3}],
  ids=["mesh", "interval", "generation"],
)
def test_what_does_not_change_the_steps_made_may_change(tmp_path, knobs):
  changes = stored_config.check(_config(**knobs), _stored(tmp_path))
  assert len(changes) == 1


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    ({"seed": 3}, r"another configuration: .*seed.* is 0 there and 3 here"),
    ({"learning_rate": 0.1}, r"schedule.peak is 0.003 there and 0.1 here;"),
    (
      {"embed_dim": 32},
      r"is 16 there and 32 here \(and 1 more\); give the same values, or",
    ),
  ],
)
def test_another_run_is_refused(tmp_path, knobs, message):
  with pytest.raises(user_error.UserError, match=message):
    stored_config.check(_config(**knobs), _stored(tmp_path))


def _without(folder, line):
  stored = folder / run_dir.CONFIG_TEXT
  text = stored.read_text()
  assert f"{line}\n" in text
  stored.write_text(text.replace(f"{line}\n", ""))


def test_a_field_that_a_later_version_added_may_have_its_default(tmp_path):
  folder = _stored(tmp_path)
  _without(folder, "task.learner.optimizer.max_update_rms = None")
  (change,) = stored_config.check(_config(), folder)
  assert "max_update_rms is nothing there and None here" in change


def test_a_field_that_was_not_there_may_not_be_set(tmp_path):
  folder, config = _stored(tmp_path), _config()
  _without(folder, "task.learner.optimizer.max_update_rms = None")
  config.task.learner.optimizer.max_update_rms = 1.0
  with pytest.raises(user_error.UserError, match=r"max_update_rms is nothing"):
    stored_config.check(config, folder)


def test_how_a_stack_is_computed_may_change(tmp_path):
  folder, config = _stored(tmp_path), _config()
  config.task.model.stack.scan = not config.task.model.stack.scan
  (change,) = stored_config.check(config, folder)
  assert "task.model.stack.scan" in change
