"""Tests of what a run finds out about a store before it starts."""

from etils import epath
import fsspec
import pytest

from paxon.inputs import optional_library, stores
from paxon.inputs.store_servers import memory_store
from paxon.runner.stores import access


@pytest.fixture(name="faults")
def _faults(monkeypatch):
  """Errors to raise, by what is tried."""
  monkeypatch.setenv("EPATH_USE_TF", "false")
  faults = {}

  def add(kind, name, find):
    method = getattr(kind, name)

    def run(self, path, *args, **options):
      error = faults.get(find(self, path, *args, **options))
      if error is not None:
        raise error
      return method(self, path, *args, **options)

    setattr(kind, name, run)

  with memory_store.serve("s3") as kind:
    add(
      kind,
      "pipe_file",
      lambda self, path, value: "overwrite" if path in self.files else "write",
    )
    add(
      kind,
      "open",
      lambda self, path, mode="rb": "read" if mode == "rb" else None,
    )
    add(kind, "ls", lambda self, path, *_, **__: "list")
    add(kind, "rm_file", lambda self, path: "delete")
    faults["store"] = kind
    yield faults


FOLDER = epath.Path("s3://bucket/runs/a")


def test_a_store_that_can_hold_a_run(faults):
  access.try_out(FOLDER)
  assert not faults["store"].files


@pytest.mark.parametrize(
  ("fault", "error", "message"),
  [
    ("write", FileNotFoundError("NoSuchBucket"), "bucket, does not exist"),
    ("write", PermissionError("AccessDenied"), "able to write objects"),
    ("overwrite", PermissionError("object is locked"), "able to overwrite"),
    ("read", PermissionError("no GetObject"), "able to read objects"),
    ("list", PermissionError("no ListBucket"), "able to list objects"),
    ("delete", PermissionError("no DeleteObject"), "able to delete objects"),
    ("write", OSError("RequestTimeTooSkewed"), "RequestTimeTooSkewed"),
    ("write", OSError("PermanentRedirect"), "PermanentRedirect"),
  ],
)
def test_what_a_store_cannot_do_is_named(faults, fault, error, message):
  faults[fault] = error
  with pytest.raises(access.UnusableStoreError, match=message) as raised:
    access.try_out(FOLDER)
  assert str(raised.value).startswith("s3://bucket/runs/a cannot be used")
  assert "\n" not in str(raised.value)


def test_listings_may_come_late(faults):
  pauses = []
  kind, late = faults["store"], 3
  list_all = kind.ls

  def list_late(self, path, detail=True, **options):
    found = list_all(self, path, detail, **options)
    return [] if len(pauses) < late else found

  kind.ls = list_late
  access.try_out(FOLDER, sleep=pauses.append)
  assert pauses == [0.1, 0.2, 0.4]
  pauses.clear()
  late = 1000
  with pytest.raises(access.UnusableStoreError, match="is not listed"):
    access.try_out(FOLDER, sleep=pauses.append)
  assert not faults["store"].files


def test_an_overwritten_object_must_be_new(faults, monkeypatch):
  monkeypatch.setattr(type(FOLDER), "read_bytes", lambda path: b"1")
  with pytest.raises(access.UnusableStoreError, match="old content"):
    access.try_out(FOLDER)


def test_listings_are_not_cached(monkeypatch):
  monkeypatch.setattr(fsspec.config, "conf", {"gs": {"token": "anon"}})
  monkeypatch.setattr(stores, "check_package", lambda path: None)
  stores.prepare("gs://bucket")
  assert fsspec.config.conf["gs"] == {
    "token": "anon",
    "use_listings_cache": False,
  }
  assert fsspec.config.conf["az"] == {"use_listings_cache": False}


def test_a_missing_package_is_named(monkeypatch):
  def find(scheme):
    raise ImportError("Install s3fs") from ModuleNotFoundError(name="s3fs")

  monkeypatch.setattr(fsspec, "get_filesystem_class", find)
  with pytest.raises(
    optional_library.MissingLibraryError, match=r"pip install 'paxon\[s3\]'"
  ):
    stores.prepare("s3://bucket/run")
