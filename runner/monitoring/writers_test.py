"""Tests for event files, with an independent reader, and for a W&B stub."""

import io
import pathlib
import struct
import sys
import types
import wave

from etils import epath
import pytest
from tensorboardX.proto import event_pb2, plugin_hparams_pb2

from paxon.runner import user_error
from paxon.runner.monitoring import metrics_file, mlflow_stand_in, writers


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
  writer = writers.EventFiles(tmp_path, clock=lambda: 1234.5)
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
  writer = writers.EventFiles(tmp_path)
  for step in range(3):
    writer.write(step, "train", {"loss": float(step)})
    writer.flush()
    [path] = (tmp_path / "train").iterdir()
    assert len(_scalars(_read(path))) == step + 1


def test_resumed_run_starts_a_file_that_replaces_later_steps(tmp_path):
  times = iter(range(1000))
  for resume_step in (0, 10):
    writer = writers.EventFiles(
      tmp_path, resume_step=resume_step, clock=lambda: float(next(times))
    )
    writer.write(resume_step + 5, "train", {"loss": 1.0})
    writer.close()
  first, second = map(_read, sorted((tmp_path / "train").iterdir()))
  assert not any(event.HasField("session_log") for event in first)
  start = second[1]
  assert start.session_log.status == event_pb2.SessionLog.START  # pyrefly: ignore
  assert start.step == 11


def test_baselines_are_skipped(tmp_path):
  writer = writers.EventFiles(tmp_path)
  writer.write(0, "baseline/xz", {"bits_per_byte": 2.0})
  writer.close()
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_values_beyond_float32_are_written(tmp_path, value):
  writer = writers.EventFiles(tmp_path)
  writer.write(1, "train", {"loss": value})
  writer.close()
  [path] = (tmp_path / "train").iterdir()
  [(_, _, found)] = _scalars(_read(path))
  assert found != found if value != value else found == float("inf")


class _Run:
  def __init__(self, options):
    self.options, self.logged, self.metrics = options, [], []
    self.summary, self.finished = {}, 0

  def define_metric(self, name, step_metric=None):
    self.metrics.append((name, step_metric))

  def log(self, values):
    self.logged.append(values)

  def finish(self):
    self.finished += 1


@pytest.fixture(name="runs")
def _runs(monkeypatch):
  """Puts a module `wandb` in place; returns the runs it began."""
  runs = []

  def init(**options):
    runs.append(_Run(options))
    return runs[-1]

  module = types.ModuleType("wandb")
  monkeypatch.setattr(module, "init", init, raising=False)
  monkeypatch.setitem(sys.modules, "wandb", module)
  return runs


def test_tensorboard_gets_texts_and_hyperparameters(tmp_path):
  writer = writers.EventFiles(tmp_path, settings={"num_layers": "2"})
  writer.write(1, "train", {"loss": 2.0})
  writer.write_text(3, "train", "samples", "def f():\n  #x")
  writer.write_text(4, "validation", "samples", "y")
  writer.close()
  (path,) = (tmp_path / "train").iterdir()
  events = _read(path)
  values = {v.tag: (e.step, v) for e in events for v in e.summary.value}
  step, text = values["samples/text_summary"]
  assert (step, text.metadata.plugin_data.plugin_name) == (3, "text")
  assert text.tensor.string_val[0] == b"    def f():\n      #x\n"
  start = values["_hparams_/session_start_info"][1].metadata.plugin_data
  assert start.plugin_name == "hparams"
  content = plugin_hparams_pb2.HParamsPluginData.FromString(start.content)
  settings = content.session_start_info.hparams
  assert {k: v.string_value for k, v in settings.items()} == {"num_layers": "2"}
  # Only training has settings.
  (path,) = (tmp_path / "validation").iterdir()
  assert len([v for e in _read(path) for v in e.summary.value]) == 1


def _only_value(folder):
  (path,) = (folder / "train").iterdir()
  (event,) = [event for event in _read(path) if event.summary.value]
  (value,) = event.summary.value
  return event.step, value


def test_tensorboard_gets_histograms(tmp_path):
  writer = writers.EventFiles(tmp_path)
  histogram = metrics_file.Histogram(
    minimum=-1.0,
    maximum=3.0,
    count=4.0,
    total=5.0,
    total_squares=11.0,
    limits=[1.0, 3.0],
    counts=[3.0, 1.0],
  )
  writers_of_all = metrics_file.CompositeWriter([writer])
  writers_of_all.write_histogram(7, "train", "variables/kernel", histogram)
  writers_of_all.close()
  step, value = _only_value(tmp_path)
  assert (step, value.tag) == (7, "variables/kernel")
  assert (value.histo.min, value.histo.max, value.histo.num) == (-1, 3, 4)
  assert (value.histo.sum, value.histo.sum_squares) == (5, 11)
  assert list(value.histo.bucket_limit) == [1, 3]
  assert list(value.histo.bucket) == [3, 1]


def test_tensorboard_gets_images_and_sounds(tmp_path):
  # One gray pixel row of 3 by Pillow's layout: only the header is read.
  png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x03\0\0\0\x02" + bytes(5)
  sound = io.BytesIO()
  with wave.open(sound, "wb") as file:
    file.setnchannels(1)
    file.setsampwidth(2)
    file.setframerate(8000)
    file.writeframes(bytes(20))
  for kind, content, folder in (
    ("image/png", png, tmp_path / "a"),
    ("audio/wav", sound.getvalue(), tmp_path / "b"),
  ):
    writer = writers.EventFiles(folder)
    writer.write_media(3, "train", "examples/00", kind, content)
    writer.close()
  step, value = _only_value(tmp_path / "a")
  assert (step, value.tag) == (3, "examples/00")
  assert (value.image.width, value.image.height) == (3, 2)
  assert value.image.encoded_image_string == png
  _, value = _only_value(tmp_path / "b")
  assert (value.audio.sample_rate, value.audio.length_frames) == (8000, 10)
  assert value.audio.encoded_audio_string == sound.getvalue()
  with pytest.raises(ValueError, match="got 'image/gif'"):
    writer.write_media(3, "train", "x", "image/gif", b"")


