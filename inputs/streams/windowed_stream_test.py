"""Tests for windows over files: any place and compression, exact positions."""

import gzip
import json

import fsspec
from fsspec.implementations import memory
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import (
  example_source,
  grain_sources,
  json_lines,
  record_columns,
  stored_file,
  text_files,
)

_TEXTS = [[f"{file}/{i} " * (i % 5 + 1) for i in range(17)] for file in "abc"]
_DOCUMENTS = {text for texts in _TEXTS for text in texts}


def _lines(texts) -> bytes:
  return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _zstd(data: bytes) -> bytes:
  pyarrow = pytest.importorskip("pyarrow")
  return pyarrow.Codec("zstd").compress(data, asbytes=True)


def _parquet(texts) -> bytes:
  pyarrow = pytest.importorskip("pyarrow")
  sink = pyarrow.BufferOutputStream()
  pytest.importorskip("pyarrow.parquet").write_table(
    pyarrow.table({"text": texts}), sink, row_group_size=5
  )
  return sink.getvalue().to_pybytes()


_FORMATS = {
  "jsonl": _lines,
  "jsonl.gz": lambda texts: gzip.compress(_lines(texts)),
  "jsonl.zst": lambda texts: _zstd(_lines(texts)),
  "txt": lambda texts: "\n".join(texts).encode(),
  "parquet": _parquet,
}


@pytest.fixture(name="store")
def _store(monkeypatch, tmp_path):
  """An object store with the URL memory://, and small chunks."""
  monkeypatch.setattr(stored_file, "_CHUNK", 100)
  monkeypatch.setenv("PAXON_DATA_CACHE", str(tmp_path / "cache"))
  yield fsspec.filesystem("memory")
  memory.MemoryFileSystem.store.clear()


def _write(folder, ending) -> str:
  """Writes three files; returns their pattern."""
  for name, texts in zip("abc", _TEXTS, strict=True):
    with fsspec.open(f"{folder}/{name}.{ending}", "wb") as file:
      file.write(_FORMATS[ending](texts))
  return f"{folder}/*.{ending}"


def _source(files):
  if files.endswith("parquet"):
    rows = grain_sources.ParquetRows(files=files)
    return record_columns.TextColumn(rows=rows)
  if files.endswith("txt"):
    return text_files.TextFiles(
      files=files, documents=text_files.Documents.LINE
    )
  return json_lines.JsonLines(files=files)


def _input(files, **given):
  fields = {"shuffle_seed": 3, "shuffle_window": 8, **given}
  return packed_input.pack_documents(
    source=_source(files),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    length=32,
    global_batch_size=4,
    **fields,
  )


def _documents(made) -> list[str]:
  stream, found = made.examples, []
  position = stream.start()
  while taken := stream.next_example(position, step=0):
    reference, position = taken
    ids = stream.read(reference)["targets"][:-1]
    found.append(byte_tokenizer.ByteTokenizer().decode(ids))
  return found


@pytest.mark.parametrize("ending", _FORMATS)
def test_batches_of_a_store_and_of_a_disk_are_equal(tmp_path, store, ending):
  del store
  here = _input(_write(tmp_path, ending))
  there = _input(_write("memory://bucket", ending))
  for step in range(25):
    first, second = here.get_next(), there.get_next()
    assert first.keys() == second.keys()
    for key, value in first.items():
      np.testing.assert_array_equal(value, second[key], err_msg=key)
    assert here.get_state() == there.get_state()
    if step % 4 == 0:
      # A run that moves to the store resumes there.
      state = json.loads(json.dumps(here.get_state()))
      there = _input("memory://bucket/*." + ending)
      there.set_state(state)


def test_compressed_files_have_the_positions_of_their_text(tmp_path):
  given = [
    _input(_write(tmp_path, ending))
    for ending in ("jsonl", "jsonl.gz", "jsonl.zst")
  ]
  for _ in range(25):
    batches = [each.get_next()["inputs"] for each in given]
    for batch in batches[1:]:
      np.testing.assert_array_equal(batch, batches[0])
    assert len({str(each.get_state()["position"]) for each in given}) == 1


