"""Tests for event files, read by a reader of the format written here."""

import pathlib
import struct

import pytest
from tensorboardX.proto import event_pb2

from paxon.runner.monitoring import event_file


def _crc32c(data: bytes) -> int:
  """The checksum by its definition (RFC 3720), one bit at a time."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
  return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
  crc = _crc32c(data)
  return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _read(path: pathlib.Path) -> list:
  """Reads a TFRecord file of events and checks every checksum."""
  data, events = path.read_bytes(), []
  while data:
    length, length_crc = struct.unpack("<QI", data[:12])
    assert length_crc == _masked(data[:8])
    body = data[12 : 12 + length]
    (body_crc,) = struct.unpack("<I", data[12 + length : 16 + length])
    assert body_crc == _masked(body)
    events.append(event_pb2.Event.FromString(body))  # pyrefly: ignore
    data = data[16 + length :]
  return events


def _scalars(events):
  return [
    (event.step, value.tag, value.simple_value)
    for event in events
    for value in event.summary.value
  ]


def test_checksum_of_the_reader_is_the_standard_one():
  assert _crc32c(b"123456789") == 0xE3069283


def test_each_split_has_a_folder_with_its_scalars(tmp_path):
  writer = event_file.EventFiles(tmp_path, clock=lambda: 1234.5)
  writer.write(1, "train", {"loss": 2.5, "learning_rate": 0.25})
  writer.write(2, "train", {"loss": 2.0})
  writer.write(2, "validation", {"loss": 3.0})
  writer.close()
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    *("train", "validation"),
  ]
  [path] = (tmp_path / "train").iterdir()
  assert path.name.startswith("events.out.tfevents.00000001234500.")
  events = _read(path)
  assert events[0].file_version == "brain.Event:2"
  assert {event.wall_time for event in events} == {1234.5}
  assert _scalars(events) == [
    (1, "loss", 2.5),
    (1, "learning_rate", 0.25),
    (2, "loss", 2.0),
  ]
  [path] = (tmp_path / "validation").iterdir()
  assert _scalars(_read(path)) == [(2, "loss", 3.0)]


def test_files_are_whole_after_every_flush(tmp_path):
  writer = event_file.EventFiles(tmp_path)
  for step in range(3):
    writer.write(step, "train", {"loss": float(step)})
    writer.flush()
    [path] = (tmp_path / "train").iterdir()
    assert len(_scalars(_read(path))) == step + 1


def test_resumed_run_begins_a_file_that_replaces_later_steps(tmp_path):
  times = iter(range(1000))
  for resume_step in (0, 10):
    writer = event_file.EventFiles(
      tmp_path, resume_step=resume_step, clock=lambda: float(next(times))
    )
    writer.write(resume_step + 5, "train", {"loss": 1.0})
    writer.close()
  first, second = map(_read, sorted((tmp_path / "train").iterdir()))
  assert not any(event.HasField("session_log") for event in first)
  start = second[1]
  assert start.session_log.status == event_pb2.SessionLog.START  # pyrefly: ignore
  assert start.step == 11


def test_baselines_are_left_out(tmp_path):
  writer = event_file.EventFiles(tmp_path)
  writer.write(0, "baseline/xz", {"bits_per_byte": 2.0})
  writer.close()
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_values_beyond_float32_are_written(tmp_path, value):
  writer = event_file.EventFiles(tmp_path)
  writer.write(1, "train", {"loss": value})
  writer.close()
  [path] = (tmp_path / "train").iterdir()
  [(_, _, found)] = _scalars(_read(path))
  assert found != found if value != value else found == float("inf")
