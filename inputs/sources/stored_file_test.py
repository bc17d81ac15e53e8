"""Tests for reads by range: exact bytes, a bound, failures, replaced files."""

import os
import threading
from typing import ClassVar

import fsspec
from fsspec.implementations import memory
import numpy as np
import pytest

from paxon.inputs import stores
from paxon.inputs.sources import data_files, stored_file

_URL = "flaky://bucket/data.bin"
_CHUNK = 1000


class FlakyStore(memory.MemoryFileSystem):
  """A store in memory; every n-th request fails."""

  protocol = "flaky"
  cachable = False
  every = 0
  error: Exception = OSError("SlowDown")
  requests = 0
  ranges: ClassVar[list[tuple[int, int]]] = []

  def _fail(self):
    FlakyStore.requests += 1
    if self.every and self.requests % self.every == 0:
      raise self.error

  def info(self, path, **kwargs):
    self._fail()
    found = super().info(path, **kwargs)
    size = found["size"]
    # As object stores have it.
    return {**found, "ETag": hash(super().cat_file(path)) if size else 0}

  def cat_file(self, path, start=None, end=None, **kwargs):
    self._fail()
    FlakyStore.ranges.append((start, end))
    return super().cat_file(path, start=start, end=end, **kwargs)


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
  """A store with the URL flaky://, chunks of 1000 bytes, no waits."""
  fsspec.register_implementation("flaky", FlakyStore, clobber=True)
  monkeypatch.setattr(FlakyStore, "every", 0)
  monkeypatch.setattr(FlakyStore, "requests", 0)
  monkeypatch.setattr(FlakyStore, "ranges", [])
  monkeypatch.setattr(stored_file, "_CHUNK", _CHUNK)
  monkeypatch.setattr(stores, "_WAIT", 0)
  monkeypatch.setenv("PAXON_DATA_CACHE", str(tmp_path / "cache"))
  yield FlakyStore()
  memory.MemoryFileSystem.store.clear()


@pytest.fixture(name="data")
def _data(store):
  data = np.random.default_rng(0).bytes(12_345)
  store.pipe(_URL, data)
  return data


def _cached(tmp_path) -> int:
  files = (tmp_path / "cache" / "chunks").glob("*")
  return sum(file.stat().st_size for file in files)


def test_ranges_and_reads_in_order_are_exact(data):
  file = stored_file.StoredFile(_URL)
  rng = np.random.default_rng(1)
  for begin in rng.integers(0, len(data), 50).tolist():
    end = begin + int(rng.integers(0, 3000))
    assert file.read(begin, end) == data[begin:end]
  with file.open() as opened:
    assert opened.read() == data
    opened.seek(-5, os.SEEK_END)
    assert opened.read() == data[-5:]
    opened.seek(7)
    assert opened.read(10) == data[7:17]


def test_a_chunk_is_requested_once_by_all_readers(data):
  first, second = (stored_file.StoredFile(_URL) for _ in range(2))
  for file in (first, second, first):
    assert file.open().read() == data
  assert len(FlakyStore.ranges) == len(set(FlakyStore.ranges)) == 13


def test_the_first_bytes_need_the_first_chunk_only(data):
  file = stored_file.StoredFile(_URL)
  assert file.open().read(10) == data[:10]
  assert FlakyStore.ranges == [(0, _CHUNK)]


def test_the_next_chunk_is_read_ahead(data, monkeypatch):
  ahead = threading.Event()
  load = stored_file.StoredFile._load

  def record(self, number):
    found = load(self, number)
    if number == 2:
      ahead.set()
    return found

  monkeypatch.setattr(stored_file.StoredFile, "_load", record)
  file = stored_file.StoredFile(_URL)
  assert file.read(0, 10) == data[:10]
  assert file.read(1500, 1600) == data[1500:1600]
  assert ahead.wait(10)
  # A single range elsewhere is no order.
  assert (3000, 4000) not in FlakyStore.ranges


