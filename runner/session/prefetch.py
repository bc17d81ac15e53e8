"""Prefetching: a thread reads batches and moves them to the devices.

Each batch carries the position of the input after it. A checkpoint stores the
position of the last trained batch, so a resumed run neither skips nor repeats
what the thread has read ahead.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import queue
import threading
from typing import Any

import jax
import numpy as np

from paxon.inputs import base_input
from paxon.runner import user_error

Place = Callable[[Mapping[str, np.ndarray]], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedBatch:
  """One batch on its devices.

  Attributes:
    arrays: Global arrays.
    position: The state of the input after this batch, JSON values.
    strings: This host's arrays of strings, which no device can hold, by key.
  """

  arrays: dict[str, jax.Array]
  position: Mapping[str, Any]
  strings: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class _End:
  """Marks the end of the input."""


def next_batch(
  source: base_input.BaseInput, *, rolling: bool
) -> base_input.Batch:
  """Returns the next batch; a rolling input begins again after its end."""
  try:
    return source.get_next()
  except BaseException as error:
    if not (rolling and base_input.is_end(error)):
      raise
  source.reset()
  return source.get_next()


@contextlib.contextmanager
def reading(what: str = "The next batch") -> Iterator[None]:
  """Turns errors of the data in the context into `UserError`.

  Raises:
    UserError: A file of the data is missing, damaged or changed.
  """
  try:
    yield
  except (OSError, ValueError) as error:
    raise user_error.UserError(
      f"{what} cannot be read:"
      f" {user_error.sentence(user_error.one_line(error))}"
      f" ({user_error.find_location(error)})"
    ) from error


def check_data(
  inputs: Mapping[str, base_input.BaseInput], *, needs_targets: bool = True
) -> None:
  """Reads the first batch of each split, and up to its first target.

  Positions stay. A packed input keeps the batch and does not read it again.

  Args:
    inputs: The inputs by split.
    needs_targets: Whether a split without any target is an error.

  Raises:
    UserError: The data of a split cannot be read, or has no target.
  """
  for split, source in inputs.items():
    with reading(f"The first batch of the split {split!r}"):
      try:
        source.peek()
      except BaseException as error:
        if not base_input.is_end(error):
          raise
        raise user_error.UserError(
          f"The split {split!r} has no batch; use more data or a smaller"
          " global_batch_size."
        ) from None
    if not needs_targets:
      continue
    with reading(f"The split {split!r}"):
      problem = source.find_problem_of_targets()
    if problem is not None:
      raise user_error.UserError(f"The split {split!r}: {problem}")


def describe_untrained(
  inputs: Mapping[str, base_input.BaseInput],
) -> list[str]:
  """Returns a line for each split that has read examples without a target."""
  found = ((k, each.describe_untrained()) for k, each in inputs.items())
  return [f"{split}: {text}" for split, text in found if text]


class Prefetcher:
  """Iterates over an input from its position; a context manager.

  While it is entered, nothing else may use the input.
  """

  def __init__(
    self,
    source: base_input.BaseInput,
    *,
    place: Place,
    limit: int | None = None,
    rolling: bool = False,
    depth: int = 2,
    size_of: Callable[[int], int] | None = None,
  ) -> None:
    """Starts reading up to `limit` batches, with `depth` of them ready.

    `size_of` returns the global batch size of each, the first being 0; None
    leaves the size of the source, which `close` restores.
    """
    self._source = source
    self._place = place
    self._limit = limit
    self._rolling = rolling
    self._size_of = size_of
    self._size = source.global_batch_size
    self._ready: queue.Queue[PlacedBatch | _End | BaseException] = queue.Queue(
      depth
    )
    self._closed = threading.Event()
    self._thread = threading.Thread(
      target=self._read, name="prefetch", daemon=True
    )
    self._thread.start()

  def __enter__(self) -> "Prefetcher":
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def __iter__(self) -> Iterator[PlacedBatch]:
    """Yields batches; re-raises errors of the thread.

    Raises:
      UserError: A file of the data is missing, damaged or changed.
    """
    while True:
      item = self._ready.get()
      if isinstance(item, _End):
        return
      if isinstance(item, BaseException):
        raise item
      yield item

  def is_ready(self) -> bool:
    """Whether the next batch, or the end, is available without waiting."""
    return not self._ready.empty()

  def close(self) -> None:
    """Ends the thread; drops the batches that are ready."""
    self._closed.set()
    # The thread may be waiting for space in the queue; then it puts at most one
    # more item before it sees that it is closed.
    with contextlib.suppress(queue.Empty):
      while True:
        self._ready.get_nowait()
    self._thread.join()
    if self._size_of is not None:
      self._source.set_global_batch_size(self._size)

  def _read(self) -> None:
    item: PlacedBatch | _End | BaseException
    count = 0
    while not self._closed.is_set():
      try:
        item = _End() if count == self._limit else self._next(count)
      except BaseException as error:
        item = _End() if base_input.is_end(error) else error
      self._ready.put(item)
      if not isinstance(item, PlacedBatch):
        return
      count += 1

  def _next(self, index: int) -> PlacedBatch:
    if self._size_of is not None:
      self._source.set_global_batch_size(self._size_of(index))
    with reading():
      batch = next_batch(self._source, rolling=self._rolling)
    position = self._source.get_state()
    strings = {k: v for k, v in batch.items() if v.dtype == object}
    arrays = {k: v for k, v in batch.items() if k not in strings}
    return PlacedBatch(
      arrays=self._place(arrays), position=position, strings=strings
    )
