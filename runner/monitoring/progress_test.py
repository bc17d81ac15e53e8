"""Tests for the progress of a run, on a terminal and in a pipe."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios

from etils import epath
import pytest

from paxon.runner.monitoring import progress, writers

_FIGURES = {
  "loss": 2.34567,
  "learning_rate": 1.5e-3,
  "tokens_per_second": 12345.6,
  "grad_norm": 0.5,
}


class _Clock:
  """A clock that is set by hand."""

  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


def test_pipe_gets_plain_lines_with_the_time_left():
  stream, clock = io.StringIO(), _Clock()
  lines = progress.ProgressLines(
    num_train_steps=1000, stream=stream, clock=clock
  )
  clock.now = 50.0  # Compiling.
  lines.write(10, "train", _FIGURES)
  clock.now = 60.0
  lines.write(20, "train", _FIGURES)
  lines.write(20, "validation", {"loss": 2.5, "bits_per_byte": 3.60674})
  lines.write(0, "baseline/xz", {"bits_per_byte": 2.0})
  lines.close()
  assert stream.getvalue().splitlines() == [
    "step 10/1000  loss 2.3457  lr 1.50e-03  12,346 tokens/s",
    # One step a second since the first report, 980 to go.
    "step 20/1000  loss 2.3457  lr 1.50e-03  12,346 tokens/s  16:20 left",
    "step 20/1000  validation  loss 2.5000  bits_per_byte 3.6067",
  ]


def test_mixtures_show_their_most_loaded_expert_and_most_dropped_choices():
  stream = io.StringIO()
  lines = progress.ProgressLines(num_train_steps=9, stream=stream)
  layers = "summaries/stack/layers/{}/feed_forward/{}"
  values = {"loss": 2.0, layers.format(0, "entropy"): 9.0}
  for layer, load, dropped in ((0, 1.5, 0.25), (1, 3.25, 0.0)):
    values[layers.format(layer, "load_max")] = load
    values[layers.format(layer, "dropped")] = dropped
  lines.write(1, "train", values)
  assert stream.getvalue() == (
    "step 1/9  loss 2.0000  experts' load up to 3.25  up to 25.0% dropped\n"
  )


def test_missing_metrics_are_omitted():
  stream = io.StringIO()
  lines = progress.ProgressLines(num_train_steps=5, stream=stream)
  lines.write(1, "train", {"loss": float("nan")})
  assert stream.getvalue() == "step 1/5  loss nan\n"


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (0.0, "0:00"),
    (59.6, "1:00"),
    (61.0, "1:01"),
    (3600.0, "1:00:00"),
    (1e5, "27:46:40"),
  ],
)
def test_duration_format(seconds, text):
  assert progress.duration(seconds) == text


class _MemoryTerminal(io.StringIO):
  """Stands in where there are no pseudo-terminals, as in a bare chroot."""

  def isatty(self) -> bool:
    return True


def _terminal(columns, use):
  """Runs `use(stream)` on a pseudo-terminal; returns what it showed."""
  try:
    parent, child = pty.openpty()
  except OSError:
    with pytest.MonkeyPatch.context() as patch:
      patch.setenv("COLUMNS", str(columns))
      use(stream := _MemoryTerminal())
      return stream.getvalue()
  fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
  with os.fdopen(child, "w") as stream:
    use(stream)
    stream.flush()
    os.set_blocking(parent, False)
    shown = b""
    while True:
      try:
        shown += os.read(parent, 65536)
      except BlockingIOError:
        break
  os.close(parent)
  return shown.decode()


@pytest.fixture(name="terminal")
def _environment(monkeypatch):
  monkeypatch.setenv("TERM", "xterm-256color")
  for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
    monkeypatch.delenv(name, raising=False)
  return monkeypatch


@pytest.fixture(name="terminal_kind", params=["pty", "memory"])
def _kind(request, monkeypatch):
  def refuse():
    raise OSError("out of pty devices")

  if request.param == "memory":
    monkeypatch.setattr(pty, "openpty", refuse)


@pytest.mark.usefixtures("terminal", "terminal_kind")
def test_terminal_gets_a_live_bar():
  def use(stream):
    bar = progress.make(num_train_steps=100, first_step=20, stream=stream)
    assert isinstance(bar, progress.ProgressBar)
    bar.write(40, "train", _FIGURES)
    bar.write(60, "train", _FIGURES)
    bar.write(60, "validation", {"loss": 2.5})
    bar.write(0, "baseline/xz", {"bits_per_byte": 2.0})
    bar.write(100, "train", {**_FIGURES, "loss": 1.25})
    bar.close()

  shown = _terminal(100, use)
  # It moves the cursor to draw over itself, hides it and gives it back.
  assert "\x1b[?25l" in shown
  assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
  text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
  assert "step 20/100" in text
  assert "starting" in text
  assert "step 60/100  validation  loss 2.5000" in text
  last = text.rstrip().splitlines()[-1]
  assert "step 100/100" in last
  for part in ("loss 1.2500", "lr 1.50e-03", "12,346 tokens/s", "0:00 left"):
    assert part in last
  assert "baseline" not in text


@pytest.mark.usefixtures("terminal", "terminal_kind")
def test_bar_fits_into_80_columns():
  def use(stream):
    bar = progress.make(num_train_steps=10000, stream=stream)
    bar.write(9990, "train", {**_FIGURES, "loss": 12.5})
    bar.write(9999, "train", {**_FIGURES, "loss": 12.5})
    bar.close()

  text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", _terminal(80, use))
  last = text.rstrip().splitlines()[-1]
  assert len(last) <= 80
  assert "12,346 tokens/s  0:00 left" in last


def test_print_is_safe_beside_the_bar(terminal):
  def use(stream):
    terminal.setattr(sys, "stdout", stream)
    bar = progress.make(num_train_steps=10)
    print("a line of the program")
    bar.close()

  assert "a line of the program" in _terminal(100, use)


def test_dumb_terminal_gets_lines(terminal):
  terminal.setenv("TERM", "dumb")

  def use(stream):
    writer = progress.make(num_train_steps=10, stream=stream)
    assert isinstance(writer, progress.ProgressLines)

  _terminal(80, use)


def test_writers_of_a_run_write_its_files(tmp_path):
  folder, stream = epath.Path(tmp_path), io.StringIO()
  writer = writers.make_train_writer(
    folder, num_train_steps=2, resume_step=0, stream=stream
  )
  writer.write(2, "train", {"loss": 1.0})
  writer.close()
  evaluation = writers.make_eval_writer(folder)
  evaluation.write(2, "test", {"loss": 1.5})
  evaluation.close()
  # Each has files of its own: both may write at the same time.
  for place, split in ((folder, "train"), (folder / "eval", "test")):
    (line,) = (place / "metrics.jsonl").read_text().splitlines()
    assert line.startswith(f'{{"step": 2, "split": "{split}"')
    assert [p.name for p in (place / "events").iterdir()] == [split]
  assert stream.getvalue() == "step 2/2  loss 1.0000\n"
