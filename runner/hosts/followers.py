"""Computations of all processes that process 0 starts.

A program such as an endpoint finds out on process 0 what to compute next, and
the devices of all processes must compute it together. There `Leader` sends each
call to the others before it makes it, and these make the same calls in
`follow`:

  functions = {"insert": insert, "generate": generate}
  if agreement.is_first():
    leader = followers.Leader(functions)
    leader.call("insert", prompt)
    leader.close()
  else:
    followers.follow(functions)

With one process nothing is sent.
"""

from collections.abc import Callable, Mapping
import pickle
from typing import Any
import zlib

import jax

from paxon.runner.hosts import agreement

_Functions = Mapping[str, Callable[..., Any]]


class Leader:
  """Calls functions on all processes; used by one thread of process 0."""

  def __init__(self, functions: _Functions) -> None:
    """Records functions that the other processes have under the same names."""
    self._functions = functions

  def call(self, name: str, *arguments: Any) -> Any:
    """Calls a function everywhere; returns the result of this process.

    The arguments are trees of arrays that this process has whole, or values
    that can be pickled. The others get the arrays as those of numpy.
    """
    if not agreement.is_alone():
      _send((name, jax.device_get(arguments)))
    return self._functions[name](*arguments)

  def wait(self) -> None:
    """Tells the others to wait on; their network would give up in silence."""
    if not agreement.is_alone():
      _send(("", ()))

  def close(self) -> None:
    """Ends `follow` on the other processes."""
    if not agreement.is_alone():
      _send(None)


def follow(functions: _Functions) -> None:
  """Makes the calls of process 0 until it closes its `Leader`."""
  while (call := pickle.loads(zlib.decompress(_receive()))) is not None:
    name, arguments = call
    if name:
      functions[name](*arguments)


def _send(call: tuple[str, Any] | None) -> None:
  # Most of what is sent are zeros, of prompts and masks.
  agreement.broadcast(zlib.compress(pickle.dumps(call), level=1))


def _receive() -> bytes:
  return agreement.broadcast(b"")