def test_the_order_is_of_files_then_of_windows(tmp_path):
  made = _input(_write(tmp_path, "jsonl"), num_epochs=2)
  documents = _documents(made)
  size = len(documents) // 2
  first, second = documents[:size], documents[size:]
  assert set(first) == set(second) == _DOCUMENTS
  assert len(first) == len(_DOCUMENTS)
  assert first != second
  # The files that a window's documents are from are consecutive.
  order = list(dict.fromkeys(text[0] for text in first))
  assert sorted(order) == ["a", "b", "c"]
  flat = [text for file in order for text in _TEXTS["abc".index(file)]]
  for begin in range(0, size, 8):
    window = first[begin : begin + 8]
    assert sorted(window) == sorted(flat[begin : begin + 8])
    assert window != flat[begin : begin + 8]


def test_without_a_seed_the_order_is_that_of_the_files(tmp_path):
  made = _input(_write(tmp_path, "jsonl"), num_epochs=1, shuffle_seed=None)
  assert _documents(made) == [text for texts in _TEXTS for text in texts]


def test_the_first_batch_reads_the_first_chunk_of_one_file(store, monkeypatch):
  del store
  monkeypatch.setattr(stored_file, "_CHUNK", 300)
  read = []
  get = stored_file.StoredFile._get

  def record(self, begin, end):
    read.append((self.path, begin, end))
    return get(self, begin, end)

  monkeypatch.setattr(stored_file.StoredFile, "_get", record)
  made = _input(_write("memory://bucket", "jsonl"), shuffle_window=2)
  made.global_batch_size = 1
  made.get_next()
  assert {begin for _, begin, _ in read} == {0}
  assert len({path for path, _, _ in read}) == 1


def test_other_data_of_the_same_names_is_an_error(tmp_path):
  files = _write(tmp_path, "jsonl")
  state = _input(files).get_state()
  (tmp_path / "b.jsonl").write_bytes(_lines(_TEXTS[1][1:]))
  with pytest.raises(ValueError, match=r"with content .*, but this input has"):
    _input(files).set_state(state)


@pytest.mark.parametrize(
  ("position", "message"),
  [
    (3, "must be an epoch, a file, an offset and an index, got 3"),
    ([0, 0, -1, 0], "The state's offset must be an integer, got -1"),
    ([0, 3, 0, 0], "The state's file is 3, and there are 3"),
  ],
)
def test_rejects_invalid_positions(tmp_path, position, message):
  made = _input(_write(tmp_path, "jsonl"))
  state = {**made.get_state(), "position": position}
  with pytest.raises(ValueError, match=message):
    made.set_state(state)


def test_rejects_sources_without_files(tmp_path):
  given = example_source.InMemoryDocuments(["text"])
  with pytest.raises(
    ValueError, match=r"source .InMemoryDocuments. has no file"
  ):
    packed_input.pack_documents(
      source=given,
      tokenizer=byte_tokenizer.ByteTokenizer(),
      length=32,
      global_batch_size=4,
      shuffle_seed=0,
      shuffle_window=2,
    )
  with pytest.raises(
    ValueError, match="shuffle_window must be positive, got 0"
  ):
    _input(_write(tmp_path, "jsonl"), shuffle_window=0)
  with pytest.raises(ValueError, match=r"chunk_length \(5\) is of a shuffle"):
    _input(_write(tmp_path, "jsonl"), chunk_length=5)


def test_empty_files_are_one_error(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(b"\n \n")
  made = _input(str(tmp_path / "a.jsonl"))
  with pytest.raises(ValueError, match="The source holds no documents"):
    made.get_next()


def test_errors_name_the_file_and_the_place(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(_lines(["first"]) + b'{"other": 1}\n')
  made = _input(str(tmp_path / "a.jsonl"))
  with pytest.raises(
    ValueError, match=r"a\.jsonl, byte 18 of the text: a line"
  ):
    made.get_next()
