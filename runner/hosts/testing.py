"""Processes for tests, which cost little because their imports are shared.

One process imports jax and the programs, and no more; each process of a test is
a fork of it, with devices and output of its own. What a test wants of it is a
function by name, whose result is the exit status.

The process that forks is a program that calls `serve`: it reads a request a
line from standard input and answers each with a line.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import gc
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from typing import Any
import warnings

import jax

from paxon.runner.hosts import joining, process_settings

Function = Callable[[list[str]], int]

_LOOK_SECONDS = 0.02


def free_port() -> int:
  """Returns a port of this machine that nobody uses at this moment."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


def join(address: str, count: str, index: str) -> None:
  """Joins the other processes of a test, by arguments of a command line.

  Args:
    address: `HOST:PORT` of process 0.
    count: Number of processes.
    index: Index of this process.
  """
  settings = process_settings.ProcessSettings(
    coordinator_address=address,
    num_processes=int(count),
    process_id=int(index),
    timeout_seconds=60,
  )
  joining.join(settings, os.environ)


@dataclasses.dataclass(frozen=True)
class Process:
  """A process of a test, with some of the methods of `subprocess.Popen`.

  Attributes:
    forks: The server that started it.
    pid: Its number, which another one may have after its end.
    stdout: Its standard output; standard error goes to `stderr`.
    stderr: See above.
    count: How many processes were started before it.
  """

  forks: "Forks" = dataclasses.field(repr=False)
  pid: int
  stdout: pathlib.Path
  stderr: pathlib.Path
  count: int

  def poll(self) -> int | None:
    """Returns the exit status, as `subprocess` gives it; `None` for none."""
    return self.forks.poll(self)

  def wait(self, timeout: float | None = None) -> int:
    """Returns the exit status when there is one.

    Raises:
      subprocess.TimeoutExpired: It takes longer.
    """
    limit = math.inf if timeout is None else time.monotonic() + timeout
    while (status := self.poll()) is None:
      if time.monotonic() > limit:
        raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
      time.sleep(_LOOK_SECONDS)
    return status

  def send_signal(self, sig: int) -> None:
    """Sends a signal, if it has not ended."""
    if self.poll() is None:
      os.kill(self.pid, sig)

  def kill(self) -> None:
    """Ends it as a machine that fails does."""
    self.send_signal(signal.SIGKILL)

  def output(self) -> str:
    """Returns all that it wrote, for messages of tests."""
    return f"{self.stdout.read_text()}\n{self.stderr.read_text()}"


class Forks:
  """Starts processes; use it as a context."""

  def __init__(self, module: str, folder: pathlib.Path) -> None:
    """Starts the process that forks."""
    self._folder = folder
    self._count = 0
    self._statuses: dict[int, int] = {}
    # Several threads may start and await processes.
    self._lock = threading.Lock()
    self._server = subprocess.Popen(
      [sys.executable, "-m", module],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def __enter__(self) -> "Forks":
    return self

  def __exit__(self, *exception: object) -> None:
    assert self._server.stdin is not None
    assert self._server.stdout is not None
    self._server.stdin.close()
    self._server.stdout.close()
    self._server.wait()

  def start(
    self,
    function: str,
    arguments: Sequence[str],
    *,
    devices: int,
    environ: Mapping[str, str] | None = None,
    log: pathlib.Path | None = None,
  ) -> Process:
    """Returns a new process that calls a function.

    Args:
      function: Its name, see `serve`.
      arguments: The list.
      devices: How many fake devices the process has.
      environ: Additions to the environment.
      log: A file for both of its outputs; `None` for one for each.
    """
    with self._lock:
      self._count += 1
      count = self._count
    base = self._folder / f"process-{count}"
    files = [log or base.with_suffix(suffix) for suffix in (".out", ".err")]
    for file in files:
      file.write_bytes(b"")
    request = {
      "function": function,
      "arguments": list(arguments),
      "devices": devices,
      "files": [os.fspath(file) for file in files],
      "environ": dict(environ or {}),
    }
    return Process(self, self._ask(request), files[0], files[-1], count)

  def poll(self, process: Process) -> int | None:
    """Returns the exit status, as `subprocess` does, or None yet."""
    if process.count not in self._statuses:
      status = self._ask({"wait": process.pid})
      if status is None:
        return None
      self._statuses[process.count] = status
    return self._statuses[process.count]

  def wait(self, process: Process) -> int:
    """Returns the exit status, as `subprocess` gives it."""
    return process.wait()

  def _ask(self, request: dict[str, Any]) -> Any:
    assert self._server.stdin is not None
    assert self._server.stdout is not None
    with self._lock:
      self._server.stdin.write(f"{json.dumps(request)}\n")
      self._server.stdin.flush()
      return json.loads(self._server.stdout.readline())


def serve(functions: Mapping[str, Function]) -> None:
  """Is the process that forks, until standard input ends."""
  # JAX warns of forks; its threads begin with its first device, which is never
  # asked for here.
  warnings.simplefilter("ignore")
  # Forks share what is never written to, and need not look through it.
  gc.collect()
  gc.freeze()
  for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
      pid, status = os.waitpid(request["wait"], os.WNOHANG)
      answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
      answer = os.fork()
      if not answer:
        _be(request, functions[request["function"]])
    print(json.dumps(answer), flush=True)


def _be(request: dict[str, Any], function: Function) -> None:
  """Is the new process; never returns."""
  status = 1
  try:
    for number, path in enumerate(request["files"], start=1):
      os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.close(0)
    os.environ.update(request["environ"])
    jax.config.update("jax_num_cpu_devices", request["devices"])
    status = function(request["arguments"])
  except SystemExit as end:
    status = end.code
  except BaseException:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status if isinstance(status, int) else 1)
