"""Tests for data in object stores and for zstd: the same as on a disk."""

import gzip
import json
import os
import pathlib
import sys

import fsspec
from fsspec.implementations import memory
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import (
  corpus_shards,
  data_files,
  json_lines,
  record_files,
  text_files,
  token_file,
  token_file_writer,
)

_TEXTS = [f"document {i} " * (i % 7 + 1) for i in range(60)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """An empty folder of copies."""
  folder = tmp_path / "cache"
  monkeypatch.setenv("PAXON_DATA_CACHE", str(folder))
  return folder


class _Store(memory.MemoryFileSystem):
  protocol = "s3"


@pytest.fixture
def store():
  """An object store with the URL s3://."""
  fsspec.register_implementation("s3", _Store, clobber=True)
  yield fsspec.filesystem("s3")
  fsspec.register_implementation("s3", "s3fs.S3FileSystem", clobber=True)
  memory.MemoryFileSystem.store.clear()


def _upload(store, folder: pathlib.Path) -> None:
  for file in filter(pathlib.Path.is_file, folder.rglob("*")):
    name = f"s3://bucket/{file.relative_to(folder)}"
    store.pipe(name, file.read_bytes())


def _lines() -> bytes:
  rows = (json.dumps({"text": text}) + "\n" for text in _TEXTS)
  return "".join(rows).encode()


def _zstd(data: bytes) -> bytes:
  codec = pytest.importorskip("pyarrow").Codec("zstd")
  # Two frames, as `cat a.zst b.zst` has.
  half = len(data) // 2
  parts = (data[:half], data[half:])
  return b"".join(codec.compress(part, asbytes=True) for part in parts)


def _batches(source, *, stop: int, resume_at: int | None = None):
  def make():
    return packed_input.pack_documents(
      source=source,
      tokenizer=byte_tokenizer.ByteTokenizer(),
      length=64,
      global_batch_size=4,
      shuffle_seed=3,
    )

  data, found = make(), []
  for number in range(stop):
    if number == resume_at:
      state, data = data.get_state(), make()
      data.set_state(state)
    found.append(data.get_next()["inputs"])
  return np.stack(found)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("place", ["disk", "store"])
def test_batches_are_those_of_plain_lines_on_a_disk(
  tmp_path, store, ending, place
):
  data = tmp_path / "data"
  data.mkdir()
  (tmp_path / "plain.jsonl").write_bytes(_lines())
  packed = {"": bytes, ".gz": gzip.compress, ".zst": _zstd}[ending](_lines())
  (data / f"a.jsonl{ending}").write_bytes(packed)
  _upload(store, data)
  folder = "s3://bucket" if place == "store" else str(data)
  source = json_lines.JsonLines(files=f"{folder}/*.jsonl{ending}")
  plain = json_lines.JsonLines(files=str(tmp_path / "plain.jsonl"))
  np.testing.assert_array_equal(
    _batches(source, stop=12, resume_at=5), _batches(plain, stop=12)
  )


def test_text_files_of_a_store(tmp_path, store):
  for i, text in enumerate(_TEXTS[:5]):
    store.pipe(f"s3://bucket/in/{i}.txt", text.encode())
  for pattern in ("s3://bucket/in/*.txt", "s3://bucket/**/*.txt"):
    source = text_files.TextFiles(files=pattern)
    assert source.paths[0] == "s3://bucket/in/0.txt"
    assert [source[i].decode() for i in range(len(source))] == _TEXTS[:5]


def test_token_file_of_a_store_reads_only_what_it_needs(
  tmp_path, store, cache, monkeypatch
):
  data = tmp_path / "data"
  data.mkdir()
  token_file_writer.write(
    str(data / "tokens"),
    [np.arange(i + 1) + 10 * i for i in range(9)],
    dtype=np.dtype(np.uint16),
  )
  _upload(store, data)
  here = token_file.TokenFile(path=str(data / "tokens"), vocab_size=200)
  there = token_file.TokenFile(path="s3://bucket/tokens", vocab_size=200)
  there.check()
  for i in (8, 0, 3):
    np.testing.assert_array_equal(there.tokens(i), here.tokens(i))
  assert not [name for name in os.listdir(cache) if name.endswith(".bin")]


def test_shards_of_a_corpus_in_a_store(tmp_path, store):
  store.pipe("s3://bucket/a.jsonl.gz", gzip.compress(_lines()))
  form = corpus_shards.Form.JSON_LINE
  shards = corpus_shards.cut_shards(
    record_files.find("s3://bucket/*", field="files"),
    form=form,
    shard_bytes=100,
  )
  found = [
    text.decode()
    for shard in shards
    for _, text in corpus_shards.documents(shard, form=form, text_key="text")
  ]
  assert found == _TEXTS


def test_a_copy_is_made_once_and_again_after_a_change(store, cache):
  store.pipe("s3://bucket/a.txt", b"first")
  path = data_files.local("s3://bucket/a.txt")
  assert data_files.local("s3://bucket/a.txt") == path
  assert pathlib.Path(path).read_bytes() == b"first"
  store.pipe("s3://bucket/a.txt", b"second!")
  other = data_files.local("s3://bucket/a.txt")
  assert pathlib.Path(other).read_bytes() == b"second!"
  # No unfinished copies.
  assert len(os.listdir(cache)) == 2


def test_files_on_a_disk_are_not_copied(tmp_path, cache):
  path = str(tmp_path / "a.txt")
  assert data_files.local(path) == path
  assert not cache.exists()


@pytest.mark.parametrize(
  ("data", "message"),
  [
    pytest.param(b"no zstd at all", "is damaged or cut off", id="other"),
    pytest.param(b"", "is damaged or cut off: it is empty", id="empty"),
    pytest.param(None, "is damaged or cut off", id="cut off"),
  ],
)
def test_damaged_zstd_is_one_error_and_leaves_no_copy(
  tmp_path, cache, data, message
):
  path = tmp_path / "a.jsonl.zst"
  path.write_bytes(_zstd(_lines())[:-20] if data is None else data)
  with pytest.raises(ValueError, match=message):
    data_files.local(str(path))
  assert not os.listdir(cache)


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
  (tmp_path / "a.zst").write_bytes(_zstd(b"x" * 50))
  # An entry of None makes the import fail.
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(ValueError, match=r"pyarrow is not installed.*`data`"):
    data_files.local(str(tmp_path / "a.zst"))


@pytest.mark.parametrize(
  ("url", "message"),
  [
    (
      "gs://bucket/a.txt",
      "needs the package gcsfs: pip install .paxon.gcs",
    ),
    ("nowhere://bucket/a.txt", "cannot be read: Protocol not known"),
  ],
)
def test_a_store_without_its_library_is_one_error(url, message):
  with pytest.raises(ValueError, match=message):
    record_files.find(url, field="Mine.files")


def test_a_missing_object_is_one_error(store):
  store.pipe("s3://bucket/other.txt", b"text")
  with pytest.raises(FileNotFoundError, match="no file has the name 's3://b"):
    record_files.find("s3://bucket/none.txt", field="Mine.files")
  with pytest.raises(ValueError, match=r"there is no file s3://b/t\.idx"):
    token_file.TokenFile(path="s3://b/t").check()


def test_a_cache_without_room_is_one_error(tmp_path, store, monkeypatch):
  (tmp_path / "file").touch()
  monkeypatch.setenv("PAXON_DATA_CACHE", str(tmp_path / "file" / "x"))
  store.pipe("s3://bucket/a.txt", b"text")
  with pytest.raises(ValueError, match=r"cannot be copied to .*PAXON_DATA_CAC"):
    data_files.local("s3://bucket/a.txt")
