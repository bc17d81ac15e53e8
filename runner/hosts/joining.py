"""Multi-process initialization and shutdown, with timeouts.

If processes are missing, JAX terminates the waiting ones from C++ with a long
log. A shorter timeout here prints one line on which process is missing.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

import jax

from paxon.runner import exit_status, files, user_error
from paxon.runner.hosts import (
  process_failures,
  process_settings,
  terminal_output,
)

_INTERRUPTED = 130
# JAX's own timeout, which terminates the process abruptly, is longer by this.
_MARGIN_SECONDS = 30
_PROBE_SECONDS = 2.0
# JAX's default. A process that is silent for longer counts as lost.
_HEARTBEAT_SECONDS = 100
# The other processes exit with process 0; they first print their own errors.
_FLUSH_SECONDS = 3.0


def join(
  settings: process_settings.ProcessSettings, environ: Mapping[str, str]
) -> None:
  """Joins the other processes, if any; must precede any other use of jax.

  Raises:
    user_error.UserError: The settings are invalid, or joining failed.
  """
  cluster = process_settings.detect(environ)
  settings.check(cluster)
  is_asked = settings.is_given or cluster is not None
  if settings.num_processes != 1 and is_asked:
    terminal_output.filter_noise()
    with Deadline(
      float(settings.timeout_seconds),
      lambda: describe_missing(settings),
      status=exit_status.ExitStatus.PEERS,
    ):
      if _initialize(settings, cluster):
        # The processes exchange their devices here, which may take as long.
        jax.devices()
  if jax.distributed.is_initialized() and jax.process_index() > 0:
    terminal_output.mute()
  if path := environ.get(process_settings.JOINED_FILE):
    found = {"process": 0, "processes": 1}
    if jax.distributed.is_initialized():
      found = {
        "process": jax.process_index(),
        "processes": jax.process_count(),
      }
    files.write_text(path, json.dumps(found))


def check_folder(job_log_dir: str | None) -> None:
  """Raises UserError if several processes lack a shared run directory."""
  if job_log_dir or not jax.distributed.is_initialized():
    return
  if jax.process_count() > 1:
    raise user_error.UserError(
      f"A run of {jax.process_count()} processes requires --job_log_dir, a"
      " directory that all of them can reach. Use --num_processes=1 for"
      " separate runs."
    )


@contextlib.contextmanager
def exit_together() -> Iterator[None]:
  """Returns a context in which an error ends this process without waiting.

  Python's own exit would wait for the other processes. On success the
  processes wait for each other. With a single process this does nothing.
  """
  if not jax.distributed.is_initialized():
    yield
    return
  try:
    yield
  except KeyboardInterrupt:
    _abandon(_INTERRUPTED)
  except BaseException as error:
    # First, because a context may have made a mistake of the user of it.
    if process_failures.is_peer_failure(str(error)):
      print(_describe_peer_failure(error), file=sys.stderr)
      _abandon(exit_status.ExitStatus.PEERS)
    if isinstance(error, user_error.UserError):
      print(user_error.one_line(error), file=sys.stderr)
      _abandon(error.status, raised_by_all=True)
    traceback.print_exc()
    _abandon(exit_status.find(error))
  jax.distributed.shutdown()


def _abandon(status: int, *, raised_by_all: bool = False) -> NoReturn:
  """Exits without waiting for the other processes.

  They fail too: process 0 takes JAX's coordinator with it, and collectives
  with a process that exited raise.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  if raised_by_all and jax.process_index() == 0:
    # Each process prints an error of the user.
    time.sleep(_FLUSH_SECONDS)
  # `sys.exit` would wait for the others until JAX terminates this process.
  os._exit(status)


def _describe_peer_failure(error: BaseException) -> str:
  lines = str(error).splitlines()
  return (
    f"Process {jax.process_index()} of {jax.process_count()} exits, because"
    f" another process was lost ({lines[0][:200] if lines else error!r})."
    " Restart all processes with the same command to resume from the latest"
    " checkpoint, or set --max_restarts."
  )


def _initialize(
  settings: process_settings.ProcessSettings,
  cluster: process_settings.Cluster | None,
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
  # The type of the exception depends on the cluster.
  except Exception as error:
    # A single machine with TPUs, which has no metadata of others.
    is_single = "should be defined" in str(error) and not settings.is_given
    if cluster is process_settings.Cluster.TPU and is_single:
      return False
    by = f" of {cluster.value}" if cluster else ""
    raise user_error.UserError(
      f"Joining the processes{by} failed: {user_error.one_line(error)}; check"
      " --coordinator_address, --num_processes and --process_id, or set"
      " --num_processes=1 to run in this process alone."
    ).with_status(exit_status.ExitStatus.PEERS) from error
  return True


class Deadline:
  """A context that prints one line and exits when the timeout expires."""

  def __init__(
    self, seconds: float, describe: Callable[[], str], *, status: int
  ) -> None:
    """Prepares.

    Args:
      seconds: The timeout.
      describe: Returns the line.
      status: The exit status.
    """
    self._describe = describe
    self._status = status
    self._timer = threading.Timer(seconds, self._expire)
    self._timer.daemon = True

  def __enter__(self) -> None:
    self._timer.start()

  def __exit__(self, *exception: object) -> None:
    self._timer.cancel()

  def _expire(self) -> None:
    # The main thread is in native code, which no exception interrupts.
    print(self._describe(), file=sys.stderr, flush=True)
    os._exit(self._status)


def describe_missing(
  settings: process_settings.ProcessSettings,
  *,
  answers: Callable[[str], bool] | None = None,
) -> str:
  """Returns the message of a timeout: which process is missing."""
  answers = answers or _answers
  seconds, address = settings.timeout_seconds, settings.coordinator_address
  count, index = settings.num_processes, settings.process_id
  every = "start every process with the same --coordinator_address and"
  every += " --num_processes, and with --process_id 0, 1, ..."
  if address is None:
    return (
      f"The processes of this run did not connect within {seconds} s"
      " (--host_timeout). Check that all of them run and reach each other."
    )
  if index == 0:
    return (
      f"Process 0 waited {seconds} s (--host_timeout) at {address}, but not all"
      f" of the {count} processes connected; {every}."
    )
  if not answers(address):
    return (
      f"The coordinator {address} did not answer within {seconds} s"
      " (--host_timeout): start process 0 on that machine, and check that its"
      " port is reachable from here."
    )
  return (
    f"The coordinator {address} answers, but not all of the {count} processes"
    f" connected within {seconds} s (--host_timeout); {every}."
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
