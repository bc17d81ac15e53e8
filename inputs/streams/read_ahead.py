"""Asynchronous reading of examples by threads or processes.

Workers affect when an example is read, never the order: a stream submits the
indices that follow, or those of a planned batch, and collects the results when
they are needed. Results are the same with any number of workers, and saved
states do not depend on them.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import multiprocessing
import pickle
import sys
import traceback
from typing import Any

from paxon.inputs.sources import example_source

# Examples per task, to amortize the overhead of a task.
_CHUNK = 8

# An example, or the error of reading it.
_Read = example_source.Example | Exception

# In a worker process: the sources that it was started with.
_sources: list[example_source.ExampleSource] = []


@dataclasses.dataclass(kw_only=True, eq=False)
class Workers:
  """A pool of threads or processes shared by all streams of an input.

  Attributes:
    num_workers: The number of workers, at least one.
    processes: Whether to use processes, for sources that spend their time in
      Python code. The sources are pickled once.
    sources: The sources to read from.
  """

  num_workers: int
  processes: bool
  sources: Sequence[example_source.ExampleSource]

  def __post_init__(self) -> None:
    self._executor: futures.Executor
    if self.processes:
      # Forking a process that has threads, such as JAX's, may hang.
      self._executor = futures.ProcessPoolExecutor(
        self.num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(_find_guards(), list(self.sources)),
      )
    else:
      self._executor = futures.ThreadPoolExecutor(
        self.num_workers, thread_name_prefix="read_ahead"
      )

  def read_ahead(self, source: example_source.ExampleSource) -> "ReadAhead":
    """Returns a reader of one of the sources."""
    number = next(i for i, s in enumerate(self.sources) if s is source)
    return ReadAhead(self, source, number)

  def submit(
    self, source: example_source.ExampleSource, number: int, chunk: list[int]
  ) -> "futures.Future[list[_Read]]":
    """Submits a chunk of indices of a source for reading."""
    with _explain_broken_pool():
      if self.processes:
        return self._executor.submit(_read_chunk, number, chunk)
      return self._executor.submit(_read, source, chunk)

  def close(self) -> None:
    """Shuts the workers down and cancels pending reads."""
    self._executor.shutdown(wait=True, cancel_futures=True)


class ReadAhead:
  """Reads upcoming examples of one source in the background."""

  def __init__(
    self, workers: Workers, source: example_source.ExampleSource, number: int
  ) -> None:
    """Initializes the reader of the source at `workers.sources[number]`."""
    self._workers = workers
    self._source = source
    self._number = number
    self._depth = 2 * _CHUNK * workers.num_workers
    # Positions [first, end) have been submitted.
    self._first = self._end = 0
    self._tasks: dict[int, tuple[futures.Future, int]] = {}
    # The submitted chunks, each with the position after it.
    self._chunks: collections.deque[tuple[int, list[int]]] = collections.deque()

  def expect(
    self, position: int, number_at: Callable[[int], int | None]
  ) -> None:
    """Submits the examples that follow the stream's current position.

    `number_at` returns the example index at a position, None after the end.
    """
    if not self._first <= position <= self._end:
      self._tasks.clear()  # The stream was repositioned.
      self._chunks.clear()
      self._end = position
    self._first = position
    while self._end < position + self._depth:
      places = range(self._end, self._end + _CHUNK)
      chunk = [n for n in map(number_at, places) if n is not None]
      self._end += _CHUNK
      if not chunk:
        continue
      task = self._workers.submit(self._source, self._number, chunk)
      self._tasks.update((n, (task, i)) for i, n in enumerate(chunk))
      self._chunks.append((self._end, chunk))
    # Examples not collected belong to other hosts.
    while self._chunks[0][0] < position - self._depth:
      for number in self._chunks.popleft()[1]:
        self._tasks.pop(number, None)

  def fetch(self, numbers: Sequence[int]) -> None:
    """Submits examples that are needed next."""
    missing = [n for n in dict.fromkeys(numbers) if n not in self._tasks]
    for begin in range(0, len(missing), _CHUNK):
      chunk = missing[begin : begin + _CHUNK]
      task = self._workers.submit(self._source, self._number, chunk)
      self._tasks.update((n, (task, i)) for i, n in enumerate(chunk))

  def get(self, number: int) -> example_source.Example:
    """Returns an example, prefetched or not; reraises its read error."""
    task, place = self._tasks.pop(number, (None, 0))
    if task is None:
      return self._source[number]
    with _explain_broken_pool():
      found = task.result()[place]
    if isinstance(found, Exception):
      raise found
    return found


@contextlib.contextmanager
def _explain_broken_pool() -> Iterator[None]:
  """Explains the error of a pool whose worker has died."""
  try:
    yield
  except futures.BrokenExecutor as error:
    raise RuntimeError(
      "A process that reads examples has ended: it was killed, or the machine"
      " has no memory left. Set PackedInput.num_workers lower, or"
      " worker_processes to False."
    ) from error


def _find_guards() -> list[Any]:
  """Returns the finders of modules that this process gives to its children."""
  return [x for x in sys.meta_path if getattr(x, "is_inherited", False)]


def _start(
  guards: list[Any], sources: list[example_source.ExampleSource]
) -> None:
  sys.meta_path[:0] = guards
  _sources[:] = sources


def _read_chunk(number: int, chunk: list[int]) -> list[_Read]:
  return [
    _portable(each) if isinstance(each, Exception) else each
    for each in _read(_sources[number], chunk)
  ]


def _portable(error: Exception) -> Exception:
  """Returns a picklable exception with the traceback as a note."""
  where = "".join(traceback.format_exception(error))
  try:
    pickle.loads(pickle.dumps(error))
  except Exception:
    # An exception that cannot be unpickled would break the pool.
    error = RuntimeError(f"{type(error).__name__}: {error}")
  error.add_note(where)
  return error


def _read(
  source: example_source.ExampleSource, chunk: list[int]
) -> list[_Read]:
  """Returns examples, or the error of each that cannot be read."""
  found: list[_Read] = []
  for number in chunk:
    try:
      found.append(source[number])
    except Exception as error:
      found.append(error)
  return found