def test_the_cache_has_a_bound(data, tmp_path, monkeypatch):
  monkeypatch.setenv("PAXON_DATA_CACHE_BYTES", "3500")
  sizes = []
  write = stored_file._write

  def record(path, content):
    write(path, content)
    sizes.append(_cached(tmp_path))

  monkeypatch.setattr(stored_file, "_write", record)
  file = stored_file.StoredFile(_URL)
  assert file.open().read() == data
  assert max(sizes) <= 3500
  assert len(sizes) == 13


def test_single_ranges_of_a_larger_file_are_not_kept(
  data, tmp_path, monkeypatch
):
  monkeypatch.setenv("PAXON_DATA_CACHE_BYTES", "3500")
  file = stored_file.StoredFile(_URL)
  assert file.read(5100, 5110) == data[5100:5110]
  assert FlakyStore.ranges == [(5100, 5110)]
  assert not (tmp_path / "cache").exists()


def test_a_cut_off_chunk_on_the_disk_is_not_read(data, tmp_path):
  assert stored_file.StoredFile(_URL).read(0, 10) == data[:10]
  (chunk,) = (tmp_path / "cache" / "chunks").iterdir()
  chunk.write_bytes(b"half")
  assert stored_file.StoredFile(_URL).read(0, 10) == data[:10]


def test_chunks_of_a_replaced_file_are_not_mixed(data, store):
  old = stored_file.StoredFile(_URL)
  assert old.read(0, 10) == data[:10]
  changed = data[::-1]  # Of the same size.
  store.pipe(_URL, changed)
  assert stored_file.StoredFile(_URL).open().read() == changed
  with pytest.raises(ValueError, match=r"data\.bin was replaced while it was"):
    old.read(6000, 6010)


def test_a_file_that_became_shorter_was_replaced(data, store):
  file = stored_file.StoredFile(_URL)
  store.pipe(_URL, data[:2000])
  with pytest.raises(ValueError, match=r"data\.bin was replaced while it was"):
    file.read(6000, 6010)


@pytest.mark.parametrize("every", [5, 2])
def test_requests_that_fail_now_and_then_are_repeated(data, monkeypatch, every):
  monkeypatch.setattr(FlakyStore, "every", every)
  assert stored_file.StoredFile(_URL).open().read() == data


@pytest.mark.parametrize(
  ("error", "message", "requests"),
  [
    (OSError("SlowDown"), "be read in 5 attempts: SlowDown.", 5),
    (TimeoutError(), "be read in 5 attempts: TimeoutError.", 5),
    (PermissionError("Access\nDenied"), "read: permission denied .Access D", 1),
    (FileNotFoundError("no"), "be read: it, or its bucket, does not exist", 1),
  ],
)
def test_a_failing_store_is_one_line(
  data, monkeypatch, error, message, requests
):
  del data
  monkeypatch.setattr(FlakyStore, "every", 1)
  monkeypatch.setattr(FlakyStore, "error", error)
  with pytest.raises(stores.StoreError, match=message) as caught:
    stored_file.StoredFile(_URL)
  assert "\n" not in str(caught.value)
  assert str(caught.value).startswith(_URL)
  assert FlakyStore.requests == requests


def test_other_errors_are_not_hidden(data, monkeypatch):
  del data
  monkeypatch.setattr(FlakyStore, "every", 1)
  monkeypatch.setattr(FlakyStore, "error", KeyError("mine"))
  with pytest.raises(KeyError, match="mine"):
    stored_file.StoredFile(_URL)


@pytest.mark.parametrize("limit", ["0", "1G", "-5"])
def test_rejects_an_invalid_limit(data, monkeypatch, limit):
  monkeypatch.setenv("PAXON_DATA_CACHE_BYTES", limit)
  file = stored_file.StoredFile(_URL)
  with pytest.raises(ValueError, match=f"_BYTES must be a .*, got '{limit}'"):
    file.read(0, 10)
  del data


def test_files_larger_than_the_cache_are_not_counted(data, monkeypatch):
  del data
  data_files.check_fits([_URL, "/on/a/disk"])
  monkeypatch.setenv("PAXON_DATA_CACHE_BYTES", "12000")
  with pytest.raises(ValueError, match=r"12,345 bytes.*shuffle_window=10000"):
    data_files.check_fits([_URL])
