"""Progress of a training run: a bar on a terminal, plain lines elsewhere."""

import abc
from collections.abc import Callable, Mapping
import sys
import time
from typing import IO, Final, Protocol, cast, runtime_checkable

from rich import console as rich_console
from rich import progress as rich_progress

from paxon.runner.monitoring import metrics_file

_TRAIN = "train"
# In the order shown; missing metrics are omitted.
_TRAIN_METRICS = {
  "loss": "loss {:.4f}",
  "learning_rate": "lr {:.2e}",
  # That of any unit.
  metrics_file.RATE: "{:,.0f} {}/s",
  "model_tflops_per_device": "{:.3g} TFLOP/s",
  "mfu": "MFU {:.1%}",
}
# Of the summaries of layers with these names the largest is shown.
_LARGEST = {
  "load_max": "experts' load up to {:.2f}",
  "dropped": "up to {:.1%} dropped",
}
_SUMMARIES = "summaries/"
# Instead of the loss, which a batch or a split without targets does not have.
NO_TARGETS: Final = "no targets"
_EVAL_METRICS = ("loss", "bits_per_byte", "accuracy")


@runtime_checkable
class TextStream(Protocol):
  """A text stream such as `sys.stdout`."""

  def write(self, text: str, /) -> object:
    """Writes text."""

  def flush(self) -> object:
    """Flushes the stream."""


def make(
  *,
  num_train_steps: int,
  first_step: int = 0,
  stream: TextStream | None = None,
) -> metrics_file.SummaryWriter:
  """Returns a bar if the stream is a terminal, else plain lines."""
  stream = sys.stdout if stream is None else stream
  console = rich_console.Console(file=cast(IO[str], stream))
  if console.is_terminal and not console.is_dumb_terminal:
    return ProgressBar(
      num_train_steps=num_train_steps, first_step=first_step, console=console
    )
  return ProgressLines(num_train_steps=num_train_steps, stream=stream)


class _Progress(metrics_file.SummaryWriter):
  """Writes the metrics of a step as one line of text, without baselines.

  The remaining time is estimated from the steps since the first report, so
  that compilation does not count.
  """

  def __init__(
    self, *, num_train_steps: int, clock: Callable[[], float]
  ) -> None:
    self._num_train_steps = num_train_steps
    self._clock = clock
    self._start: tuple[int, float] | None = None

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Shows the metrics of a step."""
    if split.startswith(metrics_file.BASELINE_PREFIX):
      return
    shown = _format(split, values)
    if split == _TRAIN and (left := self._time_left(step)):
      shown.append(f"{left} left")
    self._show(step, split, shown)

  @abc.abstractmethod
  def _show(self, step: int, split: str, shown: list[str]) -> None: ...

  def _line(self, step: int, shown: list[str]) -> str:
    return "  ".join([f"step {step}/{self._num_train_steps}", *shown])

  def _time_left(self, step: int) -> str | None:
    """Returns `1:02:03`, or None before the second report."""
    now = self._clock()
    if self._start is None:
      self._start = step, now
      return None
    start_step, start_time = self._start
    if step <= start_step:
      return None
    seconds = (now - start_time) / (step - start_step)
    return duration(seconds * max(self._num_train_steps - step, 0))


class ProgressLines(_Progress):
  """Prints one line per step with metrics."""

  def __init__(
    self,
    *,
    num_train_steps: int,
    stream: TextStream,
    clock: Callable[[], float] = time.monotonic,
  ):
    super().__init__(num_train_steps=num_train_steps, clock=clock)
    self._stream = stream

  def _show(self, step: int, split: str, shown: list[str]) -> None:
    print(self._line(step, shown), file=self._stream, flush=True)

  def close(self) -> None:
    """Does nothing; every line was flushed."""


class ProgressBar(_Progress):
  """A live bar, with lines above it for evaluations.

  It is drawn from the start, so that it shows the elapsed time while the step
  is compiled. Meanwhile `print` writes above it.
  """

  def __init__(
    self,
    *,
    num_train_steps: int,
    first_step: int,
    console: rich_console.Console,
    clock: Callable[[], float] = time.monotonic,
  ):
    super().__init__(num_train_steps=num_train_steps, clock=clock)
    self._bar = rich_progress.Progress(
      rich_progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
      rich_progress.BarColumn(bar_width=None),
      rich_progress.TextColumn("{task.fields[metrics]}"),
      rich_progress.TimeElapsedColumn(),
      console=console,
      expand=True,
      # Low, to leave the processor to the step.
      refresh_per_second=2,
    )
    self._task = self._bar.add_task(
      "train",
      total=num_train_steps,
      completed=first_step,
      metrics="starting",
    )
    self._bar.start()

  def _show(self, step: int, split: str, shown: list[str]) -> None:
    if split == _TRAIN:
      self._bar.update(self._task, completed=step, metrics="  ".join(shown))
    else:
      line = self._line(step, shown)
      self._bar.console.print(line, markup=False, highlight=False)

  def close(self) -> None:
    """Draws the bar a last time and releases the terminal."""
    self._bar.stop()


def duration(seconds: float) -> str:
  """Returns seconds as `h:mm:ss`, or `m:ss` below an hour."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02d}:{rest:02d}"
  return f"{minutes}:{rest:02d}"


def _format(split: str, values: Mapping[str, float]) -> list[str]:
  """Returns the metrics to show, each with its name."""
  if split != _TRAIN:
    shown = [
      f"{name} {values[name]:.4f}" for name in _EVAL_METRICS if name in values
    ]
    return [split, *(shown if values else [NO_TARGETS])]
  shown = [] if "loss" in values else [NO_TARGETS]
  for name, text in _TRAIN_METRICS.items():
    if name == metrics_file.RATE:
      rates = filter(metrics_file.is_rate, values)
      shown += [text.format(values[x], x.removesuffix(name)) for x in rates]
    elif name in values:
      shown.append(text.format(values[name]))
  for name, text in _LARGEST.items():
    of_layers = [
      value
      for key, value in values.items()
      if key.startswith(_SUMMARIES) and key.endswith(f"/{name}")
    ]
    if of_layers:
      shown.append(text.format(max(of_layers)))
  return shown
