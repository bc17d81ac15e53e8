"""Tests for the stored settings and configuration of a run."""

import dataclasses

from etils import epath
import fiddle as fdl
import pytest

from paxon.inputs import byte_tokenizer
from paxon.runner import experiment, run_dir, user_error
from paxon.runner import job as job_lib
from paxon.runner.configuration import overrides
from paxon.runner.session import run_files
from paxon.runner.training import testing


def test_text_is_stored(tmp_path):
  folder = epath.Path(tmp_path)
  run_files.store_config(testing.make()[1], folder)
  assert "num_train_steps = 12" in (folder / run_dir.CONFIG_TEXT).read_text()


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


def test_a_copy_replaces_a_path_that_a_run_was_trained_with(tmp_path):
  base, folder = tmp_path / "base", epath.Path(tmp_path / "run")
  copies = {"vocabulary/hugging_face": f"{base}/hugging_face"}
  folder.mkdir()
  run_files.store_config(
    fdl.Config(job_lib.Job, run_files=copies, experiment="x"), folder
  )
  (folder / "vocabulary" / "hugging_face").mkdir(parents=True)
  name = _WithPaths.import_path()
  given = (
    overrides.Override("tokenizer", str(base)),
    overrides.Override("train_files", str(tmp_path / "none.txt")),
  )
  own = overrides.Override("tokenizer", str(folder / "vocabulary"))
  found, notes = run_files.use_copies(name, given, folder, given=given)
  assert found == (own, given[1])
  (note,) = notes
  assert note == (
    f"tokenizer: {base} does not exist; using the copy in {folder}"
  )
  # A run's other programs use its copies, and those of the command line win.
  base.mkdir()
  found, notes = run_files.use_copies(name, given, folder, given=())
  assert (found, notes) == ((own, given[1]), ())
  found, _ = run_files.use_copies(name, given, folder, given=given)
  assert found == given
  # The run can be moved.
  run_files.store_settings(name, (own,), folder)
  text = (folder / run_dir.SETTINGS).read_text()
  assert f"--fdl.tokenizer={run_dir.HERE}/vocabulary" in text
  assert run_files.read_settings(folder).overrides == (own,)


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
  with pytest.raises(user_error.UserError, match="none, which is not a f"):
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
  with pytest.raises(user_error.UserError, match=r"tokenizer _OtherBytes \("):
    run_files.check_tokenizer(another, folder)
