"""Child processes of one compiler each.

Each vendor's compiler needs environment variables that JAX reads when it
starts, and a compiler may crash. Threads may start them at the same time; as
many run at once as the machine has cores and memory for.
"""

from collections.abc import Callable, Iterable
from concurrent import futures
import contextlib
import functools
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, TypeVar

from paxon.runner import user_error
from paxon.runner.plan import target as targets
from paxon.runner.plan import topology

_LAST_LINES = 15
_LINE_LENGTH = 500
# The largest compiler, that for TPUs, takes up to this much.
_BYTES = 3 * 10**9


def run_worker(
  worker: str,
  request: bytes,
  target: targets.Target,
  *,
  is_compiled: bool,
  time_limit: float,
) -> str:
  """Runs a module in a separate process.

  Args:
    worker: Name of the module; its arguments are the file with the request and
      the file to write the result to. It calls `end_with_parent`.
    request: Contents of the first file.
    target: Target whose compiler it calls.
    is_compiled: Whether it compiles, or traces only.
    time_limit: Seconds after which the process is stopped.

  Returns:
    The text of its result.

  Raises:
    UserError: It took too long.
    RuntimeError: The process died; the message has its last lines.
  """
  with (
    _slots(),
    tempfile.TemporaryDirectory(prefix="paxon-plan-") as folder,
    contextlib.ExitStack() as pipe,
  ):
    request_file = pathlib.Path(folder, "request")
    result_file = pathlib.Path(folder, "result")
    request_file.write_bytes(request)
    # Closed when this process ends, in whatever way; see `end_with_parent`.
    read_end, write_end = os.pipe()
    pipe.callback(os.close, read_end)
    held = pipe.enter_context(os.fdopen(write_end, "wb"))
    _running().add(held)
    pipe.callback(_running().discard, held)
    try:
      done = subprocess.run(
        [sys.executable, "-m", worker, str(request_file), str(result_file)],
        env=environment(target, is_compiled=is_compiled),
        stdin=read_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=time_limit,
        check=False,
      )
    except subprocess.TimeoutExpired as error:
      raise user_error.UserError(
        f"{target}: the compiler took more than {time_limit:.0f} s."
      ) from error
    if done.returncode or not result_file.exists():
      last = done.stdout.splitlines()[-_LAST_LINES:]
      lines = "\n".join(line[:_LINE_LENGTH] for line in last)
      raise RuntimeError(
        f"Planning for {target} {_how_it_ended(done.returncode)}:\n{lines}"
      )
    return result_file.read_text()


_T = TypeVar("_T")
_Item = TypeVar("_Item")


def in_parallel(
  function: Callable[[_Item], _T], items: Iterable[_Item]
) -> list[_T]:
  """Returns the results of a function that calls `run_worker`, by threads.

  If it is interrupted, all processes are ended: a compiler takes no notice of
  an interrupt, and a thread cannot be stopped.

  Args:
    function: Called with each item.
    items: Its arguments.
  """
  pool = futures.ThreadPoolExecutor(count_parallel())
  tasks = [pool.submit(function, item) for item in items]
  try:
    return [task.result() for task in tasks]
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
    while not all(task.done() for task in tasks):
      for held in tuple(_running()):
        held.close()
      time.sleep(0.05)


def count_parallel() -> int:
  """Returns how many processes `run_worker` runs at once."""
  try:
    meminfo = pathlib.Path("/proc/meminfo").read_text()
    # The page cache counts as available here.
    free = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
  except (OSError, ValueError, IndexError):
    free = _BYTES
  return max(1, min(len(os.sched_getaffinity(0)), free // _BYTES))


@functools.cache
def _slots() -> threading.BoundedSemaphore:
  return threading.BoundedSemaphore(count_parallel())


@functools.cache
def _running() -> set[IO[bytes]]:
  """Pipes that are open as long as their process may run."""
  return set()


def end_with_parent() -> None:
  """Ends this process when the process that called `run_worker` is gone.

  A compiler that nobody waits for would run on for minutes.
  """
  if not stat.S_ISFIFO(os.fstat(0).st_mode):
    return

  def wait() -> None:
    os.read(0, 1)
    # No cleaning up: a compiler cannot be interrupted.
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


def _how_it_ended(status: int) -> str:
  if status != -signal.SIGKILL:
    return f"ended with status {status}"
  return (
    f"was killed (status {status}); a compiler takes up to 3 GB, so the machine"
    " may have run out of memory"
  )


def environment(target: targets.Target, *, is_compiled: bool) -> dict[str, str]:
  """Returns the variables of the process: the machine's, and the target's."""
  variables = topology.environment(target)
  if not is_compiled:
    # CPU devices stand in for those of the target.
    variables["JAX_NUM_CPU_DEVICES"] = str(target.num_devices)
  flags = os.environ.get("XLA_FLAGS"), variables.get("XLA_FLAGS")
  if any(flags):
    # The program that runs gets the user's, so the plan does too.
    variables["XLA_FLAGS"] = " ".join(filter(None, flags))
  # The same modules as here, wherever they come from.
  variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
  variables["PYTHONSAFEPATH"] = "1"
  return {**os.environ, **variables}
