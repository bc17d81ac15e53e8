"""Files that describe a run: its settings, configuration and finished marker.

`settings.json` has the experiment and its `--fdl.` arguments in their order, so
that evaluation and decoding can resolve the configuration again. The resolved
configuration is stored as text, which is compared when the run resumes. The
finished marker ends programs that follow the run.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import glob
import json
import os
import sys
import time
from typing import Any

from etils import epath
import fiddle as fdl

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import record_files
from paxon.runner import experiment as experiment_lib
from paxon.runner import files, knobs, run_code, run_dir, user_error
from paxon.runner import job as job_lib
from paxon.runner.configuration import comparison, dump, find_experiment
from paxon.runner.configuration import overrides as overrides_lib

_PAUSE_SECONDS = 2.0
# Length of a path or value in an error.
_MAX_SHOWN = 200
# Whose functions the settings of a run may name.
_PACKAGES = frozenset({"flax", "jax", "jaxlib", "optax", "paxon"})
# In the facts of a run's inputs: the sources of its copies.
COPIES = "copies"


def store_config(config: fdl.Buildable, folder: epath.Path) -> None:
  """Writes a configuration, replacing a stored one."""
  files.write_text(folder / run_dir.CONFIG_TEXT, dump.to_text(config))


def store_tokenizer(job: job_lib.Job, folder: epath.Path) -> None:
  """Writes the facts of the task's tokenizer, if it has one."""
  if job.task.tokenizer is not None:
    facts = tokenizer_protocol.describe(job.task.tokenizer)
    text = json.dumps(facts, indent=1, sort_keys=True)
    files.write_text(folder / run_dir.TOKENIZER, f"{text}\n")


def check_tokenizer(job: job_lib.Job, folder: epath.Path) -> None:
  """Raises UserError if a run was trained with another tokenizer.

  Runs without stored facts are not checked.
  """
  if job.task.tokenizer is None:
    return
  try:
    stored = files.read_json(
      folder / run_dir.TOKENIZER,
      files.to_object,
      kind="the facts of a tokenizer",
      advice="Remove it, and the tokenizer is not compared.",
    )
  except FileNotFoundError:
    return
  try:
    here = tokenizer_protocol.describe(job.task.tokenizer)
  except (OSError, ValueError) as error:
    raise user_error.UserError(
      f"{folder} was trained with a tokenizer that cannot be read: {error}"
    ) from error
  for key in sorted(stored.keys() & here.keys()):
    if stored[key] != here[key]:
      raise user_error.UserError(
        f"{folder} was trained by a tokenizer with {key}"
        f" {shorten(str(stored[key]))} ({run_dir.TOKENIZER}), and this one has"
        f" {here[key]}; use the tokenizer of the run."
      )


def copy_files(job: job_lib.Job, folder: epath.Path) -> None:
  """Copies what belongs to a run; existing files stay as they are.

  Raises:
    UserError: A folder or file does not exist.
  """
  for name, given in job.run_files.items():
    source, target = run_dir.resolve(given, os.environ), folder / name
    if source.is_file() and not target.exists():
      files.write_bytes(target, source.read_bytes())
    if not source.is_dir() and not target.exists():
      raise user_error.UserError(
        f"Job.run_files[{name!r}] is {os.fspath(source)}, which is not a"
        " folder or a file."
      )
    # A run that was killed has some of the files, each of them whole.
    for each in source.iterdir() if source.is_dir() else ():
      if not each.is_dir() and not (target / each.name).exists():
        files.check_link(each, folder=source)
        data = files.read_bytes(each, max_bytes=files.MAX_LINES_BYTES)
        files.write_bytes(target / each.name, data)


