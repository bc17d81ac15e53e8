"""Agreement between the processes of a run: broadcast, gather and maximum.

All processes call every function here in the same order; with one process
nothing is sent. Values travel as JSON through JAX's own collectives on the
devices.
"""

from collections.abc import Callable, Sequence
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
# Sizes are rounded up to powers of two, because each size is compiled once.
_MIN_BYTES = 256


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
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  data = multihost_utils.broadcast_one_to_all(_pad(text, size))
  outcome = json.loads(np.asarray(data, np.uint8).tobytes()[:size])
  if "error" in outcome:
    raise user_error.UserError(outcome["error"])
  return outcome["value"]


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
    self._pending = self._max(self._place(number))
    return 0 if previous is None else int(previous)


def _outcome(make: Callable[[], Any]) -> dict[str, Any]:
  """Returns the result as `value`, or the user's mistake as `error`."""
  try:
    return {"value": make()}
  except user_error.UserError as error:
    return {"error": str(error)}


def _pad(text: bytes, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
  room = _MIN_BYTES
  while room < size:
    room *= 2
  data = np.zeros(room, np.uint8)
  data[: len(text)] = np.frombuffer(text, np.uint8)
  return data
