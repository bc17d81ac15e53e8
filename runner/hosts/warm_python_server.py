"""The process that forks for `warm_python`: `... PROGRAM LISTENER MODULE ...`.

It ends with its standard input. For each command there are two processes: one
that is the command, and one that looks after it for the program.
"""

from collections.abc import Mapping
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import types
from typing import Any
import warnings

import jax

_LENGTH = struct.Struct("!I")
_STATUS = struct.Struct("!i")
_MAX_FILES = 64
# No command has a file with such a number.
_FIRST_FREE = 1000


def main(arguments: list[str]) -> None:
  """Imports, and forks for each command, whose process goes on from here."""
  executable, listener, *modules = arguments
  start = dict(os.environ)
  for module in modules:
    _import(module)
  # Forks share what is never written to.
  gc.collect()
  gc.freeze()
  request = _next_request(socket.socket(fileno=int(listener)))
  _become(request, executable, start)


def _import(module: str) -> None:
  importlib.import_module(module)


def _next_request(listener: socket.socket) -> dict[str, Any]:
  """Returns the next request, in the process of the command only."""
  # Nobody waits for the processes that look after commands.
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  while True:
    ready, _, _ = select.select([0, listener], [], [])
    if 0 in ready:  # The test is over.
      os._exit(0)
    connection, _ = listener.accept()
    if not _fork():
      break
    connection.close()
  listener.close()
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  first, files, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_FILES)
  [length] = _LENGTH.unpack(first)
  request = json.loads(connection.recv(length, socket.MSG_WAITALL))
  if process := _fork():
    for file in (0, *files):
      os.close(file)
    _look_after(process, connection)
  connection.close()
  return {**request, "given": files}


def _fork() -> int:
  with warnings.catch_warnings():
    # Python warns of the threads of numpy; they wait.
    warnings.simplefilter("ignore")
    return os.fork()


def _look_after(process: int, connection: socket.socket) -> None:
  """Passes signals on and the status back; never returns."""
  ended = os.pidfd_open(process)
  while ended not in select.select([ended, connection], [], [])[0]:
    # The program has gone without waiting: it was killed.
    number = connection.recv(1) or bytes([signal.SIGKILL])
    os.kill(process, number[0])
    if number[0] == signal.SIGKILL:
      break
  _, status = os.waitpid(process, 0)
  with contextlib.suppress(OSError):
    connection.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))
  os._exit(0)


def _become(
  request: Mapping[str, Any], executable: str, start: Mapping[str, str]
) -> None:
  """Is the command.

  Args:
    request: Request of the program, with the files that it has `given`.
    executable: The program.
    start: The variables with which this process has started.
  """
  # Out of the way of the numbers that they are to have.
  moved = [
    fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    for file in request["given"]
  ]
  for file in request["given"]:
    os.close(file)
  for file, number in zip(moved, request["files"], strict=True):
    os.dup2(file, number)
    os.close(file)
  os.chdir(request["folder"])
  environ = request["environ"]
  # Some modules set variables when they are imported.
  added = {k: v for k, v in os.environ.items() if k not in start}
  os.environ.clear()
  os.environ.update({**added, **environ})
  arguments = request["arguments"]
  options = []
  while arguments and arguments[0] in ("-P", "-W"):
    number = 2 if arguments[0] == "-W" else 1
    options += arguments[:number]
    arguments = arguments[number:]
  is_known = arguments and arguments[0] in ("-m", "-c")
  if not is_known or not _configure(start, environ):
    # Variables that Python reads only when it starts.
    os.execv(sys.executable, [sys.executable, *request["arguments"]])
  sys.executable = executable
  sys.orig_argv = [executable, *request["arguments"]]
  random.seed()
  if "-W" in options:
    warnings.simplefilter(options[options.index("-W") + 1])
  paths, before = (
    [path for path in each.get("PYTHONPATH", "").split(os.pathsep) if path]
    for each in (environ, start)
  )
  sys.path[:] = [*paths, *(p for p in sys.path if p not in {*paths, *before})]
  if "-P" not in options and not environ.get("PYTHONSAFEPATH"):
    sys.path.insert(0, os.getcwd() if arguments[0] == "-m" else "")
  importlib.invalidate_caches()
  _run(*arguments)


def _configure(before: Mapping[str, str], environ: Mapping[str, str]) -> bool:
  """Tells JAX, which has read its variables; returns whether that will do."""
  for name in {*before, *environ}:
    option = name.lower()
    # Other variables are read when they are needed.
    if before.get(name) == environ.get(name) or option not in jax.config.values:
      continue
    now = jax.config.values[option]
    if name not in environ or isinstance(now, bool):
      return False
    value = environ[name]
    is_number = isinstance(now, int | float)
    jax.config.update(option, type(now)(value) if is_number else value)
  return True


def _run(kind: str, what: str, *arguments: str) -> None:
  """Does what Python does with `-m` and `-c`."""
  sys.argv = [what if kind == "-m" else "-c", *arguments]
  if kind == "-m":
    # It may be there, and is to run anew.
    sys.modules.pop(what, None)
    runpy.run_module(what, run_name="__main__", alter_sys=True)
    return
  module = types.ModuleType("__main__")
  sys.modules["__main__"] = module
  exec(compile(what, "<string>", "exec"), module.__dict__)


if __name__ == "__main__":
  main(sys.argv[1:])
