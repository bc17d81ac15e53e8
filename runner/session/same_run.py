"""A check that all processes of a run train the same in the same directory.

Otherwise each would train with its own numbers, or wait for a checkpoint that
the others write elsewhere. Processes exchange hashes, and what they stand for
only if these differ.
"""

from collections.abc import Mapping, Sequence
import hashlib
import inspect
import json
import os
import sys
import time
from typing import Any

from etils import epath
import fiddle as fdl
import jax

from paxon.runner import files, user_error
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner.configuration import dump
from paxon.runner.hosts import agreement

Facts = Mapping[str, str]

# A network file system may show a new file late.
_LOOKS = 30
_LOOK_SECONDS = 1.0


def check_settings(
  job: job_lib.Job, config: fdl.Buildable, *, allow_changes: Sequence[str] = ()
) -> None:
  """Compares the configuration, the code and the data of all processes.

  Args:
    job: The job.
    config: The same, not built.
    allow_changes: Names of settings that may change, which must be the same.

  Raises:
    UserError: They differ; raised by all, with the first difference.
  """
  if agreement.is_alone():
    return
  facts = collect(job, config)
  facts["--allow_changes"] = ",".join(allow_changes)
  text = json.dumps(facts, sort_keys=True)
  hashes = agreement.gather(hashlib.sha256(text.encode()).hexdigest())
  if len(set(hashes)) == 1:
    return
  first = agreement.from_first(lambda: dict(facts))
  found = agreement.gather(difference(first, facts))
  process, line = next((i, each) for i, each in enumerate(found) if each)
  raise user_error.UserError(
    f"Process {process} has {line}; start all processes with the same command"
    " and the same code."
  )


def collect(job: job_lib.Job, config: fdl.Buildable) -> dict[str, str]:
  """Returns the values that must agree on all processes, by name."""
  facts = {}
  for line in dump.to_text(config).splitlines():
    path, _, value = line.partition(" = ")
    facts[path] = value
  # A position has what its meaning depends on, such as the documents' number.
  for name, source in job.inputs.items():
    state = source.get_state()
    facts[f"data of {name!r}"] = json.dumps(state, sort_keys=True)
  facts["Python"] = ".".join(map(str, sys.version_info[:3]))
  facts["jax"] = jax.__version__
  facts["source of the experiment"] = _hash_source(job.experiment)
  return facts


def difference(first: Facts, here: Facts) -> str | None:
  """Returns the first difference between two processes in words, or None."""
  for name in [*first, *here]:
    a, b = first.get(name, "nothing"), here.get(name, "nothing")
    if a != b:
      return f"{name} {b}, and process 0 has {a}"
  return None


def _hash_source(experiment: str) -> str:
  """Returns a hash of the modules that define an experiment."""
  module, _, name = experiment.rpartition(".")
  digest = hashlib.sha256()
  found = getattr(sys.modules.get(module), name, object)
  for base in inspect.getmro(found):
    # None for built-in modules and for a notebook's.
    path = getattr(sys.modules.get(base.__module__), "__file__", None)
    if path is not None:
      with open(path, "rb") as file:
        digest.update(file.read())
  return digest.hexdigest()[:16]


def check_directory(folder: epath.Path, owner: str | None) -> None:
  """Checks that all processes see the directory that process 0 writes.

  Args:
    folder: The run directory of this process.
    owner: In process 0, the id in the lease that it holds.

  Raises:
    UserError: A process sees another one; raised by all.
  """
  if agreement.is_alone():
    return
  wanted = agreement.from_first(lambda: owner)
  is_same = False
  for _ in range(_LOOKS):
    is_same = _read_owner(folder) == wanted
    if is_same:
      break
    time.sleep(_LOOK_SECONDS)
  seen = agreement.gather((os.fspath(folder), is_same))
  report(seen)


def report(seen: Sequence[Sequence[Any]]) -> None:
  """Raises UserError for the first process that sees another directory.

  Args:
    seen: For each process, the path and whether it is the same directory.
  """
  for process, (path, is_same) in enumerate(seen):
    if not is_same:
      raise user_error.UserError(
        f"Process {process} does not see in {path} what process 0 writes in"
        f" {seen[0][0]}; --job_log_dir must be one directory that all processes"
        " share."
      )


def _read_owner(folder: epath.Path) -> str | None:
  try:
    owner = files.read_json(
      folder / run_dirs.OWNER, files.to_object, kind="the owner of a run"
    )
    found = owner.get("id")
    return found if isinstance(found, str) else None
  except (OSError, files.DamagedFileError):
    return None
