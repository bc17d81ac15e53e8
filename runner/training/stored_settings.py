"""The settings that a run was started with, stored in its folder.

`settings.json` names the experiment and the `--fdl.` arguments in their order,
so that evaluation and decoding make the configuration again without them. The
resolved configuration beside it says what the run is; this says how to ask for
it.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import time

from etils import epath

from paxon.runner import files, run_dir, user_error
from paxon.runner.configuration import find_experiment
from paxon.runner.configuration import overrides as overrides_lib

_PAUSE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What the command line of a training said.

  Attributes:
    experiment: The import path of its class.
    overrides: The assignments, as they were typed.
  """

  experiment: str
  overrides: tuple[overrides_lib.Override, ...]


def store(
  experiment: str,
  overrides: Sequence[overrides_lib.Override],
  folder: epath.Path,
) -> None:
  """Stores settings in place of those that may be there.

  Args:
    experiment: The import path of its class.
    overrides: The assignments.
    folder: Of the run.
  """
  content = {
    "experiment": experiment,
    "overrides": [
      f"--{overrides_lib.PREFIX}{each.path}={each.text}" for each in overrides
    ],
  }
  files.write_text(
    folder / run_dir.SETTINGS, json.dumps(content, indent=1) + "\n"
  )


def read(folder: epath.Path) -> Settings | None:
  """Returns the settings of a run; `None` if it has stored none.

  Args:
    folder: Of the run.

  Raises:
    UserError: The file is damaged.
  """
  path = folder / run_dir.SETTINGS
  if not path.exists():
    return None
  try:
    content = json.loads(path.read_text())
    parsed = [overrides_lib.parse_argument(a) for a in content["overrides"]]
    return Settings(
      experiment=str(content["experiment"]),
      overrides=tuple(each for each in parsed if each is not None),
    )
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise user_error.UserError(
      f"{path} does not hold the settings of a run ({error!r}); remove it, and"
      " give --exp and every --fdl. of the training."
    ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
  """What to make the configuration of a program from.

  Attributes:
    experiment: As `--exp` takes it.
    overrides: Those of the run, and after them those of the command line.
    notes: What to tell the user of it, one line each.
  """

  experiment: str
  overrides: tuple[overrides_lib.Override, ...]
  notes: tuple[str, ...] = ()


def complete(
  experiment: str | None,
  given: Sequence[overrides_lib.Override],
  folder: epath.Path,
  *,
  packages: Sequence[str] = (),
) -> Completed:
  """Adds the settings of a run to those of a command line.

  Args:
    experiment: As `--exp` names it; `None` for that of the run. The settings of
      the run are not used for another experiment.
    given: The assignments of the command line.
    folder: Of the run.
    packages: Where names close to a misspelled one are sought.

  Raises:
    UserError: There is no such experiment, or none is named anywhere.
  """
  settings = read(folder)
  if settings is None:
    if not experiment:
      raise user_error.UserError(
        f"--exp is missing, and {os.fspath(folder)} has no"
        f" {run_dir.SETTINGS} that says which experiment was trained there."
      )
    return Completed(experiment=experiment, overrides=tuple(given))
  if experiment:
    cls = find_experiment.find_experiment(experiment, packages=packages)
    if cls.import_path() != settings.experiment:
      note = (
        f"the run is of {settings.experiment}; its settings are not used for"
        f" {experiment}"
      )
      return Completed(
        experiment=experiment, overrides=tuple(given), notes=(note,)
      )
  paths = {each.path for each in given}
  used = [str(each) for each in settings.overrides if each.path not in paths]
  return Completed(
    experiment=experiment or settings.experiment,
    overrides=(*settings.overrides, *given),
    notes=(f"settings of the run: {' '.join(used)}",) if used else (),
  )


def wait(
  folder: epath.Path, *, sleep: Callable[[float], None] = time.sleep
) -> None:
  """Waits until a run has begun in a folder, and says so once.

  Args:
    folder: Of a run that is yet to begin, perhaps.
    sleep: Another one in tests.
  """
  names = (run_dir.SETTINGS, run_dir.CONFIG_TEXT)
  if any((folder / name).exists() for name in names):
    return
  print(f"waiting for a run to begin in {os.fspath(folder)}", flush=True)
  while not any((folder / name).exists() for name in names):
    sleep(_PAUSE_SECONDS)
