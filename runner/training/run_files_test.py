"""Tests for the stored settings and configuration of a run."""

import dataclasses

from etils import epath
import pytest

from paxon.inputs import byte_tokenizer
from paxon.runner import experiment, run_dir, user_error
from paxon.runner.configuration import overrides
from paxon.runner.training import run_files, testing


def _config(**knobs):
  return testing.make(**knobs)[1]


def _stored(tmp_path, **knobs):
  """A folder in which a run has stored its configuration."""
  folder = epath.Path(tmp_path)
  run_files.store_config(_config(**knobs), folder)
  return folder


def test_text_is_stored(tmp_path):
  folder = _stored(tmp_path)
  assert "num_train_steps = 12" in (folder / run_dir.CONFIG_TEXT).read_text()


def test_the_same_configuration_has_no_changes(tmp_path):
  assert run_files.check_config(_config(), _stored(tmp_path)) == []


def test_any_configuration_fits_a_directory_without_one(tmp_path):
  assert run_files.check_config(_config(), epath.Path(tmp_path)) == []


def test_a_run_may_be_extended_and_its_schedule_with_it(tmp_path):
  folder = _stored(tmp_path)
  changes = run_files.check_config(_config(num_train_steps=24), folder)
  assert "num_train_steps was 12 and is now 24" in changes
  assert len(changes) == 2
  assert any("schedule.total_steps was 12 and" in line for line in changes)


@pytest.mark.parametrize(
  "knobs",
  [{"mesh": "fsdp=-1"}, {"eval_every_steps": 2}, {"max_new_tokens": 3}],
  ids=["mesh", "interval", "generation"],
)
def test_what_does_not_change_the_steps_made_may_change(tmp_path, knobs):
  changes = run_files.check_config(_config(**knobs), _stored(tmp_path))
  assert len(changes) == 1


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    ({"seed": 3}, r"a different configuration: .*seed.* was 0 and is now 3"),
    ({"learning_rate": 0.1}, r"schedule.peak was 0.003 and is now 0.1;"),
    (
      {"embed_dim": 32},
      r"was 16 and is now 32 \(and 1 more\); use the same values or",
    ),
  ],
)
def test_rejects_another_run(tmp_path, knobs, message):
  with pytest.raises(user_error.UserError, match=message):
    run_files.check_config(_config(**knobs), _stored(tmp_path))


def _without(folder, line):
  stored = folder / run_dir.CONFIG_TEXT
  text = stored.read_text()
  assert f"{line}\n" in text
  stored.write_text(text.replace(f"{line}\n", ""))


def test_a_field_that_a_later_version_added_may_have_its_default(tmp_path):
  folder = _stored(tmp_path)
  _without(folder, "task.learner.optimizer.max_update_rms = None")
  (change,) = run_files.check_config(_config(), folder)
  assert "max_update_rms was nothing and is now None" in change


@pytest.mark.parametrize(
  "line",
  ["warm_start = None", "compiler_options = {}", "compiler_option_sets = ()"],
)
def test_an_added_field_of_the_job_may_have_its_default(tmp_path, line):
  folder = _stored(tmp_path)
  _without(folder, line)
  path = line.partition(" ")[0]
  (change,) = run_files.check_config(_config(), folder)
  assert change.startswith(f"{path} was nothing and is now")


def test_a_field_that_was_not_there_may_not_be_set(tmp_path):
  folder, config = _stored(tmp_path), _config()
  _without(folder, "task.learner.optimizer.max_update_rms = None")
  config.task.learner.optimizer.max_update_rms = 1.0
  with pytest.raises(user_error.UserError, match=r"max_update_rms was nothing"):
    run_files.check_config(config, folder)


def test_how_a_stack_is_computed_may_change(tmp_path):
  folder, config = _stored(tmp_path), _config()
  config.task.model.stack.scan = not config.task.model.stack.scan
  (change,) = run_files.check_config(config, folder)
  assert "task.model.stack.scan" in change


GIVEN = (
  overrides.Override("num_layers", "3"),
  overrides.Override("task.learner.max_grad_norm", "None"),
)


def test_settings_come_back_as_they_were_typed(tmp_path):
  folder = epath.Path(tmp_path)
  assert run_files.read_settings(folder) is None
  run_files.store_settings("a.b.C", [], folder)
  assert run_files.read_settings(folder).overrides == ()
  run_files.store_settings("a.b.C", GIVEN, folder)
  settings = run_files.read_settings(folder)
  assert settings.experiment == "a.b.C"
  assert settings.overrides == GIVEN


