"""Tests for TFRecord files, their checksum and their examples."""

import contextlib
import os

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.inputs.tf_records import crc32c, tf_example, tf_record_files


@pytest.mark.parametrize(
  ("data", "expected"),
  # RFC 3720, B.4, and the check value of the CRC catalogue.
  [
    (b"", 0),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
  ],
)
def test_checksums_match_the_standard(data, expected):
  assert crc32c.crc32c(data) == expected


def _bitwise(data: bytes) -> int:
  state = 0xFFFFFFFF
  for byte in data:
    state ^= byte
    for _ in range(8):
      state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
  return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("length", [1, 3, 4, 5, 1023, 1024, 1025, 1027, 3000])
def test_checksum_of_any_length_matches_the_definition(length):
  data = np.random.default_rng(length).bytes(length)
  assert crc32c.crc32c(data) == _bitwise(data)


def test_checksums_of_rows_are_those_of_each():
  rows = np.random.default_rng(0).integers(0, 256, (5, 8)).astype(np.uint8)
  found = crc32c.crc32c_rows(rows)
  assert found.tolist() == [_bitwise(row.tobytes()) for row in rows]


RECORDS = [b"first", b"", b"x" * 3000, b"last"]


@pytest.fixture
def path(tmp_path):
  file = tmp_path / "some.tfrecord-00000-of-00001"
  assert tf_record_files.write(file, RECORDS) == 4
  return str(file)


def test_records_have_random_access(path):
  file = tf_record_files.TfRecordFile(path)
  assert len(file) == 4
  assert [file[i] for i in (3, 0, 2, 1)] == [RECORDS[i] for i in (3, 0, 2, 1)]


def test_indices_are_saved_until_the_file_changes(path, tmp_path):
  folder = tmp_path / "index"
  file = tf_record_files.TfRecordFile(path, index_folder=folder)
  assert len(file) == 4
  (kept,) = folder.iterdir()
  begin = kept.stat().st_mtime_ns
  again = tf_record_files.TfRecordFile(path, index_folder=folder)
  assert again[2] == RECORDS[2]
  assert kept.stat().st_mtime_ns == begin
  tf_record_files.write(path, [*RECORDS, b"more"])
  os.utime(path, ns=(begin + 10**9, begin + 10**9))
  other = tf_record_files.TfRecordFile(path, index_folder=folder)
  assert len(other) == 5


def test_processes_with_the_same_id_save_indices_at_once(
  path, tmp_path, monkeypatch
):
  save, folder = np.save, tmp_path / "index"

  def late_save(file, places):
    # Another machine's process with the same id writes in between.
    monkeypatch.setattr(np, "save", save)
    other = tf_record_files.TfRecordFile(path, index_folder=folder)
    assert len(other) == 4
    save(file, places)

  monkeypatch.setattr(np, "save", late_save)
  assert len(tf_record_files.TfRecordFile(path, index_folder=folder)) == 4
  assert len(list(folder.iterdir())) == 1


def _changed(path: str, place: int, value: int) -> None:
  with open(path, "r+b") as file:
    file.seek(place)
    old = file.read(1)[0]
    file.seek(place)
    file.write(bytes([old ^ value]))


def test_a_changed_byte_of_data_names_file_and_record(path):
  # Records 0 and 1 take 21 and 16 bytes; the data of record 2 begins at 49.
  _changed(path, 100, 1)
  file = tf_record_files.TfRecordFile(path)
  assert file[1] == b""
  with pytest.raises(
    ValueError, match=r"some\.tfrecord-.*, record 2: the data"
  ):
    _ = file[2]


@pytest.mark.parametrize("place", [21, 24, 37, 40])
def test_a_changed_length_names_file_and_record(path, place):
  _changed(path, place, 3)
  number = 1 if place < 37 else 2
  with pytest.raises(ValueError, match=f"record {number}: its length does not"):
    len(tf_record_files.TfRecordFile(path))


