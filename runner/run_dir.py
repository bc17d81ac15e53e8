"""Run directory: its path and the names of the files in it."""

from collections.abc import Mapping
import contextlib
import datetime
import os

from etils import epath

from paxon.runner import files, user_error

CONFIG_TEXT = "config.txt"
SETTINGS = "settings.json"
# In the values of `SETTINGS`: the run directory, wherever it is.
HERE = "{job_log_dir}"
# Facts of the tokenizer, such as its hash.
TOKENIZER = "tokenizer_facts.json"
# Hashes of the evaluation data and of a warm start's checkpoints.
INPUT_FACTS = "input_facts.json"
# Changes that `--allow_changes` allowed, each with its step.
CHANGES = "changes.jsonl"
# After a warm start: the source of each variable.
WARM_START = "warm_start.txt"
METRICS = "metrics.jsonl"
EVENTS = "events"
CHECKPOINTS = "checkpoints"
# The name of the run in `--local_checkpoint_dir`.
LOCAL_CHECKPOINTS = "local_checkpoints.json"
REPORT = "report.html"
FINISHED = "finished.json"
# Written by the modes of these names.
EVAL = "eval"
DECODE = "decode"
INFER = "infer"
# In `EVAL`: positions of rolling evaluations (`--continuous`).
POSITIONS = "positions.json"
SAMPLES = "samples.txt"
SAMPLES_BY_STEP = "samples.jsonl"
# Images and sounds of a split, with predictions.
EXAMPLES = "examples.json"
GOODPUT = "goodput.jsonl"
PROFILE = "profile"
PGLE = "pgle"
SPIKES = "spikes.jsonl"
# While a training runs, see `hosts.run_lease`.
OWNER = "owner.json"

_DEFAULT_PARENT = "runs"


def resolve(given: str, environ: Mapping[str, str]) -> epath.Path:
  """Returns the absolute path of a run directory or another given path.

  Relative paths start in the user's working directory, which `bazel run` passes
  in an environment variable.

  Args:
    given: A local path (`~` allowed) or an object-store path such as `gs://a/b`.
    environ: The environment.

  Raises:
    user_error.UserError: The kind of store is not supported, or the store
      cannot be accessed.
  """
  if not files.is_local(given):
    try:
      path = epath.Path(given)
    except KeyError as error:
      raise user_error.UserError(
        f"{given}: unsupported store; use gs://, s3://, az:// or a local path."
      ) from error
    # Before anything else reads it, whose errors would be those of a library.
    files.check_store(path)
    return path
  start = environ.get("BUILD_WORKING_DIRECTORY") or os.getcwd()
  return epath.Path(os.path.join(start, os.path.expanduser(given)))


def create(path: epath.Path) -> bool:
  """Creates a run directory if it does not exist.

  Returns:
    Whether it was created.

  Raises:
    user_error.UserError: It cannot be created or written to.
  """
  if not files.is_local(path):
    _check_writable(path)
    return not path.exists()
  try:
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise user_error.UserError(
      f"--job_log_dir={os.fspath(path)}: cannot create the directory"
      f" ({error.strerror or error})."
    ) from error
  _check_writable(path)
  return is_new


def _check_writable(path: epath.Path) -> None:
  if not files.is_local(path):
    try:
      files.check_writable_store(path)
    except user_error.UserError as error:
      raise user_error.UserError(f"--job_log_dir={error}") from error
  elif not os.access(path, os.W_OK | os.X_OK):
    raise user_error.UserError(
      f"--job_log_dir={os.fspath(path)}: the directory is not writable."
    )


def remove_empty(path: epath.Path) -> None:
  """Removes the directory of a run that failed to start, if it is empty.

  An empty directory of checkpoints in it is removed too. Stores have no
  directories, only buckets.
  """
  if not files.is_local(path):
    return
  for folder in (path / CHECKPOINTS, path):
    # epath raises ValueError for a non-empty directory.
    with contextlib.suppress(OSError, ValueError):
      folder.rmdir()


def create_new(
  experiment: str, environ: Mapping[str, str], *, now: datetime.datetime
) -> epath.Path:
  """Creates a directory under `runs`, named by experiment and time."""
  parent = resolve(_DEFAULT_PARENT, environ)
  create(parent)
  base = f"{experiment}-{now:%Y%m%d-%H%M%S}"
  number = 1
  while True:
    path = parent / (base if number == 1 else f"{base}-{number}")
    try:
      # Fails if it exists, so that concurrent runs never share a directory.
      path.mkdir(exist_ok=False)
    except FileExistsError:
      number += 1
    else:
      return path


def check_existing(
  path: epath.Path, *, writes: str | None = None
) -> epath.Path:
  """Returns the directory of an earlier run.

  `writes` is the subdirectory that will be written to, or None.

  Raises:
    user_error.UserError: It does not exist or is not writable.
  """
  files.check_store(path)
  if not path.is_dir():
    raise user_error.UserError(
      f"--job_log_dir={os.fspath(path)} does not exist; use the directory of an"
      " earlier --mode=train."
    )
  if writes is not None:
    inside = path / writes
    _check_writable(inside if inside.is_dir() else path)
  return path
