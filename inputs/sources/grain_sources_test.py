"""Tests for Grain, ArrayRecord, Parquet and Hugging Face data sets."""

import functools
import json
import pickle

from array_record.python import array_record_module
import datasets
import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import example_source, grain_sources, record_columns
from paxon.inputs.streams import example_stream
from paxon.inputs.tf_records import tf_example, tf_record_files

TEXTS = [f"text {i} " + "x" * (i % 5) for i in range(23)]
IDS = [[i, i + 1, i + 2][: 1 + i % 3] for i in range(23)]


def _dataset(texts):
  table = datasets.table.InMemoryTable.from_pydict({"text": texts})
  # Without a fingerprint, `datasets` would pickle the table to compute one, and
  # dill would pickle all of pyarrow if it is not in site-packages.
  return datasets.Dataset(table, fingerprint=f"test{len(texts)}")


def _array_records(folder):
  for number, part in enumerate((TEXTS[:10], TEXTS[10:])):
    path = str(folder / f"part-{number}.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for text in part:
      writer.write(text.encode())
    writer.close()
  return str(folder / "*.array_record")


def _array_record_documents(folder):
  return grain_sources.ArrayRecordFiles(files=_array_records(folder))


def _parquet_documents(folder):
  for number, part in enumerate((TEXTS[:10], TEXTS[10:])):
    table = pa.table({"text": part, "more": list(range(len(part)))})
    pq.write_table(table, folder / f"{number}.parquet", row_group_size=4)
  rows = grain_sources.ParquetRows(
    files=str(folder / "*.parquet"), columns=("text",)
  )
  return record_columns.TextColumn(rows=rows)


def _tf_record_documents(folder):
  records = (
    tf_example.serialize({"content": np.array([text], object)})
    for text in TEXTS
  )
  tf_record_files.write(folder / "texts.tfrecord", records)
  files = tf_record_files.TfRecordFiles(files=str(folder / "*.tfrecord"))
  rows = tf_example.TfExampleRecords(files=files)
  return record_columns.TextColumn(rows=rows, column="content")


def _saved_documents(folder):
  given = _dataset(TEXTS)
  given.save_to_disk(str(folder / "saved"))
  rows = grain_sources.HuggingFaceRows(path=str(folder / "saved"))
  return record_columns.TextColumn(rows=rows)


def _file_documents(folder):
  lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
  (folder / "texts.jsonl").write_text(lines)
  rows = grain_sources.HuggingFaceRows(
    path=str(folder / "*.jsonl"),
    files_format="json",
    cache_folder=str(folder / "cache"),
  )
  return record_columns.TextColumn(rows=rows)


def _opened(pattern):
  """Returns a Grain data set over ArrayRecords with a map step."""
  source = grain.sources.ArrayRecordDataSource(
    sorted(str(path) for path in pattern.parent.glob(pattern.name))
  )
  return grain.MapDataset.source(source).map(lambda r: {"text": r})


def _grain_documents(folder):
  _array_records(folder)
  opener = functools.partial(_opened, folder / "*.array_record")
  return record_columns.TextColumn(rows=grain_sources.GrainRows(open=opener))


KINDS = [
  _array_record_documents,
  _parquet_documents,
  _tf_record_documents,
  _saved_documents,
  _file_documents,
  _grain_documents,
]


def _input(source):
  return packed_input.PackedInput(
    examples=example_stream.Examples(
      source=example_source.TokenizedDocuments(
        source=source, tokenizer=byte_tokenizer.ByteTokenizer()
      ),
      shuffle_seed=5,
    ),
    global_batch_size=4,
    length=16,
  )


@pytest.mark.parametrize("kind", KINDS)
def test_documents_have_random_access_and_resume_on_any_hosts(kind, tmp_path):
  source = kind(tmp_path)
  assert len(source) == len(TEXTS)
  assert [source[i].decode() for i in (22, 0, 9, 10)] == [
    TEXTS[i] for i in (22, 0, 9, 10)
  ]
  copied = pickle.loads(pickle.dumps(source))
  assert copied[11].decode() == TEXTS[11]
  # All sources yield the same stream.
  given, expected = _input(source), _input(_InMemory())
  for _ in range(3):
    state = given.get_state()
    batch, wanted = given.get_next(), expected.get_next()
    for key, value in wanted.items():
      np.testing.assert_array_equal(batch[key], value)
  rows = []
  for host in range(2):
    other = _input(source)
    other.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=2)
    other.set_state(json.loads(json.dumps(state)))
    rows.append(other.get_next()["targets"])
  np.testing.assert_array_equal(np.concatenate(rows), batch["targets"])


class _InMemory:
  def __len__(self):
    return len(TEXTS)

  def __getitem__(self, index, /):
    return TEXTS[index].encode()


