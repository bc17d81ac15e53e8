"""Writers of a run's metrics: TensorBoard, W&B, MLflow, and the defaults.

TensorBoard's event files are written without TensorFlow. Each split has its own
directory, so that TensorBoard draws the curves of `train` and `validation` in
one chart. Knobs that were set are hyperparameters, samples and the
configuration are texts, and there are histograms, images and sounds. A file is
a sequence of protocol buffers, each framed by its length and checksums
(TFRecord), and is held in memory and written whole, which object stores
require. A resumed run starts another file, whose first record makes TensorBoard
drop the steps that are trained again.

Weights & Biases is an optional package, imported only if an experiment sets
`observability.wandb_project`. A resumed run continues the same W&B run, whose
id is stored in the run directory. Metrics of repeated steps are sent again.
MLflow is the same, with `observability.mlflow_experiment`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import importlib
import io
import json
import os
import re
import socket
import struct
import time
from typing import Any
import uuid
import wave

from etils import epath
from tensorboardX import record_writer
from tensorboardX import summary as summaries
from tensorboardX.proto import event_pb2, summary_pb2

from paxon.runner import files, user_error
from paxon.runner import run_dir as run_dir_lib
from paxon.runner.monitoring import metrics_file, progress
from paxon.runner.settings import monitoring

_VERSION = "brain.Event:2"
_TRAIN = "train"
# Metrics in TensorBoard's table of hyperparameters.
_COMPARED = ("loss", "bits_per_byte", "accuracy")
# Type checkers cannot see the classes that protobuf makes at import.
_events: Any = event_pb2
_summaries: Any = summary_pb2

# Optional: `pip install paxon[wandb]`.
_WANDB = "wandb"
_WANDB_STEP = "step"
_WANDB_ID_FILE = "wandb.json"
# Optional: `pip install paxon[mlflow]`.
_MLFLOW = "mlflow"
_MLFLOW_ID_FILE = "mlflow.json"
# Limits of a batch, and of a value, in MLflow.
_MLFLOW_METRICS, _MLFLOW_PARAMETERS, _MLFLOW_CHARACTERS = 1000, 100, 500
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w./ -]", re.ASCII)


def make_train_writer(
  run_dir: epath.Path,
  *,
  num_train_steps: int,
  resume_step: int,
  settings: Mapping[str, str] | None = None,
  stream: progress.TextStream | None = None,
  more: Sequence[metrics_file.SummaryWriter] = (),
) -> metrics_file.CompositeWriter:
  """Returns the writers of a training run: files, and progress for the user.

  Metrics of steps after `resume_step` that an earlier attempt wrote are
  dropped. `settings` are the hyperparameters that TensorBoard compares.
  """
  return metrics_file.CompositeWriter(
    [
      metrics_file.MetricsFile(
        run_dir / run_dir_lib.METRICS, resume_step=resume_step
      ),
      EventFiles(
        run_dir / run_dir_lib.EVENTS,
        resume_step=resume_step,
        settings=settings,
      ),
      progress.make(
        num_train_steps=num_train_steps, first_step=resume_step, stream=stream
      ),
      *more,
    ]
  )


def make_services(
  settings: monitoring.MonitoringSettings,
  run_dir: epath.Path,
  *,
  config: Mapping[str, Any],
) -> list[metrics_file.SummaryWriter]:
  """Returns the writers that send metrics elsewhere, with a configuration."""
  found: list[metrics_file.SummaryWriter] = []
  if settings.wandb_project is not None:
    found.append(
      WandbWriter(
        run_dir,
        project=settings.wandb_project,
        entity=settings.wandb_entity,
        config=config,
      )
    )
  if settings.mlflow_experiment is not None:
    found.append(
      MlflowWriter(
        run_dir,
        experiment=settings.mlflow_experiment,
        tracking_uri=settings.mlflow_tracking_uri,
        config=config,
      )
    )
  return found


def make_eval_writer(run_dir: epath.Path) -> metrics_file.CompositeWriter:
  """Returns the writers of a job that evaluates the checkpoints of a run.

  The run may be training meanwhile, so the job writes separate files;
  `metrics_file.read_run` merges them. Earlier metrics are kept.
  """
  folder = run_dir / run_dir_lib.EVAL
  return metrics_file.CompositeWriter(
    [
      metrics_file.MetricsFile(folder / run_dir_lib.METRICS, resume_step=None),
      EventFiles(folder / run_dir_lib.EVENTS),
    ]
  )


class EventFiles(metrics_file.SummaryWriter):
  """Writes TensorBoard's `<folder>/<split>/events.out.tfevents.*`."""

  def __init__(
    self,
    folder: epath.PathLike,
    *,
    resume_step: int = 0,
    settings: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.time,
  ):
    self._folder = epath.Path(folder)
    self._resume_step = resume_step
    self._settings = settings
    self._clock = clock
    self._pace = files.FlushPace()
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())
    # TensorBoard reads files in the order of their names.
    self._name = (
      f"events.out.tfevents.{int(clock() * 1000):014d}.{host}.{os.getpid()}"
    )
    self._records: dict[str, list[bytes]] = {}

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records one scalar per metric; baselines are skipped."""
    if split.startswith(metrics_file.BASELINE_PREFIX):
      return
    summary = _summaries.Summary(
      value=[
        _summaries.Summary.Value(tag=name, simple_value=float(value))
        for name, value in values.items()
      ]
    )
    self._add(step, split, summary)
    if self._pace.is_due():
      self.flush()

  def write_text(self, step: int, split: str, name: str, text: str) -> None:
    """Records a text, which TensorBoard shows as it is."""
    # TensorBoard reads Markdown, where indented lines are code.
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    self._add(step, split, summaries.text(name, lines))

  def write_histogram(
    self, step: int, split: str, name: str, histogram: metrics_file.Histogram
  ) -> None:
    """Records a distribution."""
    value = summaries.histogram_raw(
      name,
      min=histogram.minimum,
      max=histogram.maximum,
      num=histogram.count,
      sum=histogram.total,
      sum_squares=histogram.total_squares,
      bucket_limits=list(histogram.limits),
      bucket_counts=list(histogram.counts),
    )
    self._add(step, split, value)

  def write_media(
    self, step: int, split: str, name: str, kind: str, content: bytes
  ) -> None:
    """Records a PNG image or a WAV sound.

    Raises:
      ValueError: The kind is neither `image/png` nor `audio/wav`.
    """
    if kind == "image/png":
      # After the signature, and the length and the name of the first chunk.
      width, height = struct.unpack(">II", content[16:24])
      image = _summaries.Summary.Image(
        width=width, height=height, encoded_image_string=content
      )
      value = _summaries.Summary.Value(tag=name, image=image)
    elif kind == "audio/wav":
      with wave.open(io.BytesIO(content)) as sound:
        audio = _summaries.Summary.Audio(
          sample_rate=sound.getframerate(),
          num_channels=sound.getnchannels(),
          length_frames=sound.getnframes(),
          encoded_audio_string=content,
          content_type=kind,
        )
      value = _summaries.Summary.Value(tag=name, audio=audio)
    else:
      raise ValueError(f"kind must be image/png or audio/wav, got {kind!r}.")
    self._add(step, split, _summaries.Summary(value=[value]))

  def _add(self, step: int, split: str, summary: Any) -> None:
    if split not in self._records:
      self._records[split] = [self._frame(_events.Event(file_version=_VERSION))]
      if self._resume_step:
        log = _events.SessionLog(status=_events.SessionLog.START)
        # A session begins with the first repeated step.
        start = _events.Event(session_log=log, step=self._resume_step + 1)
        self._records[split].append(self._frame(start))
      if split == _TRAIN and self._settings is not None:
        metrics = dict.fromkeys(_COMPARED, 0.0)
        for each in summaries.hparams(dict(self._settings), metrics)[:2]:
          self._records[split].append(self._frame(_events.Event(summary=each)))
    event = _events.Event(step=step, summary=summary)
    self._records[split].append(self._frame(event))

  def flush(self) -> None:
    """Writes the files of all splits."""
    self._pace.run(self._write_files)

  def close(self) -> None:
    """Flushes."""
    self.flush()

  def _frame(self, event: Any) -> bytes:
    event.wall_time = self._clock()
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return (
      length
      + struct.pack("<I", record_writer.masked_crc32c(length))
      + data
      + struct.pack("<I", record_writer.masked_crc32c(data))
    )

  def _write_files(self) -> None:
    for split, records in self._records.items():
      path = self._folder / split / self._name
      files.write_bytes(path, b"".join(records))


class WandbWriter(metrics_file.SummaryWriter):
  """Sends metrics to Weights & Biases as `<split>/<metric>`.

  Baselines go to the summary of the W&B run.
  """

  def __init__(
    self,
    run_dir: epath.Path,
    *,
    project: str,
    entity: str | None = None,
    config: Mapping[str, Any] | None = None,
  ) -> None:
    """Starts a W&B run, or resumes that of the run directory."""
    self._run = _import_wandb().init(
      project=project,
      entity=entity,
      name=run_dir.name,
      id=_wandb_id(run_dir),
      resume="allow",
      config=dict(config or {}),
      # W&B's own files are large and specific to this machine.
      dir=os.fspath(run_dir) if files.is_local(run_dir) else None,
    )
    # W&B's own step cannot decrease, which a resumed run requires.
    self._run.define_metric(_WANDB_STEP)
    self._run.define_metric("*", step_metric=_WANDB_STEP)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Queues metrics, which the package sends in the background."""
    named = {f"{split}/{name}": float(value) for name, value in values.items()}
    if split.startswith(metrics_file.BASELINE_PREFIX):
      self._run.summary.update(named)
    else:
      self._run.log({_WANDB_STEP: step, **named})

  def close(self) -> None:
    """Sends the remaining metrics and ends the W&B run."""
    self._run.finish()


