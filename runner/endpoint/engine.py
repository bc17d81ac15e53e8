"""A thread that generates for the requests of an endpoint."""

from collections.abc import Callable, Sequence
import math
import threading
from typing import TypeAlias

from paxon.layers.decoding import continuous_batching

# Takes the index of a request in its submission, and its next token; or None
# and the error that ended it. Called from the thread of the engine.
Deliver: TypeAlias = Callable[
  [int, continuous_batching.Token | None, BaseException | None], None
]


_IDLE_SECONDS = 1.0


class BusyError(Exception):
  """Too many requests wait."""


class FailedError(Exception):
  """A request cannot be continued; others are."""


class NonFiniteError(Exception):
  """The model gives log probabilities that are not numbers."""


class StoppedError(Exception):
  """The engine generates no more."""


class Submission:
  """Requests that were submitted together.

  Attributes:
    requests: The requests.
    deliver: Gets their tokens.
  """

  def __init__(
    self,
    requests: Sequence[continuous_batching.Request],
    deliver: Deliver,
    engine: "Engine",
  ) -> None:
    """Records the requests, all of them open."""
    self.requests, self.deliver = tuple(requests), deliver
    self._engine = engine
    # Numbers in the batcher by index, of those that have not ended.
    self.open: dict[int, int | None] = dict.fromkeys(range(len(requests)))

  def cancel(self, index: int | None = None) -> None:
    """Ends one request, or all; no more tokens of it are needed."""
    self._engine.cancel(self, index)


class Engine:
  """Runs a `Batcher` in a thread; all methods may be called from any thread.

  Attributes:
    num_generated: Number of ids that were generated.
    failure: The error that ended the thread, if any.
  """

  def __init__(
    self,
    batcher: continuous_batching.Batcher,
    *,
    max_waiting: int,
    when_idle: Callable[[], None] | None = None,
  ) -> None:
    """Records the batcher, which nothing else may use from here on.

    Args:
      batcher: Generates.
      max_waiting: Maximum number of requests that wait for a slot.
      when_idle: Called every second in which there is no request; None for
        nothing.
    """
    self.batcher = batcher
    self.max_open = batcher.num_slots + max_waiting
    self.num_generated = 0
    self.failure: BaseException | None = None
    self._when_idle = when_idle
    self._changed = threading.Condition()
    self._inbox: list[Callable[[], None]] = []
    self._open: set[Submission] = set()
    self._by_number: dict[int, tuple[Submission, int]] = {}
    self._stopping = False
    self._when_failed: Callable[[], None] | None = None
    self._thread = threading.Thread(target=self._run, name="engine")
    self._thread.daemon = True

  def start(self, *, when_failed: Callable[[], None] | None = None) -> None:
    """Starts the thread.

    Args:
      when_failed: Called after an error has ended the thread, see `failure`.
    """
    self._when_failed = when_failed
    self._thread.start()

  def close(self) -> None:
    """Stops the thread after its step; open requests get `StoppedError`."""
    with self._changed:
      self._stopping = True
      self._changed.notify()
    if self._thread.is_alive():
      self._thread.join()

  @property
  def num_open(self) -> int:
    """Number of requests that have not ended."""
    with self._changed:
      return sum(len(each.open) for each in self._open)

  def submit(
    self, requests: Sequence[continuous_batching.Request], deliver: Deliver
  ) -> Submission:
    """Queues requests.

    Raises:
      ValueError: One of them can never be served.
      BusyError: Too many requests wait.
      StoppedError: The engine has stopped.
    """
    for request in requests:
      self.batcher.check(request)
    submission = Submission(requests, deliver, self)
    with self._changed:
      if self.failure is not None or self._stopping:
        raise StoppedError("The engine has stopped.")
      count = sum(len(each.open) for each in self._open)
      if count + len(requests) > self.max_open:
        raise BusyError(
          f"{count} requests are open, of at most {self.max_open}."
        )
      self._open.add(submission)
      self._inbox.append(lambda: self._begin(submission))
      self._changed.notify()
    return submission

  def cancel(self, submission: Submission, index: int | None = None) -> None:
    """Ends one request of a submission, or all."""
    with self._changed:
      indices = [*submission.open] if index is None else [index]
      for each in indices:
        self._forget(submission, each)
      self._changed.notify()

  def _forget(self, submission: Submission, index: int) -> None:
    """Removes an open request, with the lock held."""
    if index not in submission.open:
      return
    number = submission.open.pop(index)
    if number is not None:
      del self._by_number[number]
      self._inbox.append(lambda: self.batcher.cancel(number))
    if not submission.open:
      self._open.discard(submission)

  def _begin(self, submission: Submission) -> None:
    for index in [*submission.open]:
      number = self.batcher.submit(submission.requests[index])
      submission.open[index] = number
      self._by_number[number] = submission, index

  def _run(self) -> None:
    error: BaseException = StoppedError("The engine has stopped.")
    try:
      while self._wait():
        self._step()
    except BaseException as failure:
      error = failure
    with self._changed:
      self.failure = error
      left = [(each, index) for each in self._open for index in each.open]
      self._open.clear()
    for submission, index in left:
      submission.deliver(index, None, error)
    if self._when_failed and not isinstance(error, StoppedError):
      self._when_failed()

  def _wait(self) -> bool:
    """Waits for work and takes the inbox; returns whether to go on."""
    with self._changed:
      while not (self._stopping or self._inbox or self.batcher.is_busy):
        if self._when_idle is None:
          self._changed.wait()
        elif not self._changed.wait(_IDLE_SECONDS):
          self._when_idle()
      inbox, self._inbox = self._inbox, []
      for action in inbox:
        action()
      return not self._stopping

  def _step(self) -> None:
    for token in self.batcher.step():
      with self._changed:
        self.num_generated += 1
        found = self._by_number.get(token.request)
        if found is None:  # Cancelled during the step.
          continue
        submission, index = found
        if math.isnan(token.log_prob):
          self._forget(submission, index)
        elif token.finish is not None:
          del self._by_number[token.request]
          submission.open.pop(index)
          if not submission.open:
            self._open.discard(submission)
      if token.error:
        submission.deliver(index, None, FailedError(token.error))
      elif math.isnan(token.log_prob):
        error = NonFiniteError(
          "The log probability of a generated token is NaN; the model's weights"
          " or activations are not finite."
        )
        submission.deliver(index, None, error)
      else:
        submission.deliver(index, token, None)
