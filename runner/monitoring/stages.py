"""Stage lines: a sign of life while a program prints nothing else.

Compilation, an evaluation or sampling may take minutes. `shown` prints what the
program is doing every few seconds, then every half minute.
"""

from collections.abc import Callable, Iterator
import contextlib
import itertools
import sys
import threading
import time

# Seconds until the next line.
PAUSES = (4.0, 4.0, 4.0, 4.0, 4.0, 30.0)


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