def check_wandb() -> None:
  """Raises UserError if the package `wandb` cannot be imported."""
  _import_wandb()


def _import_wandb() -> Any:
  return _import(_WANDB, setting="wandb_project", distribution=_WANDB)


def _import(name: str, *, setting: str, distribution: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise user_error.UserError(
      f"observability.{setting} is set, but the package {name} cannot be"
      f" imported ({error}). Install it with 'pip install {distribution}', or"
      f" unset {setting}."
    ) from error


def _read_id(path: epath.Path) -> str:
  def make(value: Any) -> str:
    files.check_type("id", value["id"], str)
    return value["id"]

  return files.read_json(path, make, kind="the id of a run")


def _wandb_id(run_dir: epath.Path) -> str:
  path = run_dir / _WANDB_ID_FILE
  if path.exists():
    return _read_id(path)
  new = uuid.uuid4().hex[:16]
  files.write_text(path, json.dumps({"id": new}) + "\n")
  return new


class MlflowWriter(metrics_file.SummaryWriter):
  """Sends metrics to MLflow as `<split>/<metric>`, in the background.

  The configuration are the parameters of the MLflow run, which cannot change:
  a resumed run keeps those of its first attempt. A server that fails during the
  training does not end it.
  """

  def __init__(
    self,
    run_dir: epath.Path,
    *,
    experiment: str,
    tracking_uri: str | None = None,
    config: Mapping[str, Any] | None = None,
  ) -> None:
    """Starts an MLflow run, or resumes that of the run directory.

    Raises:
      user_error.UserError: MLflow rejects the run, or cannot be reached.
    """
    self._mlflow = _import_mlflow()
    self._thread = futures.ThreadPoolExecutor(max_workers=1)
    self._failed = False
    try:
      self._client = self._mlflow.MlflowClient(tracking_uri=tracking_uri)
      self._id = self._open(run_dir, experiment, config or {})
    except self._mlflow.exceptions.MlflowException as error:
      raise user_error.UserError(
        f"observability.mlflow_experiment={experiment!r}: {error}"
      ) from error

  def _open(
    self, run_dir: epath.Path, experiment: str, config: Mapping[str, Any]
  ) -> str:
    """Returns the id of the run, which is running."""
    client, path = self._client, run_dir / _MLFLOW_ID_FILE
    if path.exists():
      found = _read_id(path)
      client.update_run(found, status="RUNNING")
      return found
    known = client.get_experiment_by_name(experiment)
    number = (
      known.experiment_id if known else client.create_experiment(experiment)
    )
    new = client.create_run(number, run_name=run_dir.name).info.run_id
    parameters = [
      self._mlflow.entities.Param(name, value[:_MLFLOW_CHARACTERS])
      for name, value in _flatten(config)
    ]
    for first in range(0, len(parameters), _MLFLOW_PARAMETERS):
      batch = parameters[first : first + _MLFLOW_PARAMETERS]
      client.log_batch(new, params=batch)
    files.write_text(path, json.dumps({"id": new}) + "\n")
    return new

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Queues metrics."""
    now = int(time.time() * 1000)
    metrics = [
      self._mlflow.entities.Metric(
        _NOT_IN_MLFLOW_NAMES.sub("_", f"{split}/{name}"),
        float(value),
        now,
        step,
      )
      for name, value in values.items()
    ]
    for first in range(0, len(metrics), _MLFLOW_METRICS):
      self._thread.submit(self._send, metrics[first : first + _MLFLOW_METRICS])

  def _send(self, metrics: Sequence[Any]) -> None:
    try:
      self._client.log_batch(self._id, metrics=metrics)
    except Exception as error:  # Raised by MLflow, the network or a disk.
      if not self._failed:
        print(f"warning: metrics are not sent to MLflow: {error}", flush=True)
      self._failed = True

  def close(self) -> None:
    """Sends the remaining metrics and ends the MLflow run."""
    self._thread.shutdown()
    try:
      self._client.set_terminated(self._id)
    except self._mlflow.exceptions.MlflowException as error:
      print(f"warning: the MLflow run is not ended: {error}", flush=True)


def check_mlflow() -> None:
  """Raises UserError if the package `mlflow` cannot be imported."""
  _import_mlflow()


def _import_mlflow() -> Any:
  return _import(
    _MLFLOW, setting="mlflow_experiment", distribution="mlflow-skinny"
  )


def _flatten(
  values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
  """Yields the names and texts of the values of nested mappings."""
  for key, value in values.items():
    name = f"{prefix}{key}"
    if isinstance(value, Mapping):
      yield from _flatten(value, f"{name}.")
    else:
      yield _NOT_IN_MLFLOW_NAMES.sub("_", name), str(value)
