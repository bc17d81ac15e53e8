"""Report of the process for which the others wait, while a run trains.

A step of SPMD takes the same time in every process, because none finishes it
before all have dispatched it. So each process measures, by its own clock, how
long its devices waited for it before step k, and how much of that had a cause
that it knows: waiting for data, a checkpoint, other work between two steps,
garbage collection. The rest is work of the host.

  late(k)   = max(0, time of dispatch of k - time of the end of step k - 1)
  excess(k) = late(k) of the latest process - median of the others

The slowest process of some steps is the one with the largest sum of `excess`
over those at which it was the latest. A thread waits for the loss of each step,
which gives its end. A small program gathers the times behind the last of these
steps; they are read when the metrics of this step are, so that no device idles.
Devices that compute slowly do not show here, but in `runner/devices`.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
import gc
import os
import queue
import threading
import time
from typing import Final

import jax
import numpy as np

from paxon.learners import train_state
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import goodput
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.session import session as session_lib
from paxon.runner.training import hooks
from paxon.sharding import arrays

# In the order of the last dimension of gathered times.
CAUSES: Final = {
  "data": "waits for data",
  "checkpoint": "saves checkpoints",
  "pause": "evaluates or runs hooks",
  "garbage": "collects garbage",
  "host": "is work of the host",
}
# More recent steps of an interval are enough.
_MAX_STEPS = 100
# An excess below this is chance.
_MIN_SECONDS = 1e-3
# Share of the time that is worth a line.
_MIN_SHARE = 0.02
_CLOSE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slowest:
  """The slowest process of some steps.

  Attributes:
    process: Its index.
    steps: Number of steps at which it was the latest.
    of_steps: Number of all steps.
    excess: Mean seconds at `steps` that it was later than the others' median.
    causes: The same by cause, see `CAUSES`.
  """

  process: int
  steps: int
  of_steps: int
  excess: float
  causes: Mapping[str, float]

  def line(self, host: str) -> str:
    """Returns one line: the process, how late it is, and the main cause."""
    cause = max(self.causes, key=lambda name: self.causes[name])
    seconds = min(self.causes[cause], self.excess)
    return (
      f"slowest process {self.process} ({host}):"
      f" {1e3 * self.excess:.0f} ms later than the median of the others at"
      f" {self.steps} of {self.of_steps} steps; {1e3 * seconds:.0f} ms of it"
      f" {CAUSES[cause]}"
    )

  def metrics(self) -> dict[str, float]:
    """Returns metrics; seconds are means over all steps."""
    share = self.steps / self.of_steps
    return {
      "straggler_process": float(self.process),
      "straggler_steps": float(self.steps),
      "straggler_seconds": share * self.excess,
      **{
        f"straggler_{name}_seconds": share * seconds
        for name, seconds in self.causes.items()
      },
    }


def find_slowest(times: np.ndarray) -> Slowest | None:
  """Returns the slowest process; None if no step waits for one.

  Args:
    times: Seconds by process, step and cause, float [processes, steps, causes],
      of at least two processes.
  """
  late = times.sum(-1)
  latest = late.argmax(0)
  excess = late.max(0) - np.median(np.sort(late, 0)[:-1], axis=0)
  excess = np.where(excess >= _MIN_SECONDS, excess, 0.0)
  costs = np.bincount(latest, weights=excess, minlength=len(times))
  process = int(costs.argmax())
  if not costs[process]:
    return None
  at = (latest == process) & (excess > 0)
  means = times[:, at].mean(1)
  others = np.median(np.delete(means, process, axis=0), axis=0)
  return Slowest(
    process=process,
    steps=int(at.sum()),
    of_steps=late.shape[1],
    excess=float(excess[at].mean()),
    causes=dict(
      zip(CAUSES, np.maximum(means[process] - others, 0).tolist(), strict=True)
    ),
  )


def make(
  session: session_lib.Session, observer: observer_lib.Observer
) -> list[hooks.Hook]:
  """Returns the hook, or none if there is only one process."""
  return [] if agreement.is_alone() else [Stragglers(session, observer)]


class Stragglers(hooks.Hook):
  """Reports the slowest process at the interval of the training metrics."""

  def __init__(
    self,
    session: session_lib.Session,
    observer: observer_lib.Observer,
    *,
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    """Compiles the gathering; all processes call it.

    Args:
      session: The job on its devices.
      observer: Has the account of time, and gets the metrics.
      clock: Returns seconds.
    """
    self._clock = clock
    self._every_steps = session.job.summary_every_steps
    self._ledger = observer.ledger
    self._hosts: list[str] = agreement.gather(os.uname().nodename)
    self._place = arrays.on_each_device(session.layout)
    processes = [d.process_index for d in session.layout.mesh.devices.flat]
    first = np.asarray(
      [processes.index(process) for process in range(len(self._hosts))]
    )
    self._select = session.layout.jit(
      lambda x: x[first], out_shardings=session.layout.replicated
    )
    self._size = min(self._every_steps, _MAX_STEPS), len(CAUSES)
    self._select(self._place(np.zeros(self._size, np.float32)))
    self._garbage = _GarbageTime(clock)
    self._reset()
    observer.sources.append(self._report)

  def _reset(self) -> None:
    self._thread: threading.Thread | None = None
    self._rows: collections.deque[np.ndarray] = collections.deque(
      maxlen=self._size[0]
    )
    self._begin = self._clock()
    # The gathered times, their number of steps, and the seconds of the steps.
    self._pending: tuple[jax.Array, int, float] | None = None
    self._before: np.ndarray | None = None
    # The last finished step, and when it was.
    self._end = -1, 0.0

  def wrap(self, step: int, train_step: hooks.Step) -> hooks.Step:
    """Returns a step that is timed."""
    return functools.partial(self._dispatch, step, train_step)

  def _dispatch(
    self,
    step: int,
    train_step: hooks.Step,
    state: train_state.TrainState,
    batch: hooks.Batch,
  ) -> hooks.Outputs:
    if self._thread is None:
      self._start()
    self._rows.append(self._measure(step))
    outputs = train_step(state, batch)
    self._queue.put((step, jax.tree.leaves(outputs[1])[0]))
    if hooks.is_due(step, self._every_steps):
      times = np.zeros(self._size, np.float32)
      times[: len(self._rows)] = self._rows
      now = self._clock()
      gathered = self._select(self._place(times))
      self._pending = gathered, len(self._rows), now - self._begin
      self._rows.clear()
      self._begin = now
    return outputs

  def _measure(self, step: int) -> np.ndarray:
    """Returns how late this process is, by cause; float [causes]."""
    now = self._clock()
    spent = self._ledger.count_seconds()
    data, checkpoint = goodput.Cause.DATA, goodput.Cause.CHECKPOINT
    productive = goodput.Cause.PRODUCTIVE
    total = np.asarray(
      [
        spent.pop(data, 0.0),
        spent.pop(checkpoint, 0.0),
        sum(spent.values()) - spent.get(productive, 0.0),
        self._garbage.seconds,
        0.0,
      ]
    )
    before, self._before = self._before, total
    last, end = self._end
    if before is None or last != step - 1:
      return np.zeros_like(total)
    late, causes = now - end, total - before
    known = causes.sum()
    if known > late:
      return causes * late / known
    causes[-1] = late - known
    return causes

  def _start(self) -> None:
    self._queue: queue.SimpleQueue[tuple[int, jax.Array] | None] = (
      queue.SimpleQueue()
    )
    self._thread = threading.Thread(
      target=self._watch, name="stragglers", daemon=True
    )
    self._thread.start()
    gc.callbacks.append(self._garbage)

  def _watch(self) -> None:
    while (item := self._queue.get()) is not None:
      step, loss = item
      try:
        jax.block_until_ready(loss)
      except Exception:
        # The loop raises it, too, where it reads the loss.
        return
      self._end = step, self._clock()

  def _report(self) -> Mapping[str, float]:
    """Returns the metrics of the last interval; prints a line if it pays."""
    if self._pending is None:
      return {}
    (gathered, count, seconds), self._pending = self._pending, None
    times = np.asarray(gathered, np.float64)[:, :count]
    own = times[jax.process_index()].sum(-1).mean()
    values = {"late_seconds": float(own), "straggler_seconds": 0.0}
    slowest = find_slowest(times)
    if slowest is None:
      return values
    cost = slowest.steps * slowest.excess
    if agreement.is_first() and cost >= _MIN_SHARE * seconds:
      print(slowest.line(self._hosts[slowest.process]), flush=True)
    return values | slowest.metrics()

  def close(self) -> None:
    """Ends the thread."""
    if self._thread is None:
      return
    gc.callbacks.remove(self._garbage)
    self._queue.put(None)
    # A step that hangs must not keep the process from its end.
    self._thread.join(_CLOSE_SECONDS)
    self._reset()


class _GarbageTime:
  """Counts the time of Python's garbage collections; see `gc.callbacks`.

  Attributes:
    seconds: The sum.
  """

  def __init__(self, clock: Callable[[], float]) -> None:
    self._clock = clock
    self.seconds = 0.0
    self._begin = 0.0

  def __call__(self, phase: str, info: Mapping[str, int]) -> None:
    """Notes the beginning or the end of a collection."""
    del info
    if phase == "start":
      self._begin = self._clock()
    else:
      self.seconds += self._clock() - self._begin
