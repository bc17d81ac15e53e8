"""All of a training run's watching, in the words of its loop.

The loop says what happens; nothing here waits for a device, but for the edges
of a profile. An `Observer()` without arguments watches nothing and writes
nothing, for loops that are run by tests and benchmarks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
from typing import Any, TypeVar

from etils import epath
import jax

from paxon.inputs import base_input
from paxon.runner import run_dir as run_dirs
from paxon.runner.monitoring import (
  goodput,
  memory,
  profiling,
  spikes,
  step_figures,
  watchdog,
)
from paxon.runner.monitoring import launch as launch_lib
from paxon.runner.settings import monitoring

_T = TypeVar("_T")
Position = Mapping[str, Any]


class Observer:
  """What the loop tells; use it as a context, entered when training begins.

  Attributes:
    ledger: Where the time of the main thread goes.
  """

  def __init__(
    self,
    settings: monitoring.MonitoringSettings | None = None,
    *,
    ledger: goodput.Ledger | None = None,
    run_dir: epath.Path | None = None,
    launch: launch_lib.Launch | None = None,
    train_input: base_input.BaseInput | None = None,
    resume_step: int = 0,
  ) -> None:
    """Prepares.

    Args:
      settings: What to watch; None for nothing.
      ledger: Begun when the program was; None keeps no file.
      run_dir: Where files are written; None writes none.
      launch: What the command line said.
      train_input: Is asked for the documents of a batch that made a jump.
      resume_step: The step from which training goes on.
    """
    self.ledger = ledger or goodput.Ledger()
    self._watchdog: watchdog.Watchdog | None = None
    self._spikes: spikes.SpikeReport | None = None
    self._profiler = profiling.Profiler(None, epath.Path("."))
    if settings is not None and run_dir is not None:
      if settings.watchdog is not None:
        self._watchdog = watchdog.Watchdog(
          settings.watchdog, run_dir, host=_host()
        )
      # All processes see the same figures; one tells of them.
      is_first = jax.process_index() == 0
      if settings.spikes is not None and is_first:
        self._spikes = spikes.SpikeReport(
          settings.spikes,
          run_dir / run_dirs.SPIKES,
          resume_step=resume_step,
          train_input=train_input,
        )
      if launch is not None and is_first:
        self._profiler = profiling.Profiler(
          launch.profile, run_dir / run_dirs.PROFILE
        )
        if launch.profile and launch.profile.stop - 1 <= resume_step:
          self._say(
            f"nothing is profiled: --profile_steps={launch.profile} lies before"
            f" step {resume_step + 1}, with which the run goes on"
          )
    self._figures: step_figures.StepFigures | None = None
    self._devices: Sequence[jax.Device] = ()
    self._step_memory: dict[str, float] = {}
    # Of the steps in flight, two at most.
    self._positions: dict[int, tuple[Position, Position]] = {}
    self._stack = contextlib.ExitStack()
    self.ledger.start(resume_step)

  def __enter__(self) -> "Observer":
    if self._watchdog is not None:
      self._stack.enter_context(self._watchdog)
    return self

  def __exit__(self, *exception: object) -> None:
    with self._stack:
      self._say(self._profiler.close())

  def compiled(
    self,
    traced: jax.stages.Traced,
    compiled: jax.stages.Compiled,
    *,
    length: int,
    devices: Sequence[jax.Device],
  ) -> None:
    """Counts the step that was just compiled; says what MFU stands on.

    Args:
      traced: Whose FLOPs are counted.
      compiled: Whose memory is told where devices do not count theirs.
      length: Tokens of a row.
      devices: Of the mesh.
    """
    self._devices = devices
    self._step_memory = memory.step_memory(compiled)
    self._figures = step_figures.of_step(
      traced,
      length=length,
      num_devices=len(devices),
      device_kind=devices[0].device_kind,
    )
    self._say(self._figures.note)
    # If the process dies in its first seconds of training, this much is known.
    self.ledger.flush()

  @contextlib.contextmanager
  def training(self, step: int) -> Iterator[None]:
    """The loop itself; it goes on from `step`."""
    with self.ledger.span(goodput.Cause.PRODUCTIVE):
      if self._watchdog is not None:
        self._watchdog.arm(step)
      try:
        yield
      except BaseException:
        # What went wrong first is what is told, such as a full disk.
        with contextlib.suppress(OSError):
          self.ledger.flush()
        raise
      finally:
        if self._watchdog is not None:
          self._watchdog.disarm()
      self.ledger.flush()

  @contextlib.contextmanager
  def span(self, cause: goodput.Cause) -> Iterator[None]:
    """Time of the main thread that goes to something else than steps.

    The watchdog sleeps meanwhile, but for checkpoints, which may hang.

    Args:
      cause: What it goes to.
    """
    with contextlib.ExitStack() as stack:
      stack.enter_context(self.ledger.span(cause))
      if cause is goodput.Cause.CHECKPOINT:
        # No attempt goes on from a step that the file does not know.
        self.ledger.flush()
      if self._watchdog and cause is not goodput.Cause.CHECKPOINT:
        stack.enter_context(self._watchdog.suspended())
      yield

  def waits(
    self,
    batches: Iterable[_T],
    *,
    is_ready: Callable[[], bool],
    is_busy: Callable[[], bool],
  ) -> Iterator[_T]:
    """Yields from `batches`; see `goodput.Ledger.waits`."""
    return self.ledger.waits(batches, is_ready=is_ready, is_busy=is_busy)

  def before_step(
    self,
    step: int,
    *,
    paused: Callable[[], contextlib.AbstractContextManager[None]],
  ) -> contextlib.AbstractContextManager[object]:
    """Returns the context in which a step is dispatched.

    Args:
      step: Its number.
      paused: Waits until the devices have nothing to do, and leaves the time
        in its context out of the throughput. It is called at the edges of a
        profile only.
    """
    if self._profiler.is_edge(step):
      with paused(), self.span(goodput.Cause.OTHER):
        self._say(self._profiler.move(step))
    return self._profiler.step(step)

  def dispatched(self, step: int, *, before: Position, after: Position) -> None:
    """Notes where the batch of a step is in the data.

    Args:
      step: Its number.
      before: The state of the input before its batch.
      after: The same after it.
    """
    self._positions[step] = before, after

  def finished(self, step: int, values: Mapping[str, float]) -> None:
    """Takes the metrics of a finished step.

    Args:
      step: Its number; each step is told, in order.
      values: `loss` and `grad_norm` at least, where there are.
    """
    self.ledger.made(step)
    if self._watchdog is not None:
      self._watchdog.beat(step)
    before, after = self._positions.pop(step, ({}, {}))
    if self._spikes is not None:
      self._spikes.observe(step, values, before=before, after=after)

  def figures(self, step_seconds: float) -> dict[str, float]:
    """Returns what is written beside the metrics of a step.

    Args:
      step_seconds: Mean time of the steps since the last summary.
    """
    values = {"step_seconds": step_seconds}
    if self._figures is not None:
      values |= self._figures.values(step_seconds)
      values["goodput"] = self.ledger.account().goodput
      values |= memory.device_memory(self._devices, step=self._step_memory)
      values |= memory.host_memory()
    return values

  def _say(self, line: str | None) -> None:
    if line:
      print(line, flush=True)


def _host() -> str:
  """Returns what tells this host's files from those of others."""
  if jax.process_count() == 1:
    return ""
  return f"-host{jax.process_index()}"
