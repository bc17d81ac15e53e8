"""Tests for whole files and the folders of runs."""

import datetime
import os
import pathlib

from etils import epath
import fsspec
import pytest

from paxon.inputs.store_servers import memory_store
from paxon.runner import files, run_dir, user_error
from paxon.runner.checkpoints import stored_checkpoint

_NOW = datetime.datetime(2024, 5, 6, 7, 8, 9)


def test_file_is_written_whole_and_folders_are_made(tmp_path):
  path = tmp_path / "a" / "b.txt"
  files.write_text(path, "caf\u00e9\r\n")
  assert path.read_bytes() == "caf\u00e9\r\n".encode()
  files.write_bytes(path, b"")
  assert path.read_bytes() == b""
  assert os.listdir(path.parent) == ["b.txt"]


def test_failed_write_leaves_the_old_file_and_nothing_else(
  tmp_path, monkeypatch
):
  path = tmp_path / "a.txt"
  files.write_text(path, "old")

  def fail(*args):
    raise OSError("disk full")

  monkeypatch.setattr(os, "fsync", fail)
  with pytest.raises(OSError, match="disk full"):
    files.write_text(path, "new")
  assert path.read_text() == "old"
  assert os.listdir(tmp_path) == ["a.txt"]


def test_reader_never_sees_a_part_of_a_file(tmp_path, monkeypatch):
  path = tmp_path / "a.txt"
  files.write_text(path, "old")
  seen = []
  sync = os.fsync

  def look(descriptor):
    seen.append(path.read_text())
    sync(descriptor)

  monkeypatch.setattr(os, "fsync", look)
  files.write_text(path, "new")
  assert seen == ["old"]
  assert path.read_text() == "new"


def test_remote_files_are_written_in_one_go(monkeypatch):
  written = []
  for method in ("mkdir", "write_bytes"):

    def record(self, *args, method=method, **kwargs):
      written.append((method, os.fspath(self), *args))

    monkeypatch.setattr(type(epath.Path("gs://b")), method, record)
  files.write_text("gs://bucket/run/a.txt", "text")
  assert written == [("write_bytes", "gs://bucket/run/a.txt", b"text")]


@pytest.mark.parametrize(
  ("given", "environ", "expected"),
  [
    ("x", {}, "{cwd}/x"),
    ("x", {"BUILD_WORKING_DIRECTORY": "/home/me"}, "/home/me/x"),
    ("/x", {"BUILD_WORKING_DIRECTORY": "/home/me"}, "/x"),
    ("~/x", {"BUILD_WORKING_DIRECTORY": "/home/me"}, "{home}/x"),
    ("s3://b/x", {"BUILD_WORKING_DIRECTORY": "/home/me"}, "s3://b/x"),
  ],
)
def test_folder_is_relative_to_where_the_user_stands(given, environ, expected):
  with memory_store.serve("s3"):
    _check_resolved(given, environ, expected)


def _check_resolved(given, environ, expected):
  expected = expected.format(cwd=os.getcwd(), home=pathlib.Path.home())
  assert os.fspath(run_dir.resolve(given, environ)) == expected


def test_unsupported_store_is_a_user_error():
  with pytest.raises(
    user_error.UserError, match=r"^foo://b/x: unsupported store; use gs://"
  ):
    run_dir.resolve("foo://b/x", {})


@pytest.mark.parametrize(
  "use",
  [run_dir.create, run_dir.check_existing, stored_checkpoint.find_checkpoint],
)
def test_missing_store_library_is_a_user_error(use, monkeypatch):
  path = epath.Path("gs://bucket/run")

  def find(scheme):
    raise ImportError("Please install gcsfs to access Google Storage")

  monkeypatch.setattr(fsspec, "get_filesystem_class", find)
  message = (
    r"gs://bucket/run needs the package gcsfs: pip install 'paxon\[gcs\]'"
  )
  with pytest.raises(user_error.UserError, match=message):
    use(path)


