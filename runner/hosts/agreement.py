"""What the processes of a run tell each other, so that all decide alike.

Everything here is called by all processes, in the same order; with one process
nothing is sent. Values travel as JSON through the devices, by JAX's own
collectives, and arrive with all their bits.
"""

from collections.abc import Callable, Sequence
import json
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from paxon.runner import user_error

_T = TypeVar("_T")
# Sizes are rounded up to powers of two: each size is compiled once.
_MIN_BYTES = 256


def is_alone() -> bool:
  """Whether this is the only process of the run."""
  return jax.process_count() == 1


def is_first() -> bool:
  """Whether this process is the one that writes files and speaks."""
  return jax.process_index() == 0


def from_first(make: Callable[[], _T]) -> _T:
  """Returns on every process what the first one made; only it is asked.

  Args:
    make: Returns something that JSON can hold.

  Raises:
    user_error.UserError: `make` has raised one, which all processes raise.
  """
  if is_alone():
    return make()
  text = json.dumps(_outcome(make)).encode() if is_first() else b""
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  data = multihost_utils.broadcast_one_to_all(_padded(text, size))
  outcome = json.loads(np.asarray(data, np.uint8).tobytes()[:size])
  if "error" in outcome:
    raise user_error.UserError(outcome["error"])
  return outcome["value"]


def gather(value: _T) -> list[_T]:
  """Returns the values of all processes, by their numbers.

  Args:
    value: Of this process; something that JSON can hold.
  """
  if is_alone():
    return [value]
  text = json.dumps(value).encode()
  sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
  data = multihost_utils.process_allgather(_padded(text, int(sizes.max())))
  rows = np.asarray(data, np.uint8)
  return [
    json.loads(row.tobytes()[:size])
    for row, size in zip(rows, sizes.tolist(), strict=True)
  ]


def share(items: Sequence[_T]) -> Sequence[_T]:
  """Returns the part of some work that is this process's.

  Args:
    items: All of it, the same on every process.
  """
  return items[jax.process_index() :: jax.process_count()]


def _outcome(make: Callable[[], Any]) -> dict[str, Any]:
  """Returns what was made as `value`, or the user's mistake as `error`."""
  try:
    return {"value": make()}
  except user_error.UserError as error:
    return {"error": str(error)}


def _padded(text: bytes, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
  room = _MIN_BYTES
  while room < size:
    room *= 2
  data = np.zeros(room, np.uint8)
  data[: len(text)] = np.frombuffer(text, np.uint8)
  return data
