"""How far a run is: a live bar on a terminal, plain lines anywhere else."""

from collections.abc import Callable, Mapping
import sys
import time
from typing import IO, Protocol, cast, runtime_checkable

from rich import console as rich_console
from rich import progress as rich_progress

from paxon.runner.monitoring import summary_writer

_TRAIN = "train"
# In the order shown; what a run does not write is left out.
_TRAIN_FIGURES = (
  "loss",
  "learning_rate",
  "tokens_per_second",
  "model_tflops_per_device",
  "mfu",
)
_EVAL_FIGURES = ("loss", "bits_per_byte", "accuracy")


@runtime_checkable
class TextStream(Protocol):
  """Where text can be written, such as `sys.stdout`."""

  def write(self, text: str, /) -> object:
    """Writes text."""

  def flush(self) -> object:
    """Makes it visible."""


def make(
  *,
  num_train_steps: int,
  first_step: int = 0,
  stream: TextStream | None = None,
) -> summary_writer.SummaryWriter:
  """Returns the bar if the stream is a terminal, else the plain lines.

  Args:
    num_train_steps: The step at which training ends.
    first_step: The step from which it goes on.
    stream: Where to write; standard output by default.
  """
  stream = sys.stdout if stream is None else stream
  console = rich_console.Console(file=cast(IO[str], stream))
  if console.is_terminal and not console.is_dumb_terminal:
    return ProgressBar(
      num_train_steps=num_train_steps, first_step=first_step, console=console
    )
  return ProgressLines(num_train_steps=num_train_steps, stream=stream)


class ProgressLines(summary_writer.SummaryWriter):
  """Writes one line for each step that has figures.

  Args:
    num_train_steps: The step at which training ends.
    stream: Where to write.
    clock: Gives seconds; another one in tests.
  """

  def __init__(
    self,
    *,
    num_train_steps: int,
    stream: TextStream,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._num_train_steps = num_train_steps
    self._stream = stream
    self._time_left = TimeLeft(num_train_steps, clock)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Writes a line; figures of a baseline have no step and no line."""
    if split.startswith(summary_writer.BASELINE_PREFIX):
      return
    parts = [f"step {step}/{self._num_train_steps}", *_figures(split, values)]
    if split == _TRAIN:
      left = self._time_left(step)
      parts += [f"{left} left"] if left else []
    print("  ".join(parts), file=self._stream, flush=True)

  def close(self) -> None:
    """Does nothing: every line was flushed."""


class ProgressBar(summary_writer.SummaryWriter):
  """A live bar; lines above it for evaluations.

  It is drawn from the start, so that a user sees the seconds go by while the
  step is compiled. While it lives, `print` writes above it.

  Args:
    num_train_steps: The step at which training ends.
    first_step: The step from which it goes on.
    console: A terminal.
    clock: Gives seconds; another one in tests.
  """

  def __init__(
    self,
    *,
    num_train_steps: int,
    first_step: int,
    console: rich_console.Console,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._num_train_steps = num_train_steps
    self._time_left = TimeLeft(num_train_steps, clock)
    self._bar = rich_progress.Progress(
      rich_progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
      rich_progress.BarColumn(bar_width=None),
      rich_progress.TextColumn("{task.fields[figures]}"),
      rich_progress.TimeElapsedColumn(),
      console=console,
      expand=True,
      # Twice a second is live enough, and leaves the processor to the step.
      refresh_per_second=2,
    )
    self._task = self._bar.add_task(
      "train",
      total=num_train_steps,
      completed=first_step,
      figures="starting",
    )
    self._bar.start()

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Moves the bar, or writes a line above it."""
    if split.startswith(summary_writer.BASELINE_PREFIX):
      return
    figures = _figures(split, values)
    if split == _TRAIN:
      left = self._time_left(step)
      figures += [f"{left} left"] if left else []
      self._bar.update(self._task, completed=step, figures="  ".join(figures))
    else:
      line = "  ".join([f"step {step}/{self._num_train_steps}", *figures])
      self._bar.console.print(line, markup=False, highlight=False)

  def close(self) -> None:
    """Draws the bar a last time and gives the terminal back."""
    self._bar.stop()


class TimeLeft:
  """Estimates the time to the end from the steps since the first report.

  Compiling belongs to no step and lies before the first report.

  Args:
    num_train_steps: The step at which training ends.
    clock: Gives seconds.
  """

  def __init__(self, num_train_steps: int, clock: Callable[[], float]):
    self._num_train_steps = num_train_steps
    self._clock = clock
    self._start: tuple[int, float] | None = None

  def __call__(self, step: int) -> str | None:
    """Returns `1:02:03`, or None before two steps have been reported."""
    now = self._clock()
    if self._start is None:
      self._start = step, now
      return None
    start_step, start_time = self._start
    if step <= start_step:
      return None
    seconds = (now - start_time) / (step - start_step)
    return duration(seconds * max(self._num_train_steps - step, 0))


def duration(seconds: float) -> str:
  """Returns seconds as `h:mm:ss`, or `m:ss` below an hour.

  Args:
    seconds: Not negative.
  """
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02d}:{rest:02d}"
  return f"{minutes}:{rest:02d}"


def _figures(split: str, values: Mapping[str, float]) -> list[str]:
  """Returns the figures that are shown, each with its name."""
  if split != _TRAIN:
    shown = [
      f"{name} {values[name]:.4f}" for name in _EVAL_FIGURES if name in values
    ]
    return [split, *shown]
  formats = {
    "loss": "loss {:.4f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "model_tflops_per_device": "{:.3g} TFLOP/s",
    "mfu": "MFU {:.1%}",
  }
  return [
    formats[name].format(values[name])
    for name in _TRAIN_FIGURES
    if name in values
  ]