def test_token_columns_are_checked(tmp_path):
  pq.write_table(pa.table({"ids": IDS}), tmp_path / "ids.parquet")
  rows = grain_sources.ParquetRows(files=str(tmp_path / "ids.parquet"))
  given = record_columns.TokenColumn(
    rows=rows, column="ids", begin_id=0, end_id=3, vocab_size=10
  )
  assert given[2]["inputs"].tolist() == [0, 2, 3, 4]
  assert given[2]["targets"].tolist() == [2, 3, 4, 3]
  # An existing end id is not repeated.
  assert given[1]["targets"].tolist() == [1, 2, 3]
  with pytest.raises(ValueError, match=r"row 9: .* ids from 9 to 9|from 10 to"):
    _ = given[10]
  with pytest.raises(ValueError, match=r"ids.parquet, group 0, row 4 has no"):
    _ = record_columns.TokenColumn(rows=rows, column="other")[4]
  with pytest.raises(ValueError, match="column 'ids' must be a string"):
    _ = record_columns.TextColumn(rows=rows, column="ids")[5]
  texts = pa.table({"ids": ["a"]})
  pq.write_table(texts, tmp_path / "texts.parquet")
  rows = grain_sources.ParquetRows(files=str(tmp_path / "texts.parquet"))
  with pytest.raises(ValueError, match="must be a list of integers"):
    _ = record_columns.TokenColumn(rows=rows, column="ids")[0]


def test_files_that_are_missing_empty_or_damaged_are_named(tmp_path):
  none = str(tmp_path / "none-*")
  for source in (
    grain_sources.ArrayRecordFiles(files=none),
    grain_sources.ParquetRows(files=none),
    grain_sources.HuggingFaceRows(path=none, files_format="json"),
  ):
    with pytest.raises(FileNotFoundError, match="no file has the name"):
      len(source)
  with pytest.raises(FileNotFoundError, match="there is no folder"):
    len(grain_sources.HuggingFaceRows(path=none))
  empty = pa.table({"text": pa.array([], pa.string())})
  pq.write_table(empty, tmp_path / "empty.parquet")
  with pytest.raises(ValueError, match="holds no rows"):
    len(grain_sources.ParquetRows(files=str(tmp_path / "empty.parquet")))
  (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut")
  with pytest.raises(ValueError, match=r"cut\.parquet is no Parquet file"):
    len(grain_sources.ParquetRows(files=str(tmp_path / "cut.parquet")))
  for make in (
    grain_sources.ArrayRecordFiles,
    grain_sources.ParquetRows,
  ):
    with pytest.raises(ValueError, match="files must not be empty"):
      make(files="")


def test_a_file_that_matches_two_patterns_is_read_once(tmp_path):
  pattern = _array_records(tmp_path)
  files = [str(tmp_path / "part-1.array_record"), pattern]
  source = grain_sources.ArrayRecordFiles(files=files)
  found = [source[i].decode() for i in range(len(source))]
  assert found == TEXTS[10:] + TEXTS[:10]


def test_a_damaged_array_record_is_named(tmp_path):
  files = _array_records(tmp_path)
  path = tmp_path / "part-0.array_record"
  data = bytearray(path.read_bytes())
  place = data.index(TEXTS[3].encode()) if TEXTS[3].encode() in data else None
  # In compressed records, changes any byte of the first ones.
  data[place or 70] ^= 0xFF
  path.write_bytes(bytes(data))
  source = grain_sources.ArrayRecordFiles(files=files)

  def read_all():
    return [source[i] for i in range(10)]

  with pytest.raises(ValueError, match=r"record . of all is damaged"):
    read_all()


def test_splits_are_chosen_by_name(tmp_path):
  parts = {"train": TEXTS[:3], "test": TEXTS[3:5]}
  datasets.DatasetDict({k: _dataset(v) for k, v in parts.items()}).save_to_disk(
    str(tmp_path / "both")
  )
  path = str(tmp_path / "both")
  given = grain_sources.HuggingFaceRows(path=path, split="test")
  assert given[1]["text"] == TEXTS[4]
  with pytest.raises(ValueError, match=r"split must be one of .*'train'"):
    len(grain_sources.HuggingFaceRows(path=path))
  with pytest.raises(ValueError, match="files_format must be one of"):
    grain_sources.HuggingFaceRows(path=path, files_format="xml")


@pytest.mark.parametrize(
  ("opened", "message"),
  [
    (lambda: iter([1]), "has no __len__"),
    (
      lambda: grain.MapDataset.source([1, 2]).repeat(),
      "repeats without end",
    ),
  ],
)
def test_rejects_data_sets_without_random_access(opened, message):
  with pytest.raises(ValueError, match=message):
    len(grain_sources.GrainRows(open=opened))


def test_rejects_elements_filtered_out_by_grain():
  rows = grain_sources.GrainRows(
    open=lambda: grain.MapDataset.source([1, 2]).filter(lambda x: x > 1)
  )
  assert rows[1] == 2
  with pytest.raises(
    ValueError, match="element 0 of Grain's source was filter"
  ):
    _ = rows[0]
