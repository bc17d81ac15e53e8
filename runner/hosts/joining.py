"""Joins the processes of a run, and takes leave of them; nobody waits forever.

JAX ends a process from C++, with a page of text, when the others do not come.
Here a clock runs out a little earlier and says in one line who is missing.
"""

from collections.abc import Callable, Mapping
import json
import os
import socket
import sys
import threading
import time
from typing import NoReturn

import jax

from paxon.runner import files, user_error
from paxon.runner.hosts import detection, process_settings, terminal_output

# Names a file that a supervisor reads: it is there once the processes joined.
JOINED_FILE = "PAXON_JOINED_FILE"

_WRONG_USE = 2
# By so much JAX's own clock, which ends a process roughly, runs later.
_MARGIN_SECONDS = 30
_PROBE_SECONDS = 2.0
# JAX's default. A host that is silent for longer counts as lost.
_HEARTBEAT_SECONDS = 100
# With the first process the others go; until then they can say their errors.
_LAST_WORDS_SECONDS = 3.0


def join(
  settings: process_settings.ProcessSettings, environ: Mapping[str, str]
) -> None:
  """Joins the other processes, if there are any; nothing has used jax yet.

  Args:
    settings: From the command line.
    environ: The environment, which may say what the command line does not.

  Raises:
    user_error.UserError: The settings are wrong, or the processes cannot be
      joined.
  """
  cluster = detection.detect(environ)
  settings.check(cluster)
  is_asked = settings.is_given or cluster is not None
  if settings.num_processes != 1 and is_asked:
    terminal_output.filter_noise()
    with _Deadline(settings):
      if _initialize(settings, cluster):
        # The devices are found together, and that may take as long.
        jax.devices()
  if jax.distributed.is_initialized() and jax.process_index() > 0:
    terminal_output.mute()
  if path := environ.get(JOINED_FILE):
    found = {"process": 0, "processes": 1}
    if jax.distributed.is_initialized():
      found = {
        "process": jax.process_index(),
        "processes": jax.process_count(),
      }
    files.write_text(path, json.dumps(found))


def check_folder(job_log_dir: str | None) -> None:
  """Checks that several processes have one folder; after `join`.

  Args:
    job_log_dir: From the command line.

  Raises:
    user_error.UserError: Each would make a folder of its own.
  """
  if job_log_dir or not jax.distributed.is_initialized():
    return
  if jax.process_count() > 1:
    raise user_error.UserError(
      f"A run of {jax.process_count()} processes needs --job_log_dir, one"
      " folder that every one of them reaches; or give --num_processes=1 for"
      " runs of their own."
    )


def leave() -> None:
  """Waits, not longer than the settings say, until all processes are done."""
  if jax.distributed.is_initialized():
    jax.distributed.shutdown()


def abandon(status: int) -> NoReturn:
  """Ends this process though others may go on, and waits for none of them.

  They notice: the first process takes JAX's coordinator with it, and whoever
  computes with one that is gone gets an error.

  Args:
    status: Of the exit.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  if status == _WRONG_USE and jax.process_index() == 0:
    # A mistake of the user is met by all of them.
    time.sleep(_LAST_WORDS_SECONDS)
  # `sys.exit` would wait for the others, and then be ended by JAX.
  os._exit(status)


def _initialize(
  settings: process_settings.ProcessSettings,
  cluster: detection.Cluster | None,
) -> bool:
  """Returns whether there are several processes, which have joined."""
  try:
    jax.distributed.initialize(
      settings.coordinator_address,
      settings.num_processes,
      settings.process_id,
      initialization_timeout=settings.timeout_seconds + _MARGIN_SECONDS,
      heartbeat_timeout_seconds=min(
        _HEARTBEAT_SECONDS, settings.timeout_seconds
      ),
      shutdown_timeout_seconds=settings.timeout_seconds,
    )
  # What is raised depends on the cluster.
  except Exception as error:
    # One machine with TPUs, and nobody who knows of others.
    is_single = "should be defined" in str(error) and not settings.is_given
    if cluster is detection.Cluster.TPU and is_single:
      return False
    by = f" by {cluster.value}" if cluster else ""
    raise user_error.UserError(
      f"The processes could not be joined{by}: {user_error.one_line(error)};"
      " check --coordinator_address, --num_processes and --process_id, or give"
      " --num_processes=1 for this process alone."
    ) from error
  return True


class _Deadline:
  """Ends the process with one line when the time is over; a context."""

  def __init__(self, settings: process_settings.ProcessSettings) -> None:
    self._settings = settings
    self._timer = threading.Timer(settings.timeout_seconds, self._expire)
    self._timer.daemon = True

  def __enter__(self) -> None:
    self._timer.start()

  def __exit__(self, *exception: object) -> None:
    self._timer.cancel()

  def _expire(self) -> None:
    # The main thread is in native code, where no exception reaches it.
    print(missing(self._settings), file=sys.stderr, flush=True)
    os._exit(_WRONG_USE)


def missing(
  settings: process_settings.ProcessSettings,
  *,
  answers: Callable[[str], bool] | None = None,
) -> str:
  """Returns who has not come when the time was over.

  Args:
    settings: Of this process.
    answers: Whether somebody listens at an address; another one in tests.
  """
  answers = answers or _answers
  seconds, address = settings.timeout_seconds, settings.coordinator_address
  count, index = settings.num_processes, settings.process_id
  every = "start every process with the same --coordinator_address and"
  every += " --num_processes, and each with its own --process_id from 0 on"
  if address is None:
    return (
      f"The processes of this run did not find each other within {seconds} s"
      " (--host_timeout); start all of them, and let them reach each other."
    )
  if index == 0:
    return (
      f"Process 0 waited {seconds} s (--host_timeout) at {address} and not all"
      f" of the {count} processes came; {every}."
    )
  if not answers(address):
    return (
      f"The coordinator {address} did not answer within {seconds} s"
      " (--host_timeout): start process 0 on that machine, and let its port be"
      " reached from here."
    )
  return (
    f"The coordinator {address} answers, but not all of the {count} processes"
    f" came within {seconds} s (--host_timeout); {every}."
  )


def _answers(address: str) -> bool:
  host, _, port = address.rpartition(":")
  try:
    with socket.create_connection(
      (host.strip("[]"), int(port)), timeout=_PROBE_SECONDS
    ):
      return True
  except OSError:
    return False