def test_unwritable_directory_is_a_user_error(tmp_path, monkeypatch):
  run, own = epath.Path(tmp_path), tmp_path / run_dir.EVAL

  def access(path, mode):
    del mode
    return os.fspath(path) == os.fspath(own)  # Root may write anywhere.

  monkeypatch.setattr(os, "access", access)
  assert run_dir.check_existing(run) == run
  for use in (
    run_dir.create,
    lambda path: run_dir.check_existing(path, writes=run_dir.EVAL),
  ):
    with pytest.raises(user_error.UserError, match="is not writable"):
      use(run)
  own.mkdir()
  assert run_dir.check_existing(run, writes=run_dir.EVAL) == run


def test_only_a_folder_with_nothing_in_it_is_removed(tmp_path):
  run = epath.Path(tmp_path / "run")
  inside = run / run_dir.CHECKPOINTS
  inside.mkdir(parents=True)
  run_dir.remove_empty(run)
  assert not run.exists()
  run_dir.remove_empty(run)
  for name in (run_dir.CONFIG_TEXT, f"{run_dir.CHECKPOINTS}/100"):
    file = run / name
    file.parent.mkdir(parents=True)
    file.write_text("text")
    run_dir.remove_empty(run)
    assert file.read_text() == "text"
    run.rmtree()


def test_new_folders_are_unique(tmp_path):
  environ = {"BUILD_WORKING_DIRECTORY": str(tmp_path)}
  made = [run_dir.create_new("Toy", environ, now=_NOW) for _ in range(3)]
  assert [path.name for path in made] == [
    "Toy-20240506-070809",
    "Toy-20240506-070809-2",
    "Toy-20240506-070809-3",
  ]
  assert all(path.parent == tmp_path / "runs" for path in made)


def test_impossible_directories_are_user_errors(tmp_path):
  blocked = tmp_path / "file"
  blocked.write_text("")
  for path in (blocked, blocked / "below"):
    with pytest.raises(user_error.UserError, match=r"file.*cannot create"):
      run_dir.create(epath.Path(path))
    with pytest.raises(user_error.UserError, match="does not exist; use"):
      run_dir.check_existing(epath.Path(path))
  run_dir.create(epath.Path(tmp_path))
  assert run_dir.check_existing(epath.Path(tmp_path)) == epath.Path(tmp_path)


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("a\n  b\r\n", "a b"),
    ("\x1b[31m", "\\x1b[31m"),
    ("caf\u00e9", "caf\u00e9"),
  ],
)
def test_errors_are_one_printable_line(text, line):
  assert user_error.one_line(user_error.UserError(text)) == line


def _snapshot(tmp_path):
  """Returns a snapshot of Hugging Face's cache."""
  repository = tmp_path / "models--a--b"
  (repository / "blobs").mkdir(parents=True)
  (repository / "blobs" / "0a").write_text("{}")
  (repository / "snapshots" / "c").mkdir(parents=True)
  (repository / "snapshots" / "c" / "a.json").symlink_to("../../blobs/0a")
  return repository / "snapshots" / "c"


def test_links_of_the_hugging_face_cache_are_followed(tmp_path):
  folder = _snapshot(tmp_path)
  files.check_links(folder, (".json",))
  # By another path to the same folder, too.
  (tmp_path / "link").symlink_to(folder)
  files.check_links(tmp_path / "link", (".json",))


@pytest.mark.parametrize(
  "target",
  [
    "/etc/hostname",
    "../../refs/main",
    "../../blobs/../../other",
    "../../../blobs/x",
    "loop.json",
    "/dev/zero",
  ],
)
def test_links_out_of_a_folder_are_rejected(tmp_path, target):
  folder = _snapshot(tmp_path)
  (tmp_path / "other").write_text("{}")
  name = "loop.json" if target == "loop.json" else "x.json"
  (folder / name).symlink_to(target)
  with pytest.raises(files.DamagedFileError, match=name):
    files.check_links(folder, (".json",))
  (folder / name).rename(folder / "x.md")
  files.check_links(folder, (".json",))


def test_a_folder_of_a_model_holds_no_pipes(tmp_path):
  os.mkfifo(tmp_path / "x.json")
  with pytest.raises(files.DamagedFileError, match=r"x\.json .* a pipe"):
    files.check_links(tmp_path, (".json",))