def shorten(text: str) -> str:
  """Returns a path or value of a run for an error."""
  return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The experiment and the overrides of a command line.

  Attributes:
    experiment: The import path of its class.
    overrides: The assignments, as they were typed.
    notes: Lines to print.
  """

  experiment: str
  overrides: tuple[overrides_lib.Override, ...]
  notes: tuple[str, ...] = ()


def resolve_paths(
  experiment: experiment_lib.Experiment,
  overrides: Sequence[overrides_lib.Override],
) -> tuple[overrides_lib.Override, ...]:
  """Returns overrides with absolute paths of existing files.

  Args:
    experiment: The experiment, which names its knobs of paths.
    overrides: Assignments; other knobs do not change.
  """
  found = []
  for each in overrides:
    if each.path in experiment.path_knobs:
      given = getattr(experiment, each.path)
      path = given
      if isinstance(given, str):
        path = _resolve_path(given)
      elif isinstance(given, tuple):
        path = tuple(map(_resolve_path, given))
      if path != given:
        each = overrides_lib.Override(each.path, str(path))
    found.append(each)
  return tuple(found)


def _resolve_path(given: str) -> str:
  """Returns the absolute path or pattern of existing files, or the value."""
  if not files.is_local(given):
    return given
  path = os.fspath(run_dir.resolve(given, os.environ))
  # A value such as `bytes` is no file. Token files have no ending here.
  exists = any(
    os.path.exists(each) or glob.glob(each, recursive=True)
    for each in (f"{path}.idx", *record_files.split_patterns(path))
  )
  return path if exists else given


def use_copies(
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  folder: epath.Path,
  *,
  given: Sequence[overrides_lib.Override],
  packages: Sequence[str] = (),
) -> tuple[tuple[overrides_lib.Override, ...], tuple[str, ...]]:
  """Replaces knobs of paths by the copies that a run has (`copy_files`).

  Given ones are replaced only if they do not exist.

  Args:
    experiment: The name of the experiment.
    overrides: All assignments.
    folder: The run directory.
    given: The assignments of the command line.
    packages: Packages of experiments, which errors suggest.

  Returns:
    The assignments, and a line for each path that does not exist.
  """
  sources = read_sources(folder)
  if not sources:
    return tuple(overrides), ()
  cls = find_experiment.find_experiment(experiment, packages=packages)
  kept = {each.path for each in given}
  found = {each.path: each for each in overrides}
  notes = []
  for knob in cls.path_knobs:
    value = found[knob].text if knob in found else getattr(cls, knob, None)
    if not isinstance(value, str) or not files.is_local(value):
      continue
    place = run_dir.resolve(value.strip("'\""), os.environ)
    copy = _find_copy(os.fspath(place), sources, folder)
    exists = place.exists()
    if copy is None or copy == place or (exists and knob in kept):
      continue
    found[knob] = overrides_lib.Override(knob, os.fspath(copy))
    if not exists:
      notes.append(
        f"{knob}: {os.fspath(place)} does not exist; using the copy in"
        f" {os.fspath(folder)}"
      )
  return tuple(found.values()), tuple(notes)


def read_input_facts(folder: epath.Path) -> dict[str, Any]:
  """Returns the hashes of a run's inputs, none without the file.

  See `resume_checks.describe_inputs`.

  Raises:
    files.DamagedFileError: The file cannot be read.
  """

  def make(content: Any) -> dict[str, Any]:
    files.check_type("the content", content, dict)
    return content

  if not folder.is_dir():
    return {}
  try:
    return files.read_json(
      folder / run_dir.INPUT_FACTS, make, kind="the hashes of a run's inputs"
    )
  except FileNotFoundError:
    return {}


def read_sources(folder: epath.Path) -> dict[str, str]:
  """Returns the first sources of a run's copies by their names in its folder.

  A run that has resumed with its copies is configured with these.
  """
  path = folder / run_dir.CONFIG_TEXT
  found = read_input_facts(folder).get(COPIES)
  try:
    if not isinstance(found, dict):
      text = comparison.values(files.read_text(path)).get("run_files", "{}")
      found = ast.literal_eval(text)
    return {
      str(name): os.fspath(run_dir.resolve(source, os.environ))
      for name, source in found.items()
    }
  except (OSError, ValueError, SyntaxError, AttributeError, TypeError):
    return {}


def _find_copy(
  place: str, sources: Mapping[str, str], folder: epath.Path
) -> epath.Path | None:
  """Returns the path in a run directory that can replace a path.

  If `a/b` was copied as `c/b`, `c` replaces `a`.
  """
  for name, source in sources.items():
    rest = source.removeprefix(place)
    if rest and (rest == source or not rest.startswith("/")):
      continue
    path = os.fspath(folder / name)
    if path.endswith(rest) and (folder / name).exists():
      return epath.Path(path.removesuffix(rest))
  return None


def store_settings(
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  folder: epath.Path,
) -> None:
  """Writes settings, replacing stored ones.

  Paths in the run directory are stored so that it can be moved.
  """
  here = os.fspath(folder)
  content = {
    "experiment": experiment,
    "overrides": [
      f"--{overrides_lib.PREFIX}{each.path}={each.text}"
      if each.text != here and not each.text.startswith(f"{here}/")
      else f"--{overrides_lib.PREFIX}{each.path}={run_dir.HERE}"
      f"{each.text.removeprefix(here)}"
      for each in overrides
    ],
  }
  files.write_text(
    folder / run_dir.SETTINGS, json.dumps(content, indent=1) + "\n"
  )


def read_settings(folder: epath.Path) -> Settings | None:
  """Returns the stored settings of a run, None without; raises UserError.

  Modules in its directory are rejected from now on (`run_code`), and overrides
  may name functions only of the packages in `_PACKAGES` and of the package of
  the experiment.
  """
  run_code.reject(folder)

  def make(content: Any) -> Settings:
    overrides, name = content["overrides"], content["experiment"]
    files.check_type("experiment", name, str)
    files.check_type("overrides", overrides, list)
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names:
      raise ValueError(f"its experiment is {name!r}, of Python's own modules")
    found = []
    for each in overrides:
      files.check_type("overrides[]", each, str)
      text = each.replace(run_dir.HERE, os.fspath(folder))
      try:
        override = overrides_lib.parse_argument(text)
      except user_error.UserError as error:
        raise ValueError(str(error)) from error
      if override is None:
        raise ValueError(f"{each!r} is not --{overrides_lib.PREFIX}NAME=VALUE")
      packages = _PACKAGES | {package}
      found.append(dataclasses.replace(override, packages=packages))
    return Settings(experiment=name, overrides=tuple(found))

  try:
    return files.read_json(
      folder / run_dir.SETTINGS,
      make,
      kind="the settings of a run",
      advice="Remove it, and give --exp and every --fdl. of the training.",
    )
  except FileNotFoundError:
    return None


def complete_settings(
  experiment: str | None,
  given: Sequence[overrides_lib.Override],
  folder: epath.Path,
  *,
  packages: Sequence[str] = (),
  is_training: bool = False,
) -> Settings:
  """Adds the settings of a run to those of a command line.

  They are not added for another experiment than that of the run. Files that the
  run has copied replace their sources, in training only missing ones.

  Args:
    experiment: Its name on the command line; None for that of the run.
    given: The assignments of the command line.
    folder: The run directory.
    packages: Packages of experiments, which errors suggest.
    is_training: Whether the run is to be resumed, not only read.

  Raises:
    UserError: There is no such experiment, or none is named anywhere.
  """
  found = _merge_settings(experiment, given, folder, packages)
  overrides, notes = use_copies(
    found.experiment,
    found.overrides,
    folder,
    given=found.overrides if is_training else given,
    packages=packages,
  )
  return dataclasses.replace(
    found, overrides=overrides, notes=(*found.notes, *notes)
  )


def _merge_settings(
  experiment: str | None,
  given: Sequence[overrides_lib.Override],
  folder: epath.Path,
  packages: Sequence[str],
) -> Settings:
  settings = read_settings(folder)
  if settings is None:
    if not experiment:
      raise user_error.UserError(
        f"--exp is missing, and {os.fspath(folder)} has no"
        f" {run_dir.SETTINGS} with the experiment that was trained there."
      )
    return Settings(experiment=experiment, overrides=tuple(given))
  if experiment:
    cls = find_experiment.find_experiment(experiment, packages=packages)
    if cls.import_path() != settings.experiment:
      note = (
        f"the run's experiment is {settings.experiment}; its settings are not"
        f" used for {experiment}"
      )
      return Settings(
        experiment=experiment, overrides=tuple(given), notes=(note,)
      )
  paths = {each.path for each in given}
  for pair in knobs.EXCLUSIVE:
    if not paths.isdisjoint(pair):
      paths.update(pair)
  kept = [each for each in settings.overrides if each.path not in paths]
  used = [str(each) for each in kept]
  return Settings(
    experiment=experiment or settings.experiment,
    overrides=(*kept, *given),
    notes=(f"settings of the run: {' '.join(used)}",) if used else (),
  )


def find_trained_value(
  knob: str, folder: epath.Path, *, packages: Sequence[str] = ()
) -> Any:
  """Returns the value of a knob that a run was trained with, maybe as text.

  Returns `None` if the run has no settings.
  """
  settings = read_settings(folder)
  if settings is None:
    return None
  for each in settings.overrides:
    if each.path == knob:
      return each.text.strip("'\"")
  cls = find_experiment.find_experiment(settings.experiment, packages=packages)
  return getattr(cls, knob, None)


def wait_for_run(
  folder: epath.Path, *, sleep: Callable[[float], None] = time.sleep
) -> None:
  """Waits until a run directory has settings, printing that once."""
  path = folder / run_dir.SETTINGS
  if path.exists():
    return
  print(f"waiting for a run to start in {os.fspath(folder)}", flush=True)
  while not path.exists():
    sleep(_PAUSE_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedMarker:
  """The end of a finished run.

  Attributes:
    step: Of its last checkpoint; early stopping and the end of the data make it
      less than `num_train_steps`.
    num_train_steps: As configured.
  """

  step: int
  num_train_steps: int


def mark_finished(folder: epath.Path, *, step: int, job: job_lib.Job) -> None:
  """Marks a run as finished, after its last checkpoint is complete."""
  marker = FinishedMarker(step=step, num_train_steps=job.num_train_steps)
  text = json.dumps(dataclasses.asdict(marker))
  files.write_text(folder / run_dir.FINISHED, f"{text}\n")


def remove_drafts(folder: epath.Path) -> None:
  """Removes half-written files of killed processes from a run directory.

  Only for the owner of the lease. Drafts of the lease itself may belong to a
  process that waits for it.
  """
  for path in folder.glob(f"*{files.DRAFT_SUFFIX}"):
    if not path.name.startswith(run_dir.OWNER):
      path.unlink(missing_ok=True)


def clear_finished(folder: epath.Path) -> None:
  """Removes the marker: the run resumes."""
  (folder / run_dir.FINISHED).unlink(missing_ok=True)


def read_finished(folder: epath.Path) -> FinishedMarker | None:
  """Returns the marker of a run, `None` while it is not finished."""
  try:
    return files.read_json(
      folder / run_dir.FINISHED,
      lambda value: files.to_record(FinishedMarker, value),
      kind="the end of a run",
    )
  # Files appear whole on object stores.
  except FileNotFoundError:
    return None
