"""What of the processes' standard output reaches the user.

Only process 0 speaks; the others say errors, on standard error. The library
that sums over CPUs (gloo) writes lines to the file descriptor from C++, in the
middle of a run; they are taken out.
"""

import os
import select
import sys
import threading

_NOISE = b"[Gloo] Rank "


def filter_noise() -> None:
  """Lets through what is written past Python, line by line, but for noise.

  What Python writes goes its old way, at once.
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
  """Drops all that is written to standard output from here on."""
  sys.stdout.flush()
  nothing = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nothing, 1)
  sys.stdout = sys.__stdout__ = os.fdopen(nothing, "w")


def drop_if_unread() -> bool:
  """Drops all that is written to standard output, if its reader has left.

  Returns:
    Whether it has. If not, the pipe that is broken is another one.
  """
  poll = select.poll()
  poll.register(1, 0)
  has_left = any(
    event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)
  )
  if has_left:
    # What is left would fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  return has_left


def _relay(read: int, original: int) -> None:
  rest = b""
  while piece := os.read(read, 1 << 16):
    *lines, rest = (rest + piece).split(b"\n")
    kept = [line for line in lines if not line.startswith(_NOISE)]
    if kept:
      os.write(original, b"".join(line + b"\n" for line in kept))
