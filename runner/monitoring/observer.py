"""Training-loop callbacks: goodput, watchdog, profiling and spike detection.

Nothing here waits for a device, except at the edges of a profile, which thus
contains whole steps only. `Observer()` without arguments monitors and writes
nothing, for tests and benchmarks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
import tempfile
import time
from typing import Any, TypeVar

from etils import epath
import jax

from paxon.inputs import base_input
from paxon.runner import files
from paxon.runner import run_dir as run_dirs
from paxon.runner.monitoring import (
  goodput,
  spikes,
  stages,
  step_metrics,
  watchdog,
)
from paxon.runner.monitoring import launch as launch_lib
from paxon.runner.settings import monitoring

_T = TypeVar("_T")
Position = Mapping[str, Any]
# Causes that may take long and print nothing else.
_STAGES = {
  goodput.Cause.CHECKPOINT: "saving a checkpoint",
  goodput.Cause.EVALUATION: "evaluating",
  goodput.Cause.SAMPLING: "generating samples",
}


class Observer:
  """Callbacks of the training loop; a context entered when training begins.

  Attributes:
    ledger: Accounts for the time of the main thread.
    sources: Return further performance metrics, at the interval of summaries.
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
    """Prepares the callbacks.

    Args:
      settings: Monitoring settings; None monitors nothing.
      ledger: Started with the program; None writes no file.
      run_dir: The run directory; None writes no files.
      launch: From the command line.
      train_input: Looks up the documents of batches with spikes, and the
        examples without targets; those found before are not named again.
      resume_step: The step from which training resumes, or 0.
    """
    self.ledger = ledger or goodput.Ledger()
    self.sources: list[Callable[[], Mapping[str, float]]] = []
    self._watchdog: watchdog.Watchdog | None = None
    self._spikes: spikes.SpikeReport | None = None
    self._profiler = Profiler(None, epath.Path("."))
    self._profiler_port = launch.profiler_port if launch else None
    if settings is not None and run_dir is not None:
      if settings.watchdog is not None:
        ends = launch is not None and launch.ends_when_hung
        self._watchdog = watchdog.Watchdog(
          settings.watchdog,
          run_dir,
          host=_host(),
          # `sys.exit` would wait for the main thread.
          end=os._exit if ends else None,
        )
      # Metrics are the same in all processes; one reports them.
      is_first = _is_first()
      if settings.spikes is not None and is_first:
        self._spikes = spikes.SpikeReport(
          settings.spikes,
          run_dir / run_dirs.SPIKES,
          resume_step=resume_step,
          train_input=train_input,
        )
      if launch is not None and is_first:
        self._profiler = Profiler(launch.profile, run_dir / run_dirs.PROFILE)
        if launch.profile and launch.profile[-1] <= resume_step:
          self._print(
            f"nothing is profiled: --profile_steps={_format(launch.profile)} is"
            f" before step {resume_step + 1}, from which the run resumes"
          )
    # Shows that the first steps are being made, until their metrics are.
    self._first_steps = contextlib.ExitStack()
    self._is_shown = run_dir is not None and _is_first()
    self._train_input = train_input
    # Whether examples without targets were named.
    self._is_named = self._find_untrained() is not None
    self._cost: step_metrics.StepCost | None = None
    self._devices: Sequence[jax.Device] = ()
    self._step_memory: dict[str, float] = {}
    # Positions of the steps in flight, at most two.
    self._positions: dict[int, tuple[Position, Position]] = {}
    self._stack = contextlib.ExitStack()
    self.ledger.start(resume_step)

  def __enter__(self) -> "Observer":
    if self._watchdog is not None:
      self._stack.enter_context(self._watchdog)
    if self._profiler_port is not None:
      jax.profiler.start_server(self._profiler_port)
      self._stack.callback(jax.profiler.stop_server)
      self._print(f"profiler: port {self._profiler_port}")
    return self

  def __exit__(self, *exception: object) -> None:
    with self._stack:
      self._print(self._profiler.close())

  def is_hanging(self) -> bool:
    """Whether no step has finished within the watchdog's limit."""
    return self._watchdog is not None and self._watchdog.is_hanging()

  @contextlib.contextmanager
  def compiling(self) -> Iterator[None]:
    """Returns the context in which the step is compiled; prints its time."""
    print("compiling the training step", flush=True)
    begin = time.monotonic()
    with (
      self.span(goodput.Cause.COMPILE),
      stages.heartbeat("compiling the training step"),
    ):
      yield
    print(f"compiled in {time.monotonic() - begin:.1f} s", flush=True)

  def on_compile(
    self,
    traced: jax.stages.Traced,
    compiled: jax.stages.Compiled,
    *,
    length: int,
    devices: Sequence[jax.Device],
  ) -> None:
    """Counts FLOPs and memory of the compiled step; prints the basis of MFU."""
    self._devices = devices
    self._step_memory = step_metrics.step_memory(compiled)
    self._cost = step_metrics.count_step(
      traced,
      length=length,
      num_devices=len(devices),
      device_kind=devices[0].device_kind,
    )
    self._print(self._cost.note)
    # Keeps the record if the process dies in its first seconds of training.
    self.ledger.flush()

  @contextlib.contextmanager
  def training(self, step: int) -> Iterator[None]:
    """Returns the context of the loop, which starts after `step`."""
    with self.ledger.span(goodput.Cause.PRODUCTIVE):
      if self._watchdog is not None:
        self._watchdog.arm(step)
      try:
        with self._first_steps:
          if self._is_shown:
            text = "waiting for the metrics of the first steps"
            self._first_steps.enter_context(stages.heartbeat(text))
          yield
      except BaseException:
        # The first error is raised, such as a full disk.
        with contextlib.suppress(OSError):
          self.ledger.flush()
        raise
      finally:
        if self._watchdog is not None:
          self._watchdog.disarm()
      self.ledger.flush()

  @contextlib.contextmanager
  def span(self, cause: goodput.Cause) -> Iterator[None]:
    """Returns a context whose time is attributed to a cause.

    The watchdog is suspended, except for checkpoints, which may hang.
    """
    with contextlib.ExitStack() as stack:
      stack.enter_context(self.ledger.span(cause))
      if cause is goodput.Cause.CHECKPOINT:
        # No attempt resumes from a step that the file lacks.
        self.ledger.flush()
      if self._watchdog and cause is goodput.Cause.CHECKPOINT:
        stack.enter_context(self._watchdog.wait_longer())
      elif self._watchdog:
        stack.enter_context(self._watchdog.suspend())
      if cause in _STAGES and _is_first():
        stack.enter_context(stages.heartbeat(_STAGES[cause]))
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
      paused: Waits until the devices are idle and excludes the time in its
        context from the throughput. Called at the edges of a profile only.
    """
    if self._profiler.is_edge(step):
      with paused(), self.span(goodput.Cause.OTHER):
        self._print(self._profiler.move(step))
    return self._profiler.step(step)

  def on_dispatch(
    self, step: int, *, before: Position, after: Position
  ) -> None:
    """Records the data position before and after the batch of a step."""
    self._positions[step] = before, after

  def on_finish(self, step: int, values: Mapping[str, float]) -> None:
    """Processes the metrics of a finished step; steps come in order."""
    self.ledger.record_step(step)
    if self._watchdog is not None:
      self._watchdog.beat(step)
    before, after = self._positions.pop(step, ({}, {}))
    # A batch without targets has no loss, and its gradient is zero.
    if self._spikes is not None and "loss" in values:
      self._spikes.observe(step, values, before=before, after=after)

  def metrics(self, step_seconds: float) -> dict[str, float]:
    """Returns performance metrics for a mean time of a step; they are shown."""
    self._first_steps.close()
    if not self._is_named and (text := self._find_untrained()):
      self._is_named = True
      if _is_first():
        self._print(f"warning: train: {text}")
    values = {"step_seconds": step_seconds}
    if self._cost is not None:
      values |= self._cost.values(step_seconds)
      values["goodput"] = self.ledger.account().goodput
      values |= step_metrics.device_memory(
        self._devices, step=self._step_memory
      )
      values |= step_metrics.host_memory()
    for find in self.sources:
      values |= find()
    return values

  def _find_untrained(self) -> str | None:
    source = self._train_input
    return None if source is None else source.describe_untrained()

  def _print(self, line: str | None) -> None:
    if line:
      print(line, flush=True)


def _format(window: range) -> str:
  return f"{window.start}:{window.stop}"


def _is_first() -> bool:
  return jax.process_index() == 0


def _host() -> str:
  """Returns a suffix that distinguishes the files of this host."""
  if jax.process_count() == 1:
    return ""
  return f"-host{jax.process_index()}"


class Profiler:
  """Traces a window of steps once."""

  def __init__(self, window: range | None, folder: epath.Path) -> None:
    """Prepares to write `<folder>/plugins/profile/<time>/*.xplane.pb`."""
    self._window = window or range(0)
    self._folder = folder
    self._is_tracing = False
    self._stack = contextlib.ExitStack()

  def is_edge(self, step: int) -> bool:
    """Returns whether the window begins with this step or ends before it."""
    return self._is_tracing != (step in self._window)

  def move(self, step: int) -> str | None:
    """Starts or stops the trace before a step, while the devices are idle.

    Returns:
      A line for the user at the end of the window.
    """
    if not self.is_edge(step):
      return None
    if self._is_tracing:
      return self.close()
    local = os.fspath(self._folder)
    if not files.is_local(local):
      local = self._stack.enter_context(tempfile.TemporaryDirectory())
      self._stack.callback(_copy, pathlib.Path(local), self._folder)
    else:
      self._folder.mkdir(parents=True, exist_ok=True)
    jax.profiler.start_trace(local)
    self._is_tracing = True
    return None

  def step(self, step: int) -> contextlib.AbstractContextManager[object]:
    """Returns a context that annotates the dispatch of a step in the trace."""
    if not self._is_tracing:
      return contextlib.nullcontext()
    return jax.profiler.StepTraceAnnotation("train", step_num=step)

  def close(self) -> str | None:
    """Stops the trace if there is one; returns a line for the user."""
    if not self._is_tracing:
      return None
    # Never traced again, even if writing fails.
    self._is_tracing, window, self._window = False, self._window, range(0)
    with self._stack:
      jax.profiler.stop_trace()
    return f"profile of steps {_format(window)}: {os.fspath(self._folder)}"


def _copy(source: pathlib.Path, target: epath.Path) -> None:
  """Copies the files of a directory tree."""
  for path in source.rglob("*"):
    if path.is_file():
      name = path.relative_to(source)
      files.write_bytes(target / name, path.read_bytes())
