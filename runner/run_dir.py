"""The folder of a run: its place, and the names of the files in it."""

from collections.abc import Mapping
import contextlib
import datetime
import os

from etils import epath

from paxon.runner import files, user_error

CONFIG_TEXT = "config.txt"
CONFIG_JSON = "config.json"
SETTINGS = "settings.json"
METRICS = "metrics.jsonl"
EVENTS = "events"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
FINISHED = "finished.json"
# What `--mode=eval` and `--mode=decode` write.
EVAL = "eval"
DECODE = "decode"
# In `EVAL`: where rolling evaluations of `--continuous` are.
POSITIONS = "positions.json"
SAMPLES = "samples.txt"
GOODPUT = "goodput.jsonl"
PROFILE = "profile"
PGLE = "pgle"
SPIKES = "spikes.jsonl"

_DEFAULT_PARENT = "runs"


def resolve(given: str, environ: Mapping[str, str]) -> epath.Path:
  """Returns the folder that the text of `--job_log_dir` means.

  A relative path starts where the user stands, which `bazel run` tells by an
  environment variable because it starts programs elsewhere.

  Args:
    given: A local path, `~` allowed, or one of a store, such as `gs://a/b`.
    environ: The environment.

  Raises:
    user_error.UserError: There is no such kind of store.
  """
  if not files.is_local(given):
    try:
      return epath.Path(given)
    except KeyError as error:
      raise user_error.UserError(
        f"{given} is in no store that is known, such as gs:// and s3://; a"
        " folder of a disk has no ://."
      ) from error
  start = environ.get("BUILD_WORKING_DIRECTORY") or os.getcwd()
  return epath.Path(os.path.join(start, os.path.expanduser(given)))


def create(path: epath.Path) -> bool:
  """Makes the folder of a run, or goes on in one that exists.

  Returns:
    Whether it was made.

  Raises:
    user_error.UserError: It cannot be made or written to.
  """
  files.check_store(path)
  try:
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise user_error.UserError(
      f"--job_log_dir={os.fspath(path)}: the folder cannot be made"
      f" ({error.strerror or error})."
    ) from error
  _check_writable(path)
  return is_new


def _check_writable(path: epath.Path) -> None:
  """Checks that files can be made in a folder.

  Args:
    path: That exists. Of a store nothing is known before it is tried.

  Raises:
    user_error.UserError: They cannot.
  """
  if files.is_local(path) and not os.access(path, os.W_OK | os.X_OK):
    raise user_error.UserError(
      f"--job_log_dir={os.fspath(path)}: the folder cannot be written to."
    )


def remove_empty(path: epath.Path) -> None:
  """Removes the folder of a run that could not start, if nothing is in it.

  Args:
    path: The folder. One of checkpoints in it is nothing while it is empty.
  """
  for folder in (path / CHECKPOINTS, path):
    # epath has a ValueError for a folder that is not empty.
    with contextlib.suppress(OSError, ValueError):
      folder.rmdir()


def create_new(
  experiment: str, environ: Mapping[str, str], *, now: datetime.datetime
) -> epath.Path:
  """Makes a new folder under `runs`, named by experiment and time.

  Args:
    experiment: The name of its class.
    environ: The environment.
    now: The time of the start.

  Raises:
    user_error.UserError: It cannot be made.
  """
  parent = resolve(_DEFAULT_PARENT, environ)
  create(parent)
  base = f"{experiment}-{now:%Y%m%d-%H%M%S}"
  number = 1
  while True:
    path = parent / (base if number == 1 else f"{base}-{number}")
    try:
      # Fails if it exists, so that two runs of one second never share it.
      path.mkdir(exist_ok=False)
    except FileExistsError:
      number += 1
    else:
      return path


def existing(path: epath.Path, *, writes: str | None = None) -> epath.Path:
  """Returns the folder of an earlier run.

  Args:
    path: The folder.
    writes: The folder in it that will be written to, `EVAL` or `DECODE`; None
      for none.

  Raises:
    user_error.UserError: There is none, or it cannot be written to.
  """
  files.check_store(path)
  if not path.is_dir():
    raise user_error.UserError(
      f"--job_log_dir={os.fspath(path)}: there is no such folder; give that of"
      " an earlier --mode=train."
    )
  if writes is not None:
    inside = path / writes
    _check_writable(inside if inside.is_dir() else path)
  return path