def test_metrics_are_sent_by_split(tmp_path, runs):
  writer = writers.WandbWriter(
    epath.Path(tmp_path), project="p", entity="team", config={"seed": 3}
  )
  writer.write(5, "train", {"loss": 2.0, "summaries/stack/rms": 1.5})
  writer.write(5, "validation", {"loss": 3.0})
  writer.write(0, "baseline/xz", {"bits_per_byte": 2.5})
  writer.flush()
  writer.close()
  [run] = runs
  assert run.logged == [
    {"step": 5, "train/loss": 2.0, "train/summaries/stack/rms": 1.5},
    {"step": 5, "validation/loss": 3.0},
  ]
  assert run.summary == {"baseline/xz/bits_per_byte": 2.5}
  assert run.metrics == [("step", None), ("*", "step")]
  assert run.finished == 1
  assert run.options["project"] == "p"
  assert run.options["entity"] == "team"
  assert run.options["config"] == {"seed": 3}
  assert run.options["name"] == tmp_path.name
  assert run.options["resume"] == "allow"


def test_resumed_run_keeps_its_id(tmp_path, runs):
  for name in ("a", "a", "b"):
    folder = epath.Path(tmp_path) / name
    writers.WandbWriter(folder, project="p").close()
  ids = [run.options["id"] for run in runs]
  assert ids[0] == ids[1] != ids[2]


def test_missing_package_is_one_line(tmp_path, monkeypatch):
  # As Python does for a missing package.
  monkeypatch.setitem(sys.modules, "wandb", None)
  message = r"wandb_project is set, but the package wandb cannot .*pip install"
  with pytest.raises(user_error.UserError, match=message):
    writers.check_wandb()
  with pytest.raises(user_error.UserError, match=message):
    writers.WandbWriter(epath.Path(tmp_path), project="p")


@pytest.fixture(name="mlflow")
def _mlflow(monkeypatch):
  """Puts a module `mlflow` in place and returns it."""
  module = mlflow_stand_in.Mlflow()
  monkeypatch.setitem(sys.modules, "mlflow", module)
  return module


def test_mlflow_gets_metrics_by_split_and_parameters(tmp_path, mlflow):
  many = {str(i): i for i in range(120)}
  writer = writers.MlflowWriter(
    epath.Path(tmp_path),
    experiment="e",
    tracking_uri="file:x",
    config={"seed": 3, "task": {"model": {"name": "a" * 9000}}, "many": many},
  )
  writer.write(5, "train", {"loss": 2.0, "summaries/stack/rms": float("nan")})
  writer.write(0, "baseline/a<b", {"bits_per_byte": 2.5})
  writer.write(6, "train", {f"m{i}": 1.0 for i in range(2300)})
  writer.flush()
  writer.close()
  [run] = mlflow.runs.values()
  assert (run.name, run.status) == (tmp_path.name, "FINISHED")
  assert mlflow.uris == ["file:x"]
  assert mlflow.experiments == {"e": run.experiment}
  assert run.params["seed"] == "3"
  assert set(run.params["task.model.name"]) == {"a"}
  assert len(run.params) == 122
  found = [(m.step, m.key, m.value) for m in run.metrics]
  assert found[0] == (5, "train/loss", 2.0)
  assert found[1][1] == "train/summaries/stack/rms"
  assert found[2] == (0, "baseline/a_b/bits_per_byte", 2.5)
  assert len(found) == 2303


def test_resumed_run_keeps_its_mlflow_run(tmp_path, mlflow):
  for name, seed in (("a", 1), ("a", 2), ("b", 3)):
    folder = epath.Path(tmp_path) / name
    writer = writers.MlflowWriter(folder, experiment="e", config={"seed": seed})
    assert [r.status for r in mlflow.runs.values()][-1] == "RUNNING"
    writer.write(seed, "train", {"loss": 1.0})
    writer.close()
  first, second = mlflow.runs.values()
  assert [m.step for m in first.metrics] == [1, 2]
  # Parameters cannot change.
  assert (first.params, second.params) == ({"seed": "1"}, {"seed": "3"})
  assert len(mlflow.experiments) == 1


def test_a_failing_mlflow_server_does_not_end_the_training(
  tmp_path, mlflow, capsys
):
  writer = writers.MlflowWriter(epath.Path(tmp_path), experiment="e")
  mlflow.error = mlflow.MlflowException("no server")
  for step in (1, 2):
    writer.write(step, "train", {"loss": 1.0})
  writer.close()
  assert capsys.readouterr().out == (
    "warning: metrics are not sent to MLflow: no server\n"
    "warning: the MLflow run is not ended: no server\n"
  )
  with pytest.raises(
    user_error.UserError, match=r"mlflow_experiment='f': no s"
  ):
    writers.MlflowWriter(epath.Path(tmp_path) / "b", experiment="f")


def test_missing_mlflow_is_one_line(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "mlflow", None)
  message = r"mlflow_experiment is set, but .* 'pip install mlflow-skinny'"
  with pytest.raises(user_error.UserError, match=message):
    writers.check_mlflow()
  with pytest.raises(user_error.UserError, match=message):
    writers.MlflowWriter(epath.Path(tmp_path), experiment="e")
