"""Stage lines: a sign of life while a program prints nothing else.

Compilation, an evaluation or sampling may take minutes. `shown` prints what the
program is doing every few seconds, and after five minutes every half minute.
`StepLines` does so while steps are so slow that their metrics are rare; a
terminal has a progress bar instead.
"""

from collections.abc import Callable, Iterator
import contextlib
import itertools
import sys
import threading
import time

# Seconds until the next line, for one minute, four more, and then. Two stages
# that follow each other, each without a line, are silent for twice the first.
PAUSES = (*[2.4] * 25, *[4.0] * 60, 30.0)


@contextlib.contextmanager
def shown(
  text: str,
  *,
  pauses: tuple[float, ...] = PAUSES,
  write: Callable[[str], object] = print,
) -> Iterator[None]:
  """Prints `<text>: <seconds> s` while the context lasts, if it is long.

  Args:
    text: What is done, such as `evaluating`.
    pauses: Seconds before each line; the last is repeated.
    write: Prints a line.
  """
  done = threading.Event()
  begin = time.monotonic()

  def repeat() -> None:
    for pause in itertools.chain(pauses, itertools.repeat(pauses[-1])):
      if done.wait(pause):
        return
      write(f"{text}: {time.monotonic() - begin:.0f} s")
      sys.stdout.flush()

  thread = threading.Thread(target=repeat, name="stages", daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


class StepLines:
  """Prints the last finished step whenever training prints nothing for long.

  A context entered for training. The pauses are those of the whole training,
  so that a long run with slow steps does not fill its log.
  """

  def __init__(
    self,
    *,
    pauses: tuple[float, ...] = PAUSES,
    write: Callable[[str], object] = print,
  ) -> None:
    """Prepares; see `shown` for the arguments."""
    self._pauses = pauses
    self._write = write
    self._step: int | None = None
    self._is_paused = False
    # Set by whatever else is printed, which restarts the pause.
    self._event = threading.Event()
    self._done = False
    self._thread: threading.Thread | None = None

  def __enter__(self) -> "StepLines":
    self._thread = threading.Thread(
      target=self._repeat, name="stages", daemon=True
    )
    self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._done = True
    self.restart()
    if self._thread is not None:
      self._thread.join()

  def finished(self, step: int) -> None:
    """Takes the number of a finished step."""
    self._step = step

  def restart(self) -> None:
    """Begins another pause, because a line has been printed."""
    self._event.set()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Prints nothing while the context lasts, which has its own lines."""
    self._is_paused = True
    try:
      yield
    finally:
      self._is_paused = False
      self.restart()

  def _repeat(self) -> None:
    begin = time.monotonic()
    ends = list(itertools.accumulate(self._pauses))
    while not self._done:
      seconds = time.monotonic() - begin
      number = sum(end <= seconds for end in ends[:-1])
      if self._event.wait(self._pauses[number]):
        self._event.clear()
      elif not self._is_paused:
        at = "the first step" if self._step is None else f"step {self._step}"
        state = "waiting for" if self._step is None else "finished"
        self._write(
          f"{state} {at}: {time.monotonic() - begin:.0f} s of training"
        )
        sys.stdout.flush()
