"""A process that renders chat templates, with limits of time and memory.

A thread cannot be stopped and a signal reaches the main thread only, so
templates run in a separate process (`template_renderer`). One that exceeds
a limit ends that process alone; the next request starts another. The process
starts with the first template, takes 0.1 s and 30 MB, and ends with its parent.
"""

from collections.abc import Mapping, Sequence
import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from typing import Any
import weakref

from paxon.inputs import optional_library

# Backstops: the process itself counts the seconds of CPU time.
_START_SECONDS = 120.0
_SECONDS = 60.0
_CHUNK = 1 << 16


def find_names(source: str) -> frozenset[str]:
  """Returns the names, attributes and strings of a template.

  Raises:
    ValueError: It is not a template.
  """
  return frozenset(_ask({"source": source, "names": True})["names"])


def render(
  source: str,
  *,
  messages: Sequence[Mapping[str, Any]],
  variables: Mapping[str, Any],
  calls: Sequence[tuple[int, Mapping[str, Any]]],
) -> list[str]:
  """Returns the texts of a conversation.

  Args:
    source: The template.
    messages: JSON objects.
    variables: JSON values of all texts, by name.
    calls: For each text the number of messages from the first, and more
      variables.

  Raises:
    ValueError: The template is not valid, rejects the messages, or exceeds a
      limit of time, memory or size: 16 times what it is given, and 1 MiB.
  """
  request = {
    "source": source,
    "messages": list(messages),
    "variables": dict(variables),
    "calls": [{"count": n, "variables": dict(more)} for n, more in calls],
  }
  return _ask(request)["texts"]


def _ask(request: dict[str, Any]) -> dict[str, Any]:
  try:
    line = json.dumps(request).encode()
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f"The chat template can only read JSON values ({error})."
    ) from error
  # A fork has no use for the process of its parent.
  reply = _make_process(os.getpid()).ask(line)
  error = reply.get("error")
  if error is None:
    return reply
  error = " ".join(error.split())
  if reply["is_syntax"]:
    raise ValueError(f"The chat template is not a Jinja program ({error}).")
  raise ValueError(f"The chat template: {error.removesuffix('.')}.")


@functools.lru_cache(maxsize=1)
def _make_process(parent: int) -> "_Process":
  del parent
  return _Process()


class _Process:
  """The process; threads take turns."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    # At most one.
    self._running: list[subprocess.Popen[bytes]] = []
    weakref.finalize(self, _stop, self._running, os.getpid())

  def ask(self, request: bytes) -> dict[str, Any]:
    """Returns the reply to a request; starts the process if none runs."""
    with self._lock:
      seconds = _SECONDS
      if not self._running:
        self._running.append(_start())
        seconds = _START_SECONDS
      (child,) = self._running
      reply = None
      try:
        reply = _exchange(child, request, seconds)
      finally:
        # Also after Ctrl-C: the reply would be taken for the next one.
        if reply is None:
          _stop(self._running, os.getpid())
      if reply is not None:
        return json.loads(reply)
      too_long = child.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
      error = f"its process ended with status {child.returncode}"
      if too_long:
        error = "it takes too long, or too much memory"
      return {"error": error, "is_syntax": False}


def _start() -> subprocess.Popen[bytes]:
  with optional_library.explain("jinja2", extra="text"):
    from paxon.inputs.tokenizers import template_renderer
  path = os.pathsep.join(os.path.abspath(p) for p in sys.path if p)
  return subprocess.Popen(
    [sys.executable, "-P", os.path.abspath(template_renderer.__file__)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env={**os.environ, "PYTHONPATH": path},
    # Ctrl-C is for the parent, which then closes the pipe.
    start_new_session=True,
  )


def _exchange(
  child: subprocess.Popen[bytes], request: bytes, seconds: float
) -> bytes | None:
  """Returns the reply to a request; None if the process has ended."""
  assert child.stdin is not None
  assert child.stdout is not None
  end, parts = time.monotonic() + seconds, []
  try:
    child.stdin.write(request + b"\n")
    child.stdin.flush()
  except BrokenPipeError:
    return None
  with selectors.DefaultSelector() as selector:
    selector.register(child.stdout, selectors.EVENT_READ)
    while not parts or not parts[-1].endswith(b"\n"):
      if not selector.select(max(0, end - time.monotonic())):
        child.kill()
        return None
      parts.append(os.read(child.stdout.fileno(), _CHUNK))
      if not parts[-1]:
        return None
  return b"".join(parts)


def _stop(running: list[subprocess.Popen[bytes]], parent: int) -> None:
  """Ends the processes, unless a fork inherited them; sets `returncode`."""
  while running and os.getpid() == parent:
    child = running.pop()
    with contextlib.suppress(BrokenPipeError), child:
      child.kill()
