"""Agreement between the processes of a run: broadcast, gather and maximum.

All processes call every function here in the same order; with one process
nothing is sent. Values travel as JSON through JAX's own collectives on the
devices.
"""

from collections.abc import Callable, Mapping, Sequence
import json
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from paxon.runner import user_error
from paxon.sharding import arrays
from paxon.sharding import layout as layouts

_T = TypeVar("_T")
_R = TypeVar("_R")
# Sizes are rounded up to powers of two, because each size is compiled once.
_MIN_BYTES = 256
# Of one broadcast, in the memory of each device.
_MAX_BYTES = 1 << 25


def is_alone() -> bool:
  """Returns whether this is the only process of the run."""
  return jax.process_count() == 1


def is_first() -> bool:
  """Returns whether this is process 0, which writes files and prints."""
  return jax.process_index() == 0


def from_first(make: Callable[[], _T]) -> _T:
  """Calls a function on process 0 and returns its JSON value on all processes.

  Raises:
    user_error.UserError: `make` raised one; then all processes raise it.
  """
  if is_alone():
    return make()
  text = json.dumps(_outcome(make)).encode() if is_first() else b""
  return _value(json.loads(broadcast(text)))


def broadcast(data: bytes) -> bytes:
  """Returns the bytes of process 0 on all processes."""
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
  return broadcast_sized(data, size=size, source=0).tobytes()


def broadcast_sized(
  data: bytes | memoryview, *, size: int, source: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
  """Returns the bytes of one process on all processes.

  Args:
    data: The bytes; ignored on the other processes.
    size: Their number, the same on all processes.
    source: Index of the process.
  """
  is_source = jax.process_index() == source
  found = np.empty(size, np.uint8)
  for begin in range(0, size, _MAX_BYTES):
    count = min(_MAX_BYTES, size - begin)
    chunk = _pad(data[begin : begin + count] if is_source else b"", count)
    received = multihost_utils.broadcast_one_to_all(chunk, is_source=is_source)
    found[begin : begin + count] = np.asarray(received, np.uint8)[:count]
  return found


def gather(value: _T) -> list[_T]:
  """Returns the JSON values of all processes, in the order of their indices."""
  if is_alone():
    return [value]
  text = json.dumps(value).encode()
  sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
  data = multihost_utils.process_allgather(_pad(text, int(sizes.max())))
  rows = np.asarray(data, np.uint8)
  return [
    json.loads(row.tobytes()[:size])
    for row, size in zip(rows, sizes.tolist(), strict=True)
  ]


def share(items: Sequence[_T]) -> Sequence[_T]:
  """Returns this process's share of some work."""
  return items[jax.process_index() :: jax.process_count()]


def map_shared(make: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
  """Returns the JSON value of `make` for each item.

  Each process calls it for a part of the items, and gets the values of all.

  Args:
    make: Called once for each item, by one of the processes.
    items: The same on all processes.

  Raises:
    user_error.UserError: `make` raised one; then all processes raise that of
      the first process.
  """
  found = gather(_outcome(lambda: [make(item) for item in share(items)]))
  parts = [iter(value) for value in map(_value, found)]
  return [next(parts[i % len(parts)]) for i in range(len(items))]


class DelayedMaximum:
  """The maximum of one number over all processes, returned one call later.

  A call enqueues a small reduction and waits only for that of the previous
  call, which has run behind the step in between: no device idles.
  """

  def __init__(self, layout: layouts.Layout) -> None:
    """Prepares the reduction; the first call compiles it."""
    self._place = arrays.on_each_device(layout)
    self._max = layout.jit(jnp.max, out_shardings=layout.replicated)
    self._pending: jax.Array | None = None

  def __call__(self, number: int) -> int:
    """Returns the maximum (int32, from 0) of the previous call; 0 at first."""
    previous = self._pending
    self._pending = self._max(self._place(np.int32(number)))
    return 0 if previous is None else int(previous)


def _outcome(make: Callable[[], Any]) -> dict[str, Any]:
  """Returns the result as `value`, or the user's mistake as `error`."""
  try:
    return {"value": make()}
  except user_error.UserError as error:
    return {"error": str(error), "status": error.status}


def _value(outcome: Mapping[str, Any]) -> Any:
  """Returns the value of an `_outcome`, or raises its error."""
  if "error" in outcome:
    raise user_error.UserError(outcome["error"]).with_status(outcome["status"])
  return outcome["value"]


def _pad(
  data: bytes | memoryview, size: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
  room = _MIN_BYTES
  while room < size:
    room *= 2
  padded = np.zeros(room, np.uint8)
  padded[: len(data)] = np.frombuffer(data, np.uint8)
  return padded