def test_any_text_of_a_value_comes_back(tmp_path):
  folder = epath.Path(tmp_path)
  given = (overrides.Override("a['k'].b[0]", 'x "=" \udcff\n'),)
  run_files.store_settings("a.b.C", given, folder)
  assert run_files.read_settings(folder).overrides == given


class _WithPaths(experiment.Experiment):
  path_knobs = ("tokenizer", "train_files")
  num_train_steps = global_batch_size = 1
  tokenizer: str | None = None
  train_files: str | None = None

  def task(self):
    raise NotImplementedError

  datasets = task


def test_stored_paths_are_absolute(tmp_path, monkeypatch):
  (tmp_path / "a.jsonl").write_text("")
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
  for given, stored in (
    ("a.jsonl", f"{tmp_path}/a.jsonl"),
    ("*.jsonl", f"{tmp_path}/*.jsonl"),
    (f"{tmp_path}/a.jsonl", f"{tmp_path}/a.jsonl"),
    # Not files here.
    ("bytes", "bytes"),
    ("gs://bucket/a.jsonl", "gs://bucket/a.jsonl"),
  ):
    given_overrides = (
      overrides.Override("train_files", given),
      overrides.Override("seed", "5"),
    )
    assert run_files.resolve_paths(
      _WithPaths(train_files=given), given_overrides
    ) == (overrides.Override("train_files", stored), given_overrides[1])
  # The value None.
  unset = (overrides.Override("tokenizer", "None"),)
  assert run_files.resolve_paths(_WithPaths(), unset) == unset


@pytest.mark.parametrize(
  "text", ["", "[]", "{}", '{"experiment": "a.C", "overrides": [3]}']
)
def test_a_damaged_file_is_named(tmp_path, text):
  (tmp_path / "settings.json").write_text(text)
  with pytest.raises(
    user_error.UserError, match=r"settings.json does not hold the settings"
  ):
    run_files.read_settings(epath.Path(tmp_path))


def test_drafts_of_killed_processes_are_removed(tmp_path):
  for name in ("metrics.jsonl.1f.part", "owner.json.2f.part", "a.json"):
    (tmp_path / name).touch()
  run_files.remove_drafts(epath.Path(tmp_path))
  left = {path.name for path in tmp_path.iterdir()}
  assert left == {"owner.json.2f.part", "a.json"}


def test_folders_of_a_run_are_copied_once(tmp_path):
  source, folder = tmp_path / "source", epath.Path(tmp_path / "run")
  source.mkdir()
  (source / "a.json").write_text("1")
  job = dataclasses.replace(testing.make()[0], run_files={"model": str(source)})
  run_files.copy_files(job, folder)
  (source / "a.json").write_text("2")
  # As if the run had been killed before it copied this file.
  (source / "b.json").write_text("3")
  run_files.copy_files(job, folder)
  assert (folder / "model" / "a.json").read_text() == "1"
  assert (folder / "model" / "b.json").read_text() == "3"
  (tmp_path / "secret").write_text("4")
  (source / "c.json").symlink_to(tmp_path / "secret")
  with pytest.raises(user_error.UserError, match=r"c\.json .* outside of the"):
    run_files.copy_files(job, folder)
  assert not (folder / "model" / "c.json").exists()
  job = dataclasses.replace(job, run_files={"other": str(tmp_path / "none")})
  with pytest.raises(user_error.UserError, match="none, which is not a folder"):
    run_files.copy_files(job, folder)


@dataclasses.dataclass(frozen=True)
class _OtherBytes(byte_tokenizer.ByteTokenizer):
  content_hash: str = "0"


def _with_tokenizer(job, tokenizer):
  return dataclasses.replace(
    job, task=dataclasses.replace(job.task, tokenizer=tokenizer)
  )


def test_a_run_is_read_with_its_own_tokenizer(tmp_path):
  job, folder = testing.make()[0], epath.Path(tmp_path)
  job = _with_tokenizer(job, _OtherBytes())
  run_files.check_tokenizer(job, folder)  # Nothing is stored yet.
  run_files.store_tokenizer(job, folder)
  run_files.check_tokenizer(job, folder)
  other = _with_tokenizer(job, _OtherBytes(content_hash="1"))
  with pytest.raises(
    user_error.UserError,
    match=r"trained by a tokenizer with vocabulary 0 .* and this one has 1",
  ):
    run_files.check_tokenizer(other, folder)
  another = _with_tokenizer(job, byte_tokenizer.ByteTokenizer())
  with pytest.raises(user_error.UserError, match="tokenizer _OtherBytes, and"):
    run_files.check_tokenizer(another, folder)
