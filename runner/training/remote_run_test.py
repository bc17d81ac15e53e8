"""Tests that a run writes all its files to an object store.

The store is in memory, behind the file layer that epath uses for `s3://` paths.
As in a real one, there are no folders, a file is there only when it is whole,
and nothing can be appended to or renamed. Checkpoints lie on the local disk
here: TensorStore, which orbax writes arrays with, has its own way to a store,
and no test can put another one in its place.
"""

import io
import json
import struct

from etils import epath
import fsspec
import pytest

from paxon.runner import run_dir as run_dirs
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.monitoring import launch, metrics_file
from paxon.runner.training import testing, train

RUN = "s3://bucket/runs/tiny"
KNOBS = {
  "num_train_steps": 3,
  "checkpoint_every_steps": 2,
  "eval_every_steps": 2,
  "max_new_tokens": 2,
}


class _Upload(io.BytesIO):
  """What is written becomes a file when it is closed without an error."""

  def __init__(self, files, name):
    super().__init__()
    self._files, self._name = files, name

  def __exit__(self, exc_type, exc_val, exc_tb):
    if exc_type is None:
      self.close()

  def close(self):
    if not self.closed:
      self._files[self._name] = self.getvalue()
    super().close()


class ObjectStore(fsspec.AbstractFileSystem):
  """Files by name, and no more."""

  protocol = "s3"
  cachable = False
  files: dict[str, bytes] = {}  # noqa: RUF012
  modes: set[str] = set()  # noqa: RUF012

  # Of fsspec, with fewer arguments.
  def open(self, path, mode="rb", **kwargs):  # pyrefly: ignore[bad-override]
    path = self._strip_protocol(path)
    self.modes.add(mode)
    if mode in ("wb", "w"):
      upload = _Upload(self.files, path)
      return upload if "b" in mode else io.TextIOWrapper(upload, "utf-8")
    assert mode in ("r", "rb"), f"{path} is opened with mode {mode}"
    if path not in self.files:
      raise FileNotFoundError(path)
    content = self.files[path]
    return io.BytesIO(content) if "b" in mode else io.StringIO(content.decode())

  def ls(self, path, detail=True, **kwargs):
    path = self._strip_protocol(path).rstrip("/")
    if path in self.files:
      found = {path: {"type": "file", "size": len(self.files[path])}}
    else:
      found = {}
      for name, content in self.files.items():
        if name.startswith(f"{path}/"):
          child, slash, _ = name[len(path) + 1 :].partition("/")
          kind = "directory" if slash else "file"
          found[f"{path}/{child}"] = {"type": kind, "size": len(content)}
    if not found:
      raise FileNotFoundError(path)
    if not detail:
      return sorted(found)
    return [{"name": name, **info} for name, info in sorted(found.items())]

  def info(self, path, **kwargs):
    path = self._strip_protocol(path).rstrip("/")
    if path in self.files:
      return {"name": path, "type": "file", "size": len(self.files[path])}
    if any(name.startswith(f"{path}/") for name in self.files):
      return {"name": path, "type": "directory", "size": 0}
    raise FileNotFoundError(path)

  def rm_file(self, path):  # pyrefly: ignore[bad-override]
    if self._strip_protocol(path) not in self.files:
      raise FileNotFoundError(path)
    del self.files[self._strip_protocol(path)]

  def cp_file(self, *args, **kwargs):
    raise NotImplementedError("An object store does not copy here.")

  def mv(self, *args, **kwargs):
    raise NotImplementedError("An object store cannot rename.")

  rename = mv
  move = mv


class _Local:
  """A name of a folder that is another one, whatever it is joined to."""

  def __init__(self, folder):
    self._folder = folder

  def __rtruediv__(self, other):
    return self._folder


@pytest.fixture(name="store")
def _store(monkeypatch, tmp_path):
  fsspec.register_implementation("s3", ObjectStore, clobber=True)
  monkeypatch.setenv("EPATH_USE_TF", "false")
  monkeypatch.setattr(ObjectStore, "files", {})
  monkeypatch.setattr(ObjectStore, "modes", set())
  local = _Local(epath.Path(tmp_path / "checkpoints"))
  monkeypatch.setattr(run_dirs, "CHECKPOINTS", local)
  # Whoever takes the address for a relative path writes here.
  monkeypatch.chdir(tmp_path)
  return ObjectStore


def _events(content):
  """The number of records of an event file, by their lengths."""
  count, at = 0, 0
  while at < len(content):
    at += 16 + struct.unpack_from("<Q", content, at)[0]
    count += 1
  assert at == len(content)
  return count


def _written(store):
  prefix = RUN.removeprefix("s3://")
  return {
    name.removeprefix(f"{prefix}/"): content
    for name, content in store.files.items()
  }


def test_all_files_of_a_run_are_in_the_store(store, tmp_path):
  folder = epath.Path(RUN)
  window = range(2, 3)
  start = launch.Launch(profile=window)
  train.run(*testing.make(**KNOBS), folder, launch=start)
  # It goes on from what it has written there.
  more = KNOBS | {"num_train_steps": 5}
  train.run(*testing.make(**more), folder)
  job, _ = testing.make(**more)
  assert evaluate.run(job, folder) == 0
  assert decode.run(job, folder, "x") == 0

  written = _written(store)
  for name in (
    *(run_dirs.CONFIG_TEXT, run_dirs.SETTINGS),
    *(run_dirs.METRICS, run_dirs.REPORT, run_dirs.FINISHED, run_dirs.SAMPLES),
    *(run_dirs.GOODPUT, run_dirs.SAMPLES_BY_STEP),
    f"{run_dirs.EVAL}/{run_dirs.METRICS}",
  ):
    assert written[name], name
  for folder_name in (run_dirs.EVENTS, run_dirs.DECODE, run_dirs.PROFILE):
    assert any(name.startswith(f"{folder_name}/") for name in written)

  records = metrics_file.read(folder / run_dirs.METRICS)
  assert [r.step for r in records if r.split == "train"] == [1, 2, 3, 4, 5]
  assert {r.step for r in records if r.split == "validation"} >= {2, 4, 5}
  train_events = [
    content
    for name, content in sorted(written.items())
    if name.startswith(f"{run_dirs.EVENTS}/train/")
  ]
  # One file a process: a version, a start where it resumes, two records of
  # hyperparameters, the texts of the configuration and samples, and the steps.
  assert [_events(content) for content in train_events] == [8, 8]
  for name, content in written.items():
    if name.endswith(".json"):
      json.loads(content)
    elif name.endswith(".jsonl"):
      assert all(json.loads(line) for line in content.splitlines())
  assert store.modes <= {"r", "rb", "w", "wb"}
  assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}


def test_the_store_rejects_what_real_ones_reject(store):
  path = epath.Path("s3://bucket/a")
  path.write_text("caf\u00e9")
  assert path.read_text() == "caf\u00e9"
  assert not epath.Path("s3://bucket/b").exists()
  with (
    pytest.raises(AssertionError, match="opened with mode a"),
    path.open("a"),
  ):
    pass
  with pytest.raises(NotImplementedError, match="cannot rename"):
    path.rename("s3://bucket/b")
  with pytest.raises(NotImplementedError, match="cannot rename"):
    path.replace("s3://bucket/b")
  assert list(store.files) == ["bucket/a"]
