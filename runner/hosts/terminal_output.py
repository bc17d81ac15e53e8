"""Standard output of multi-process runs, and of pipes whose reader has exited.

Only process 0 prints to standard output; the others print errors to standard
error. Gloo, the library of CPU collectives, writes lines to the file descriptor
from C++ in the middle of a run; they are filtered out.
"""

import os
import select
import sys
import threading

_NOISE = b"[Gloo] Rank "


def filter_noise() -> None:
  """Filters gloo's lines out of native code's standard output.

  Python's own output bypasses the filter.
  """
  sys.stdout.flush()
  original = os.dup(1)
  read, write = os.pipe()
  os.dup2(write, 1)
  os.close(write)
  encoding = sys.stdout.encoding or "utf-8"
  stream = os.fdopen(
    os.dup(original), "w", buffering=1, encoding=encoding, errors="replace"
  )
  sys.stdout = sys.__stdout__ = stream
  threading.Thread(
    target=_relay, args=(read, original), name="terminal_output", daemon=True
  ).start()


def mute() -> None:
  """Discards everything that is written to standard output from now on."""
  sys.stdout.flush()
  nothing = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nothing, 1)
  sys.stdout = sys.__stdout__ = os.fdopen(nothing, "w")


def open_missing() -> None:
  """Discards what would be written to a standard stream that is closed.

  A service may start programs so. The next file that is opened would get the
  number of the stream, and with it what native code prints.
  """
  for name in ("stdin", "stdout", "stderr"):
    if getattr(sys, name) is None:
      # It gets the lowest free number, that of the stream.
      stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
      os.set_inheritable(stream.fileno(), stream.fileno() <= 2)
      setattr(sys, name, stream)
      setattr(sys, f"__{name}__", stream)


def drop_if_unread() -> bool:
  """Discards standard output from now on if its reader has exited.

  Returns:
    Whether it has. If not, another pipe is broken.
  """
  poll = select.poll()
  poll.register(1, 0)
  has_exited = any(
    event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)
  )
  if has_exited:
    # Flushing the rest would fail again when the interpreter exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  return has_exited


def _relay(read: int, original: int) -> None:
  rest = b""
  while chunk := os.read(read, 1 << 16):
    *lines, rest = (rest + chunk).split(b"\n")
    kept = [line for line in lines if not line.startswith(_NOISE)]
    if kept:
      os.write(original, b"".join(line + b"\n" for line in kept))
