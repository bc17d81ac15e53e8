"""Training from a notebook: a run as an object.

  run = interactive.train(quickstart.PythonStdlibLm(num_layers=2), "runs/a")
  run.history()["loss"]              # A NumPy array; also of other splits.
  run.plot("loss")                   # The notebook shows the curves.
  run.decode(["def "], temperature=0.5)[0].text
  run = run.train(num_train_steps=2000)

The files are those of the command line, so each can resume, evaluate and watch
what the other has trained. Interrupting the kernel once stops the training
after a step and a checkpoint; the same call resumes it.
"""

from collections.abc import Sequence
import dataclasses
import os
from typing import Any

from etils import epath
import fiddle as fdl
import numpy as np

from paxon.layers.decoding import sampling
from paxon.learners import train_state
from paxon.runner import epochs, user_error
from paxon.runner import experiment as experiment_lib
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.configuration import resolving
from paxon.runner.generation import samples
from paxon.runner.hosts import compilation_cache
from paxon.runner.monitoring import metric_chart, metrics_file
from paxon.runner.session import restore, run_files, serving
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.runner.training import train as train_program

_SAMPLING = frozenset(f.name for f in dataclasses.fields(sampling.Settings))


class Run:
  """A run of an experiment and its results.

  Attributes:
    experiment: The experiment with its knobs.
    config: Its configuration.
    run_dir: The run directory.
  """

  def __init__(
    self,
    experiment: experiment_lib.Experiment,
    config: fdl.Config[job_lib.Job],
    run_dir: epath.Path,
    state: train_state.TrainState | None = None,
  ):
    self.experiment = experiment
    self.config = config
    self.run_dir = run_dir
    self._state = state
    self._session: session_lib.Session | None = None
    self._generator: samples.Generator | None = None
    self._settings: generation.GenerationSettings | None = None

  @property
  def state(self) -> train_state.TrainState:
    """The state of training or of the newest checkpoint, without moments.

    Raises:
      UserError: There is no checkpoint, or it does not fit the experiment.
    """
    return self._open()[1]

  def history(self, split: str = "train") -> dict[str, np.ndarray]:
    """Returns the metrics of a split by name, since the first step of the run.

    Each array has a value per record, NaN where the record lacks the metric;
    `step` has the steps.

    Raises:
      UserError: The run has no metrics of the split.
    """
    every = metrics_file.read_run(self.run_dir)
    records = [record for record in every if record.split == split]
    if not records:
      splits = ", ".join(dict.fromkeys(record.split for record in every))
      raise user_error.UserError(
        f"{os.fspath(self.run_dir)} has no metrics of the split {split!r};"
        f" it has {splits or 'none yet'}."
      )
    names = dict.fromkeys(name for r in records for name in r.values)
    found = {
      name: np.array([r.values.get(name, np.nan) for r in records])
      for name in names
    }
    return {"step": np.array([r.step for r in records]), **found}

  def plot(self, metric: str = "loss", *others: "Run") -> metric_chart.Chart:
    """Returns the curves of a metric of this run and of others.

    Raises:
      UserError: No run has the metric.
    """
    folders = list(dict.fromkeys(run.run_dir for run in (self, *others)))
    is_short = len({folder.name for folder in folders}) == len(folders)
    records = {
      folder.name if is_short else os.fspath(folder): metrics_file.read_run(
        folder
      )
      for folder in folders
    }
    return metric_chart.make(records, metric)

  def decode(
    self, prompts: Sequence[samples.Prompt], **settings: Any
  ) -> list[samples.Sample]:
    """Continues texts, or lists of messages with the model's chat template.

    Args:
      prompts: Prompts to continue.
      **settings: Fields of `GenerationSettings`, such as `max_new_tokens`, and
        of `sampling.Settings`, such as `temperature`; by default those of the
        experiment.

    Raises:
      UserError: A setting does not exist, or the model cannot generate.
    """
    session, state = self._open()
    wanted = _change(session.job.generation, settings)
    if self._generator is None or self._settings != wanted:
      job = dataclasses.replace(session.job, generation=wanted)
      # Compiled once for all prompts with these settings.
      self._settings, self._generator = (
        wanted,
        samples.Generator(dataclasses.replace(session, job=job), state),
      )
    generator = self._generator
    return generator.draw([generator.encode(prompt) for prompt in prompts])

  def train(self, *, num_train_steps: int | None = None) -> "Run":
    """Resumes the run, with another number of steps if it is given."""
    experiment = self.experiment
    if num_train_steps is not None:
      experiment = experiment.replace(num_train_steps=num_train_steps)
    return train(experiment, self.run_dir)

  def _open(self) -> tuple[session_lib.Session, train_state.TrainState]:
    """Returns the job on its devices, and the state."""
    if self._session is None:
      session = session_lib.open_session(resolving.build(self.config))
      if self._state is None:
        folder = serving.checkpoints(session.job, self.run_dir)
        session, self._state = restore.read_for_evaluation(session, folder)
      self._session = session
    assert self._state is not None
    return self._session, self._state


def train(
  experiment: experiment_lib.Experiment, run_dir: epath.PathLike
) -> Run:
  """Trains an experiment in a run directory, or resumes it there.

  Raises:
    UserError: See `train.run`; or a knob has a value that cannot be stored.
  """
  compilation_cache.enable(os.environ)
  overrides = resolving.to_overrides(experiment)
  config = experiment.job()
  overrides = epochs.fix_num_steps(overrides, experiment, config)
  job = resolving.build(config)
  folder = run_dirs.resolve(os.fspath(run_dir), os.environ)
  is_new = run_dirs.create(folder)
  try:
    with resolving.user_errors(config):
      result = train_program.run(job, config, folder, overrides=overrides)
  except user_error.UserError:
    if is_new:
      run_dirs.remove_empty(folder)
    raise
  return Run(experiment, config, folder, result.state)


def load(run_dir: epath.PathLike) -> Run:
  """Returns a run that this or another process has trained, or is training.

  Raises:
    UserError: There is no such run, or its experiment cannot be imported.
  """
  path = run_dirs.resolve(os.fspath(run_dir), os.environ)
  folder = run_dirs.check_existing(path)
  stored = run_files.complete_settings(None, (), folder)
  found = resolving.resolve(stored.experiment, stored.overrides)
  return Run(found.experiment, found.config, folder)


def _change(
  settings: generation.GenerationSettings | None, given: dict[str, Any]
) -> generation.GenerationSettings:
  """Returns settings with other values for some fields."""
  settings = settings or generation.GenerationSettings()
  known = {field.name for field in dataclasses.fields(settings)}
  unknown = sorted(given.keys() - known - _SAMPLING)
  if unknown:
    raise user_error.UserError(
      f"decode has no setting {unknown[0]!r}; settings are"
      f" {', '.join(sorted(known | _SAMPLING))}."
    )
  fields = {name: value for name, value in given.items() if name in known}
  sampler = {name: value for name, value in given.items() if name not in known}
  if sampler:
    current = generation.to_settings(settings.sampler) or sampling.Settings()
    fields["sampler"] = dataclasses.replace(current, **sampler)
  return dataclasses.replace(settings, **fields)
