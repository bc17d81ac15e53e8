"""Examples read by threads or processes before they are asked for.

Workers change when an example is read, never which one comes next: a stream
knows the numbers that follow, has them read in advance, and takes each when it
gets there; or it is told the numbers of a batch that is planned, and has them
read side by side. So results are the same with any number of workers, and
nothing of them is in a saved state.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import multiprocessing
import pickle
import traceback

from paxon.inputs import example_source

# Examples of one task, so that sending costs little of its time.
_CHUNK = 8

# An example, or what reading it raised.
_Read = example_source.Example | Exception

# Of a worker process: the sources it was started with.
_sources: list[example_source.ExampleSource] = []


@dataclasses.dataclass(kw_only=True, eq=False)
class Workers:
  """Threads or processes that all streams of an input share.

  Attributes:
    num_workers: How many; at least one.
    processes: Whether they are processes, for sources whose reading is Python
      code. Their sources are pickled once.
    sources: Those that may be read.
  """

  num_workers: int
  processes: bool
  sources: Sequence[example_source.ExampleSource]

  def __post_init__(self) -> None:
    self._executor: futures.Executor
    if self.processes:
      # A fork of a process with threads, such as JAX's, may hang.
      self._executor = futures.ProcessPoolExecutor(
        self.num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(list(self.sources),),
      )
    else:
      self._executor = futures.ThreadPoolExecutor(
        self.num_workers, thread_name_prefix="read_ahead"
      )

  def read_ahead(self, source: example_source.ExampleSource) -> "ReadAhead":
    """Returns what reads one of the sources."""
    number = next(i for i, s in enumerate(self.sources) if s is source)
    return ReadAhead(self, source, number)

  def submit(
    self, source: example_source.ExampleSource, number: int, chunk: list[int]
  ) -> "futures.Future[list[_Read]]":
    """Has some examples of a source read."""
    with _told_of_ended_workers():
      if self.processes:
        return self._executor.submit(_read_of, number, chunk)
      return self._executor.submit(_read, source, chunk)

  def close(self) -> None:
    """Ends the workers; what nobody has begun to read is dropped."""
    self._executor.shutdown(wait=True, cancel_futures=True)


class ReadAhead:
  """Reads the examples of one source that come next."""

  def __init__(
    self, workers: Workers, source: example_source.ExampleSource, number: int
  ) -> None:
    """Prepares; nothing is read yet.

    Args:
      workers: Who reads.
      source: What is read.
      number: Its place among the sources of the workers.
    """
    self._workers = workers
    self._source = source
    self._number = number
    self._depth = 2 * _CHUNK * workers.num_workers
    # Positions [first, end) are read, or being read.
    self._first = self._end = 0
    self._tasks: dict[int, tuple[futures.Future, int]] = {}
    # The tasks by the position after their last example.
    self._chunks: collections.deque[tuple[int, list[int]]] = collections.deque()

  def expect(
    self, position: int, number_at: Callable[[int], int | None]
  ) -> None:
    """Has the examples from a position on read.

    Args:
      position: Where the stream is.
      number_at: The example at a position, None after the end.
    """
    if not self._first <= position <= self._end:
      self._tasks.clear()  # The stream was set to another place.
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
    # What nobody has taken was of another host's rows.
    while self._chunks[0][0] < position - self._depth:
      for number in self._chunks.popleft()[1]:
        self._tasks.pop(number, None)

  def fetch(self, numbers: Sequence[int]) -> None:
    """Has some examples read that will be asked for next."""
    missing = [n for n in dict.fromkeys(numbers) if n not in self._tasks]
    for begin in range(0, len(missing), _CHUNK):
      chunk = missing[begin : begin + _CHUNK]
      task = self._workers.submit(self._source, self._number, chunk)
      self._tasks.update((n, (task, i)) for i, n in enumerate(chunk))

  def get(self, number: int) -> example_source.Example:
    """Returns an example, read ahead or not; raises what reading it did."""
    task, place = self._tasks.pop(number, (None, 0))
    if task is None:
      return self._source[number]
    with _told_of_ended_workers():
      found = task.result()[place]
    if isinstance(found, Exception):
      raise found
    return found


@contextlib.contextmanager
def _told_of_ended_workers() -> Iterator[None]:
  """Says what it means that an executor is broken."""
  try:
    yield
  except futures.BrokenExecutor as error:
    raise RuntimeError(
      "A process that reads examples has ended: it was killed, or the machine"
      " has no memory left. Set PackedInput.num_workers lower, or"
      " worker_processes to False."
    ) from error


def _start(sources: list[example_source.ExampleSource]) -> None:
  _sources[:] = sources


def _read_of(number: int, chunk: list[int]) -> list[_Read]:
  return [
    _portable(each) if isinstance(each, Exception) else each
    for each in _read(_sources[number], chunk)
  ]


def _portable(error: Exception) -> Exception:
  """Returns an exception that can be sent, with where it was raised."""
  where = "".join(traceback.format_exception(error))
  try:
    pickle.loads(pickle.dumps(error))
  except Exception:
    # One that is not made from its message alone would end all workers.
    error = RuntimeError(f"{type(error).__name__}: {error}")
  error.add_note(where)
  return error


def _read(
  source: example_source.ExampleSource, chunk: list[int]
) -> list[_Read]:
  """Returns examples; one that cannot be read does no harm to the others."""
  found: list[_Read] = []
  for number in chunk:
    try:
      found.append(source[number])
    except Exception as error:
      found.append(error)
  return found