@pytest.mark.parametrize(("size", "record"), [(3060, 3), (3070, 3), (100, 2)])
def test_a_file_that_is_cut_off_names_the_record(path, size, record):
  os.truncate(path, size)
  with pytest.raises(
    ValueError, match=f"record {record}: the file is truncated"
  ):
    len(tf_record_files.TfRecordFile(path))


def test_files_are_concatenated_by_name(tmp_path):
  for number in (1, 0, 2):
    records = [b"%d.%d" % (number, i) for i in range(number)]
    tf_record_files.write(tmp_path / f"part-{number}", records)
  files = tf_record_files.TfRecordFiles(files=str(tmp_path / "part-*"))
  assert [files[i] for i in range(len(files))] == [b"1.0", b"2.0", b"2.1"]
  assert files.name(2).endswith("part-2, record 1")
  with pytest.raises(IndexError, match="no record 3 of 3"):
    _ = files[3]
  parts = [str(tmp_path / "part-2"), str(tmp_path / "part-1")]
  both = tf_record_files.TfRecordFiles(files=parts)
  assert both[0] == b"2.0"
  # A file that matches two patterns is read once.
  overlapping = [str(tmp_path / "part-2"), str(tmp_path / "part-*")]
  files = tf_record_files.TfRecordFiles(files=overlapping)
  assert [files[i] for i in range(len(files))] == [b"2.0", b"2.1", b"1.0"]


def test_rejects_missing_or_empty_files(tmp_path):
  with pytest.raises(FileNotFoundError, match="no file has the name"):
    len(tf_record_files.TfRecordFiles(files=str(tmp_path / "none-*")))
  tf_record_files.write(tmp_path / "empty", [])
  with pytest.raises(ValueError, match="holds no records"):
    len(tf_record_files.TfRecordFiles(files=str(tmp_path / "empty")))
  with pytest.raises(ValueError, match="files must not be empty"):
    tf_record_files.TfRecordFiles(files="")


def test_examples_of_each_type_round_trip():
  features = {
    "ids": np.array([1, -2, 2**62, 127, 128], np.int64),
    "scores": np.array([0.5, -1.25], np.float32),
    "texts": np.array([b"one", b""], object),
    "none": np.zeros(0, np.int64),
  }
  found = tf_example.parse(tf_example.serialize(features))
  assert sorted(found) == sorted(features)
  for name in ("ids", "scores", "texts"):
    assert found[name].dtype == features[name].dtype
    assert found[name].tolist() == features[name].tolist()
  assert found["none"].shape == (0,)


def test_reads_unpacked_integers():
  # Feature 3 (int64 list) with two fields 1 of wire type 0: 5 and 300.
  feature = bytes.fromhex("1a05080508ac02")
  entry = b"\x0a\x01n\x12" + bytes([len(feature)]) + feature
  features = b"\x0a" + bytes([len(entry)]) + entry
  record = b"\x0a" + bytes([len(features)]) + features
  assert tf_example.parse(record)["n"].tolist() == [5, 300]


@settings(max_examples=50)
@given(st.binary(max_size=40))
def test_any_bytes_are_rejected_or_read(data):
  with contextlib.suppress(ValueError):
    found = tf_example.parse(data)
    assert all(value.ndim == 1 for value in found.values())


@pytest.mark.parametrize("data", [b"\x0a\x09", b"\x0b", b"\x80"])
def test_rejects_bytes_that_are_not_an_example(data):
  with pytest.raises(ValueError, match=r"not a tf\.train\.Example"):
    tf_example.parse(data)


def test_rejects_unsupported_features():
  with pytest.raises(ValueError, match="'x' must be 1-D, got the shape"):
    tf_example.serialize({"x": np.zeros((2, 2))})
  with pytest.raises(ValueError, match="'x' must hold integers, floats"):
    tf_example.serialize({"x": np.array([None], object)})
