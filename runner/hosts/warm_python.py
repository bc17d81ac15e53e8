"""A Python for tests that start many commands: its imports are shared.

`WarmPython.executable` is a program that takes what `python` takes. A server
imports jax and the programs once, and each command is a fork of it: a process
of its own, with the working folder, variables, files and arguments of whoever
started the program, whose signals and exit status are passed on. Only the
seconds of importing are saved.
"""

from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import secrets
import shlex
import socket
import subprocess
import sys

_SERVER = "paxon.runner.hosts.warm_python_server"

# Stub `python` that forwards the command to the fork server.
_CLIENT = """
import json, os, signal, socket, struct, sys

server = socket.socket(socket.AF_UNIX)
server.connect("\\0" + sys.argv[1])
files = []
for number in map(int, os.listdir("/proc/self/fd")):
  try:
    os.fstat(number)
  except OSError:  # The descriptor of the listing itself.
    continue
  if number != server.fileno():
    files.append(number)
text = json.dumps({
  "arguments": sys.argv[2:],
  "folder": os.getcwd(),
  "environ": dict(os.environ),
  "files": files,
}).encode()
socket.send_fds(server, [struct.pack("!I", len(text))], files)
server.sendall(text)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
  signal.signal(number, lambda number, _: server.sendall(bytes([number])))
(status,) = struct.unpack("!i", server.recv(4, socket.MSG_WAITALL))
if status < 0:
  if -status != signal.SIGKILL:
    signal.signal(-status, signal.SIG_DFL)
  os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def install(modules: Sequence[str], folder: pathlib.Path) -> Iterator[None]:
  """Has `sys.executable` be such a Python."""
  before = sys.executable
  with WarmPython(modules, folder) as warm:
    sys.executable = warm.executable
    try:
      yield
    finally:
      sys.executable = before


class WarmPython:
  """Starts the server; use it as a context.

  Attributes:
    executable: The program.
  """

  def __init__(self, modules: Sequence[str], folder: pathlib.Path) -> None:
    """Starts it; what is asked of it meanwhile waits."""
    name = f"paxon-{os.getpid()}-{secrets.token_hex(8)}"
    client, program = folder / "client.py", folder / "python"
    client.write_text(_CLIENT)
    command = [sys.executable, "-I", "-S", os.fspath(client), name]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o700)
    self.executable = os.fspath(program)
    with socket.socket(socket.AF_UNIX) as listener:
      # An address without a file, whose path could be too long.
      listener.bind(f"\0{name}")
      listener.listen()
      number = listener.fileno()
      self._server = subprocess.Popen(
        [sys.executable, "-m", _SERVER, self.executable, str(number), *modules],
        stdin=subprocess.PIPE,
        pass_fds=[number],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
      )

  def __enter__(self) -> "WarmPython":
    return self

  def __exit__(self, *exception: object) -> None:
    assert self._server.stdin is not None
    self._server.stdin.close()
    self._server.wait()
